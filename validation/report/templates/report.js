// What the page shows, drawn anew whenever the filter changes.

const MARKS = { pass: "✓", "no-op": "·", expected: "!", refused: "!", unjudged: "?" };
const LEGENDS = {
  matrix: "The worst outcome of all checks: ✓ was compared and found right, · found nothing to rewrite, ! fails or is refused as it is known to, ? moved the outputs without a stated limit, ✗ fails. Empty: not planned, or not tried. Click for what was measured.",
  pipelines: "One line a pipeline. Latency is by that of the graph as captured; memory is the peak of what a run allocates.",
  latency: "Time of the pipeline by that of the graph as captured, in the same rounds; of no pass and of `fxopt.optimize`, by that of the model. Bars are 95 % intervals, the grey band is the A/A floor: what stays within it is no effect.",
  cases: "Every case, the failures first.",
};
const PAGE = { matrix: 60, pipelines: 200, latency: 200, cases: 200 };
const state = { view: "matrix", text: "", device: "", pairs: false, hidden: new Set(), size: 1 };
let data, cases, cells;

const at = (id) => document.getElementById(id);

// An element with attributes, listeners, and children; text is never markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name === "onclick") element.addEventListener("click", value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== undefined));
  return element;
}

const kind = (outcome) => (data.failing.includes(outcome) ? "failing" : outcome);
const badge = (outcome) => make("span", { class: `badge ${kind(outcome)}` }, outcome);
const link = (text, onclick) => make("button", { class: "link", type: "button", onclick }, text);
const toModel = (name) => link(name, () => change({ text: `model:${name}`, view: "pipelines" }));

