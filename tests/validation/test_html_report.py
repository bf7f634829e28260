"""The HTML report: what it holds, that it stays small, and clicks in a browser."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import shutil
import subprocess

import pandas as pd
import pytest

from validation import report, store
from validation.records import Case, Check, Outcome
from validation.report import html as html_view

CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
CASE = Case("bert-base", ("MergeLinears",), "cpu", Check.EQUIVALENCE)


def test_the_data_has_every_case_that_ran_and_every_number(table):
    found = html_view.data(table, None)
    cases = found["cases"]
    ran = table[table["outcome"] != "skip"].reset_index(drop=True)
    assert cases["model"] == ran["model"].tolist()
    assert cases["reason"] == ran["reason"].tolist()
    errors = found["numbers"]["relative_error_float64"]
    values = pd.Series(errors["values"], dtype=float)
    assert values.isna().equals(ran["relative_error_float64"].isna())
    assert values.dropna().tolist() == pytest.approx(
        ran["relative_error_float64"].dropna().tolist(), rel=1e-3
    )
    assert errors["heading"] == "relative error float64"


class Requests(html.parser.HTMLParser):
    """Collects what a browser would fetch for a page."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in {"src", "href", "srcset", "data", "action"} and not (value or "").startswith("#"):
                self.found.append((tag, name, value))


def test_html_asks_nothing_of_the_network_and_holds_no_markup_of_records(table):
    page = html_view.document(table)
    assert Requests(page).found == []
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in page
    assert "alert(1)" not in page


CLICKS = """
const told = [];
const wait = (ready) => new Promise((done) => { const ask = () => (ready() ? done() : setTimeout(ask, 20)); ask(); });
const tell = (name, value) => told.push([name, value]);
const text = (selector) => [...document.querySelectorAll(selector)].map((element) => element.textContent);
const press = (selector) => document.querySelector(selector).click();
(async () => {
  await wait(() => document.querySelector(".mark"));
  tell("verdict", text("#verdict")[0]);
  tell("not run", text("#not-run li"));
  tell("since", text("#since .changes b"));
  tell("counts", text("#since summary"));
  tell("order", ["B", "A+B", "A", "all", ""].sort(inOrder));
  tell("passes", text(".matrix th.pass"));
  tell("models", text(".matrix th.model"));
  press(".mark.failing");
  tell("cell", text("#cell h2")[0]);
  tell("address of the cell", location.hash);
  tell("open", document.getElementById("cell").open);
  tell("checks", text("#cell .check > p:first-child"));
  tell("reason", text("#cell .check").join(" "));
  tell("commands", text("#cell pre code"));
  press("#cell .close");
  tell("closed", !document.getElementById("cell").open);
  press('[data-view="latency"]');
  tell("rows", document.querySelectorAll("#view .row").length);
  tell("axes", document.querySelectorAll("#view .axis").length);
  press('[data-view="cases"]');
  tell("first", text("#view tbody td:first-child").slice(0, 2));
  tell("chips", text("#outcomes button"));
  press("#outcomes .failing");
  tell("hidden", text("#view .badge.failing"));
  const search = document.getElementById("search");
  search.value = "groupvit MergeLinears";
  search.dispatchEvent(new Event("input"));
  tell("found", text("#view .link"));
  press('[data-view="matrix"]');
  press(".matrix th.model .link");
  tell("page of a model", [search.value, document.querySelectorAll("#view thead th").length, text("#view .link").length]);
  tell("address", location.hash);
  tell("wide", document.documentElement.scrollWidth <= window.innerWidth);
})().catch((error) => tell("error", String(error))).finally(() => {
  const found = document.createElement("pre");
  found.id = "told";
  found.textContent = JSON.stringify(Object.fromEntries(told));
  document.body.append(found);
});
"""


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine to open the report in")
@pytest.mark.parametrize("width", [400, 1400])
def test_clicks_in_a_browser(width, records, run, tmp_path, later):
    earlier = [
        dataclasses.replace(r, outcome=Outcome.PASS) if r.outcome is Outcome.FAIL else r for r in records
    ]
    report.write_run(store.table_of(earlier, run), tmp_path)
    report.write_run(store.table_of(records, later), tmp_path)
    page = tmp_path / "latest/clicked.html"
    page.write_text(
        (tmp_path / "latest/report.html").read_text().replace("</body>", f"<script>{CLICKS}</script></body>")
    )
    command = [
        str(CHROMIUM),
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
        *(
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--window-size={width},1000",
        ),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom"),
        page.as_uri(),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    told = json.loads(html.unescape(re.search(r'<pre id="told">(.*?)</pre>', shown, re.DOTALL)[1]))
    assert "error" not in told
    table = store.read_run(tmp_path / "latest")
    ran = table[table["outcome"] != Outcome.SKIP]
    failed = ran["outcome"].isin(["fail", "crash", "timeout", "out-of-memory", "error"])
    assert told["verdict"] == f"{failed.sum()} of {len(ran)} cases failed"
    assert len(told["not run"]) == 1
    (regression,) = table.loc[table["outcome"] == "fail", "id"]
    assert told["since"] == [regression]
    assert told["counts"] == ["1 regression"]
    assert told["order"] == ["", "all", "A", "B", "A+B"], "a narrow page shows the full pipelines"
    assert told["models"] == [
        "bert-base · cpu",
        "bert-base · cuda",
        "groupvit · cpu",
        "resnet-50 · cpu",
        "resnet-50 · cuda",
    ]
    assert told["passes"][0] == "(no pass)"
    assert (
        len(told["passes"]) == ran.loc[~ran["pipeline"].str.contains("+", regex=False), "pipeline"].nunique()
    )
    assert told["open"]
    assert told["closed"]
    assert f"cell={regression}".rpartition("-")[0] in told["address of the cell"]
    model, pipeline, device = told["cell"].split(" · ")
    command = f"fxopt validate --model {model} -k {model}-{pipeline}-{device}-"
    assert all(text.startswith(command) for text in told["commands"])
    assert len(told["commands"]) == len(told["checks"]) >= 3
    single = ran[~ran["pipeline"].str.contains("+", regex=False)]
    assert told["rows"] == single["latency_ratio"].notna().sum()
    assert told["axes"] == 1
    counts = single["outcome"].value_counts()
    assert sorted(told["chips"]) == sorted(f"{outcome} {count}" for outcome, count in counts.items())
    assert all(outcome in ("crash", "fail", "error", "timeout", "out-of-memory") for outcome in told["first"])
    assert told["first"][0] not in told["hidden"]
    assert told["hidden"]
    assert told["found"]
    assert all(name.startswith("groupvit-MergeLinears-cpu") for name in told["found"])
    assert told["page of a model"][0] == "model:groupvit"
    assert told["page of a model"][1] < 12
    assert told["address"].startswith("#view=pipelines")
    assert told["wide"] or width == 1400
