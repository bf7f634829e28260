"use strict";
// The rows of the run, unpacked from the page itself: cases, and cells of all cases of one model, pipeline and device.

async function unpacked() {
  const text = document.getElementById("data").textContent.trim();
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function casesOf(data) {
  const present = (columns, index) => Object.entries(columns).filter(([, values]) => values[index] !== null && values[index] !== "");
  return data.cases.model.map((model, index) => {
    const found = { index };
    for (const [name, values] of Object.entries(data.cases)) found[name] = values[index];
    found.id = [model, found.pipeline || "eager", found.device, found.check].join("-");
    found.numbers = Object.fromEntries(present(numbersOf(data), index).map(([name, values]) => [name, values[index]]));
    found.facts = Object.fromEntries(present(data.facts, index).map(([name, values]) => [name, values[index]]));
    return found;
  });
}

function numbersOf(data) {
  return Object.fromEntries(Object.entries(data.numbers).map(([name, { values }]) => [name, values]));
}

function cellsOf(cases, worst) {
  const cells = new Map();
  for (const found of cases) {
    const key = JSON.stringify([found.model, found.pipeline, found.device]);
    const { model, pipeline, device } = found;
    if (!cells.has(key)) cells.set(key, { model, pipeline, device, cases: [] });
    found.cell = cells.get(key);
    found.cell.cases.push(found);
  }
  for (const cell of cells.values()) {
    const outcomes = new Set(cell.cases.map((found) => found.outcome));
    cell.outcome = worst.find((outcome) => outcomes.has(outcome));
    const said = cell.cases.map((found) => [found.check, found.reason, found.facts.grade]);
    cell.text = [cell.model, cell.pipeline, cell.device, cell.outcome, ...said.flat()].join(" ").toLowerCase();
  }
  return [...cells.values()];
}

// A number that any case of a cell has.
function number(cell, name) {
  return cell.cases.map((found) => found.numbers[name]).find((value) => value !== undefined);
}

function label(pipeline) {
  return pipeline.replaceAll("+", " → ") || "(no pass)";
}

function shown(value) {
  if (typeof value !== "number") return String(value ?? "-");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}

// How a cell compares with the graph: an interval without 1, and a median beyond the A/A floor.
function effect(cell) {
  const [ratio, low, high, floor] = ["", "_low", "_high", "_floor"].map((end) => number(cell, `latency_ratio${end}`));
  if (low === undefined || Math.abs(ratio - 1) <= (floor ?? 0)) return "same";
  return low > 1 ? "slower" : high < 1 ? "faster" : "same";
}

// The full pipelines after no pass, where a narrow page shows them too, single passes by name, and then pairs.
function rank(pipeline) {
  return pipeline === "" ? 0 : pipeline.includes("+") ? 3 : pipeline === "all" || pipeline === "exact" ? 1 : 2;
}

function inOrder(left, right) {
  return rank(left) - rank(right) || (left < right ? -1 : left > right ? 1 : 0);
}
