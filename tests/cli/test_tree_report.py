"""The report is one file that a browser shows without a network, and says when drafting loses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from treedraft.cli.charts import Bars, Diagram, Line, Lines, layout
from treedraft.cli.svg import svg
from treedraft.heads import load_head, save_head
from treedraft.infer import load_target

from .conftest import Call

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, ring: Path, heads: Path, prompts: Path) -> Path:
    """A report of two heads, with costs and a run in which drafting loses."""
    from treedraft.cli.main import run

    folder = tmp_path_factory.mktemp("report")
    target = load_target(str(ring), "fp32")
    other = load_head(heads, target.facts, target.layers())
    other.load_state_dict({name: 0.9 * weight for name, weight in other.state_dict().items()})
    save_head(other, folder / "poor", target.facts)
    asked = ["--target", str(ring), "--dtype", "fp32", "--compile", "off"]

    def do(*arguments: object) -> None:
        with pytest.raises(SystemExit) as ended:
            run([str(a) for a in arguments])
        assert not ended.value.code

    records, costs = [], []
    for name, own in (("good", heads), ("poor", folder / "poor")):
        records += ["--record", folder / f"{name}.safetensors"]
        costs += ["--costs", folder / f"{name}.json"]
        do("tree", "record", *asked, "--heads", own, "--prompts", prompts, "--max-new-tokens", 13, "--out", records[-1])
        do("tree", "cost", *asked, "--heads", own, "--nodes", 8, "--contexts", 16, "--batches", 1, "--repeats", 1,
           "--out", costs[-1])  # fmt: skip
    do("bench", *asked, "--heads", folder / "poor", "--prompts", prompts, "--tree", "best:4", "--max-new-tokens", 12,
       "--repeats", 1, "--modes", "plain", "--modes", "tree", "--json", folder / "run.json")  # fmt: skip
    content = json.loads((folder / "run.json").read_text())
    content["ratio"]["tree_vs_plain"] = 0.63
    (folder / "run.json").write_text(json.dumps(content))
    do("tree", "report", *records, *costs, "--label", "good heads", "--label", "poor <heads>", "--tree", "chain:2",
       "--run", f"static={folder / 'run.json'}", "--largest", 6, "--out", folder / "out")  # fmt: skip
    return folder / "out"


def test_the_page_is_one_file_that_fetches_nothing(report: Path):
    page = (report / "index.html").read_text()
    assert not re.search(r"(src|href)=|@import|url\(|https?://", page)
    for name in (
        "tree-1",
        "tree-2",
        "tree-3",
        "tree-4",
        "tau",
        "speed",
        "forward",
        "depth",
        "category",
        "measured-speed",
    ):
        assert f'<figure id="{name}">' in page
    assert "poor &lt;heads&gt;" in page
    assert "poor <heads>" not in page


def test_the_page_says_what_was_measured_and_when_drafting_loses(report: Path):
    page = (report / "index.html").read_text()
    assert "0.63 times, drafting loses" in page
    for column in ("draft", "forward", "verify", "spread", "settings", "no heads"):
        assert f"<th>{column}</th>" in page
    assert "fp32, sdpa, batch 1" in page


def test_every_chart_has_a_png(report: Path):
    pytest.importorskip("matplotlib")
    found = {file.stem for file in report.glob("*.png")}
    assert {"tree-1", "tau", "speed", "forward", "depth", "category", "measured-tau"} <= found
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in report.glob("*.png"))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
def test_a_browser_shows_the_page_and_the_numbers_under_the_mouse(report: Path, tmp_path: Path):
    probe = """<script>
    addEventListener('load', () => {
      const point = document.querySelector('#tau [data-tip]'), box = point.getBoundingClientRect();
      point.dispatchEvent(new MouseEvent('mousemove', {clientX: box.x, clientY: box.y}));
      const tip = document.getElementById('tip');
      const boxes = [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect());
      document.title = JSON.stringify({tip: tip.textContent, shown: getComputedStyle(tip).display,
        charts: boxes.filter(b => b.width > 200 && b.height > 100).length, wide: document.body.scrollWidth});
    });</script></body>"""
    page = tmp_path / "probe.html"
    page.write_text((report / "index.html").read_text().replace("</body>", probe))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,2400", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title, done.stdout[:500] + done.stderr[-500:]
    seen = json.loads(title[1])
    assert seen["tip"].startswith("good heads: N 2, τ")
    assert seen["shown"] == "block"
    assert seen["charts"] == (report / "index.html").read_text().count("<figure")
    assert seen["wide"] <= 1280


def test_labels_and_costs_must_go_with_the_records(call: Call, report: Path, tmp_path: Path):
    record = report.parent / "good.safetensors"
    asked = ("tree", "report", "--record", record, "--out", tmp_path, "--largest", 4)
    assert "2 of --label for 1 records" in call(*asked, "--label", "a", "--label", "b").err.replace("\n", " ")
    assert "other heads" in call(*asked, "--costs", report.parent / "poor.json").err
    assert call(*asked, "--run", "nothing").code == 2


def test_charts_place_values_where_the_axes_say():
    chart = Lines(
        "x", "t", "N", "τ", [Line("a & b", [1, 3], [1.0, 2.0], [0.5, 1.5], [1.5, 2.5], marked=1)], (1.2, "plain")
    )
    drawn = svg(chart)
    assert "a &amp; b: N 3, τ 2 (1.5 to 2.5)" in drawn
    assert "chosen: 3" in drawn
    heights = [float(y) for y in re.findall(r'class="point" cx="[\d.]+" cy="([\d.]+)"', drawn)]
    assert heights[0] > heights[1]  # larger values stand higher
    bars = svg(Bars("b", "t", "share", ["one", "two"], ["s"], [[0.25, float("nan")]], percent=True))
    assert "s, one: 25.0%" in bars
    assert "two:" not in bars


def test_trees_are_drawn_with_parents_over_their_children():
    parents = [-1, 0, 1, 1, 0]
    places = layout(parents)
    assert [depth for _, depth in places] == [0, 1, 2, 2, 1]
    assert places[1][0] == (places[2][0] + places[3][0]) / 2
    drawn = svg(Diagram("d", "t", parents, [0, 0, 0, 1, 1], [1.0, 0.5, 0.25, 0.125, 0.1]))
    assert "candidate 1 at depth 2: 12.5% of rounds accept it, 25.0% of those that accept its parent" in drawn