function table(columns, rows, short = []) {
  const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
  const body = rows.map((row) => make("tr", {}, ...row.map((value, i) => make("td", { class: short.includes(i) && "short" }, value))));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function drawHead() {
  at("verdict").textContent = data.verdict;
  at("verdict").classList.toggle("failed", data.failed);
  for (const [outcome, count] of Object.entries(data.ends)) at("ends").append(make("span", { class: `badge ${kind(outcome)}` }, `${count.toLocaleString("en")} ${outcome}`));
  const singles = [...new Set(cases.map((each) => each.pipeline))].filter((name) => name && !name.includes("+")).sort();
  at("links").append(make("p", {}, "Models: ", ...[...new Set(cases.map((each) => each.model))].sort().map(toModel)));
  at("links").append(make("p", {}, "Passes: ", ...singles.map((name) => link(name, () => change({ text: name, view: "pipelines" })))));
  at("not-run").append(...data.notRun.map((text) => make("li", {}, text)));
  for (const [name, value] of Object.entries(data.conditions)) at("conditions").append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  at("refusals").append(data.refusals.rows.length ? table(data.refusals.columns, data.refusals.rows) : "No site was refused.");
  at("failures").hidden = !data.problems.rows.length;
  at("problems").append(table(data.problems.columns, data.problems.rows.map(([outcome, ...rest]) => [badge(outcome), ...rest]), [0]));
  drawSince();
}

function drawWorse() {
  const { worse, causes, toDo, run } = data.since;
  at("worse").append(make("p", { class: `worse ${causes.length ? "failed" : ""}` }, worse));
  const lines = causes.map(({ text, told, command }) =>
    make("li", {}, make("b", {}, text), make("span", { class: "quiet" }, ` ${told}. `), make("br"), make("code", {}, command), copier(command)));
  if (lines.length) at("worse").append(make("ol", { class: "causes" }, ...lines.slice(0, 10)));
  if (lines.length > 10) at("worse").append(make("details", {}, make("summary", {}, `${lines.length - 10} more causes`), make("ol", { class: "causes", start: 11 }, ...lines.slice(10))));
  if (toDo) at("worse").append(make("p", { class: "quiet" }, toDo.replaceAll("`", "")));
  at("changes").hidden = !run;
}

function copier(text) {
  return make("button", { class: "copy", type: "button", onclick: () => navigator.clipboard?.writeText(text) }, "Copy");
}

function drawSince() {
  if (!data.since) return;
  drawWorse();
  const { headline, run, rows, more } = data.since;
  at("since").append(make("p", {}, `${headline} since ${run}`));
  const regressions = rows.filter(([bad]) => bad), others = rows.filter(([bad]) => !bad);
  for (const [lines, name] of [[regressions, "regression"], [others, "other change"]])
    if (lines.length) at("since").append(make("details", {}, make("summary", {}, `${lines.length} ${name}${lines.length === 1 ? "" : "s"}`), changeList(lines)));
  if (more) at("since").append(make("p", { class: "quiet" }, `... and ${more.toLocaleString("en")} more, by: fxopt compare`));
}

function changeList(lines) {
  const line = ([bad, what, id, metric, before, after, explanation]) =>
    make("li", {}, make("span", { class: `badge ${bad && "failing"}` }, what), " ", make("b", {}, id), make("span", { class: "quiet" }, [before, after].filter(Boolean).join(" → ")), explanation);
  return make("ul", { class: "changes" }, ...lines.map(line));
}

function chosen() {
  const terms = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (cell, term) => (term.startsWith("model:") ? cell.model.toLowerCase() === term.slice(6) : cell.text.includes(term));
  return cells.filter(
    (cell) =>
      (!state.device || cell.device === state.device) &&
      (state.pairs || !cell.pipeline.includes("+")) &&
      terms.every((term) => fits(cell, term)),
  );
}

// What a row of a view is, where it is no cell.
const ROWS = {
  latency: (found) => found.filter((cell) => typeof number(cell, "latency_ratio") === "number"),
  cases: (found) => found.flatMap((cell) => cell.cases),
};

function draw() {
  const rows = ROWS[state.view]?.(chosen()) ?? chosen();
  const counts = new Map();
  for (const { outcome } of rows) counts.set(outcome, (counts.get(outcome) ?? 0) + 1);
  const found = rows.filter(({ outcome }) => !state.hidden.has(outcome));
  for (const button of document.querySelectorAll("#views button")) button.setAttribute("aria-selected", button.dataset.view === state.view);
  at("outcomes").replaceChildren(
    ...data.worst.filter((outcome) => counts.has(outcome) || state.hidden.has(outcome)).map((outcome) =>
      make("button", { type: "button", class: kind(outcome), "aria-pressed": !state.hidden.has(outcome), onclick: () => toggle(outcome) }, `${outcome} ${counts.get(outcome) ?? ""}`)),
  );
  at("search").value = state.text;
  at("pairs").checked = state.pairs;
  at("legend").textContent = LEGENDS[state.view];
  const most = PAGE[state.view] * state.size;
  const total = VIEWS[state.view](found, most, at("view"));
  if (!found.length) at("view").replaceChildren(make("p", { class: "quiet" }, "Nothing fits the filter."));
  at("more").hidden = total <= most;
  at("more").textContent = `Show more (${most.toLocaleString("en")} of ${total.toLocaleString("en")})`;
  remember({});
}

// The address leads back to what is shown.
function remember(more) {
  const { view, text, device } = state;
  history.replaceState(null, "", `#${new URLSearchParams({ view, text, device, ...more })}`);
}

const VIEWS = {
  matrix(found, most, into) {
    const pipelines = [...new Set(found.map((cell) => cell.pipeline))].sort(inOrder);
    const several = new Set(found.map((cell) => cell.device)).size > 1;
    const rows = Map.groupBy(found, (cell) => cell.model + (several ? ` · ${cell.device}` : ""));
    const head = make("tr", {}, make("th", {}, ""), ...pipelines.map((name) => make("th", { class: "pass", scope: "col" }, make("span", {}, label(name)))));
    const body = [...rows.entries()].slice(0, most).map(([name, mine]) => {
      const by = new Map(mine.map((cell) => [cell.pipeline, cell]));
      return make("tr", {}, make("th", { class: "model", scope: "row" }, toModel(mine[0].model), name.slice(mine[0].model.length)), ...pipelines.map((pipeline) => make("td", {}, by.has(pipeline) ? mark(by.get(pipeline)) : "")));
    });
    into.replaceChildren(make("div", { class: "scroll" }, make("table", { class: "matrix" }, make("thead", {}, head), make("tbody", {}, ...body))));
    return rows.size;
  },
  pipelines(found, most, into) {
    const rows = sorted(found).slice(0, most).map((cell) => [
      link(`${cell.model} · ${label(cell.pipeline)}`, () => open(cell)), badge(cell.outcome), shown(number(cell, "sites")),
      shown(number(cell, "relative_error_float64") ?? number(cell, "relative_error")), shown(number(cell, "agreement")),
      make("span", { class: effect(cell) }, shown(number(cell, "latency_ratio"))), shown(number(cell, "latency_transformed_ms")), shown(number(cell, "memory_peak_mb")),
    ]);
    into.replaceChildren(table(["pipeline", "verdict", "sites", "error", "agreement", "latency", "ms", "memory (MB)"], rows, [1]));
    return found.length;
  },
  latency(found, most, into) {
    const timed = sorted(found);
    into.replaceChildren(...plot(timed, timed.slice(0, most)));
    return found.length;
  },
  cases(found, most, into) {
    const order = (each) => data.worst.indexOf(each.outcome);
    const rows = found.sort((left, right) => order(left) - order(right)).slice(0, most).map((each) => [badge(each.outcome), link(each.id, () => open(each.cell)), each.stage, each.reason, shown(each.seconds)]);
    into.replaceChildren(table(["outcome", "case", "stage", "reason", "seconds"], rows, [0]));
    return found.length;
  },
};

function sorted(found) {
  return [...found].sort((left, right) => (left.model < right.model ? -1 : left.model > right.model ? 1 : inOrder(left.pipeline, right.pipeline)));
}

function mark(cell) {
  const sign = data.failing.includes(cell.outcome) ? "✗" : (MARKS[cell.outcome] ?? "?");
  const title = `${cell.model}, ${label(cell.pipeline)}, ${cell.device}: ${cell.outcome}`;
  return make("button", { class: `mark ${kind(cell.outcome)}`, type: "button", title, "aria-label": title, onclick: () => open(cell) }, sign);
}

// All rows on one logarithmic axis, whatever the model.
function plot(timed, rows) {
  const ends = timed.flatMap((cell) => ["latency_ratio_low", "latency_ratio_high", "latency_ratio"].map((name) => number(cell, name))).filter((value) => value > 0);
  const low = Math.max(0.05, Math.min(0.9, ...ends.slice(0, 50000)) / 1.05), high = Math.min(20, Math.max(1.1, ...ends.slice(0, 50000)) * 1.05);
  const place = (value) => (100 * Math.log(Math.min(high, Math.max(low, value)) / low)) / Math.log(high / low);
  const percent = (value) => `${place(value).toFixed(2)}%`;
  const span = (from, to) => ({ left: percent(from), width: `${(place(to) - place(from)).toFixed(2)}%` });
  const ticks = [1, 0.5, 2, 0.25, 4, 0.1, 10, 0.7, 1.4, 0.8, 1.2, 0.6, 1.7, 3, 0.35, 6, 0.2, 0.15, 0.9, 1.1]
    .filter((tick) => tick > low && tick < high)
    .reduce((kept, tick) => (kept.every((other) => Math.abs(place(other) - place(tick)) > 9) ? [...kept, tick] : kept), []);
  const axis = make("div", { class: "axis" }, make("span"), make("div", { class: "track" }, ...ticks.map((tick) => make("span", { style: { left: percent(tick) } }, String(tick)))), make("span", {}, "latency, graph = 1"));
  const drawn = [axis];
  let model;
  for (const cell of rows) {
    if (cell.model !== model) drawn.push(make("p", { class: "group" }, toModel((model = cell.model))));
    const [ratio, from, to, floor] = ["", "_low", "_high"].map((end) => number(cell, `latency_ratio${end}`)).concat(number(cell, "latency_ratio_floor") ?? 0);
    const track = make("div", { class: "track" },
      floor ? make("i", { class: "floor", style: span(Math.max(low, 1 - floor), 1 + floor) }) : undefined,
      make("i", { class: "one", style: { left: percent(1) } }), make("i", { class: "bar", style: span(from ?? ratio, to ?? ratio) }), make("i", { class: "dot", style: { left: percent(ratio) } }));
    drawn.push(make("button", { class: `row ${effect(cell)}`, type: "button", onclick: () => open(cell) },
      make("span", { class: "name" }, label(cell.pipeline)), track, make("span", { class: "value" }, `${ratio.toFixed(3)} [${[from ?? ratio, to ?? ratio].map((end) => end.toFixed(2)).join(", ")}]`)));
  }
  return drawn;
}

function open(cell) {
  const close = make("button", { class: "copy close", type: "button", onclick: () => at("cell").close() }, "Close");
  const title = make("h2", { id: "cell-title" }, `${cell.model} · ${label(cell.pipeline)} · ${cell.device}`);
  at("cell").replaceChildren(close, title, ...cell.cases.map(details));
  at("cell").showModal();
  remember({ cell: cell.cases[0].id });
}

function details(found) {
  const numbers = Object.entries(found.numbers).map(([name, value]) => [data.numbers[name].heading, shown(value)]);
  const facts = Object.entries(found.facts).map(([name, value]) => [name.replaceAll("_", " "), value]);
  const grid = make("dl", { class: "facts" }, ...[...facts, ...numbers].map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  const command = data.command.replace("{model}", found.model).replace("{case}", found.id);
  const copy = make("button", { class: "copy", type: "button", onclick: (event) => navigator.clipboard?.writeText(command).then(() => (event.target.textContent = "Copied")) }, "Copy");
  return make("div", { class: "check" }, make("p", {}, badge(found.outcome), ` ${found.check}`, found.stage ? `, stage ${found.stage}` : "", ` · ${shown(found.seconds)} s`),
    found.reason ? make("p", {}, found.reason) : undefined, grid, make("pre", {}, make("code", {}, command), copy));
}

function change(to) {
  Object.assign(state, { size: 1 }, to);
  draw();
  if (to.view) at("explore").scrollIntoView({ block: "start" });
}

function toggle(outcome) {
  if (!state.hidden.delete(outcome)) state.hidden.add(outcome);
  draw();
}

async function start() {
  data = await unpacked();
  cases = casesOf(data);
  cells = cellsOf(cases, data.worst);
  const devices = [...new Set(cells.map((cell) => cell.device))].sort();
  at("device").append(make("option", { value: "" }, "all devices"), ...devices.map((name) => make("option", { value: name }, name)));
  at("device").hidden = devices.length < 2;
  at("filter").addEventListener("submit", (event) => event.preventDefault());
  at("search").addEventListener("input", () => change({ text: at("search").value }));
  at("device").addEventListener("change", () => change({ device: at("device").value }));
  at("pairs").addEventListener("change", () => change({ pairs: at("pairs").checked }));
  at("more").addEventListener("click", () => (state.size++, draw()));
  for (const button of document.querySelectorAll("#views button")) button.addEventListener("click", () => change({ view: button.dataset.view }));
  at("cell").addEventListener("click", (event) => event.target === at("cell") && at("cell").close());
  const asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  Object.assign(state, asked.view in VIEWS ? { view: asked.view } : {}, { text: asked.text ?? "", device: devices.includes(asked.device) ? asked.device : "" });
  at("cell").addEventListener("close", () => remember({}));
  drawHead();
  draw();
  const linked = cells.find((cell) => cell.cases.some((found) => found.id === asked.cell));
  if (linked) open(linked);
}

start().catch((error) => (at("verdict").textContent = `This page cannot be shown: ${error.message}; summary.md beside it has the same.`));
