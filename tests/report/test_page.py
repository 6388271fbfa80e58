"""The page of `undertow report`: whatever is in the files stays text, and a browser draws what they hold."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.table import Table

from undertow.cli.report import report
from undertow.collective.algorithms import LIBRARY
from undertow.errors import InvalidArgument
from undertow.fabric.events import Event, Timeline
from undertow.fabric.timer import Comparison, Estimate
from undertow.report import page, plots
from undertow.report.page_files import schedule_section, sections
from undertow.report.tables import DEMO_FORMAT, StrategyResult

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&\u2028'\""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Elements(HTMLParser):
    """The elements of a page, with their attributes, and the text of each kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.found)


def hostile_files(folder: Path) -> list[Path]:
    """One file of every kind, with hostile text wherever text can be."""
    timeline = Timeline(
        [Event(HOSTILE, rank, HOSTILE, 100 * n, 70, HOSTILE, {HOSTILE: HOSTILE}) for rank in (0, 1) for n in range(5)],
        {HOSTILE: HOSTILE},
    )
    timeline.save(folder / "timeline.json")
    Comparison("wall", 1, {HOSTILE: [1.0, 2.0], "b": [2.0, 2.5]}, 0, {HOSTILE: [HOSTILE]}).save(folder / "bench.json")
    row = StrategyResult(HOSTILE, Estimate(1e-3, 9e-4, 2e-3), Estimate(1.5, 1.4, 1.6), 0.5, 0.6, True, HOSTILE)
    demo = {"format": DEMO_FORMAT, "title": HOSTILE, "sentences": [HOSTILE], "rows": [row.to_json()], "environment": {}}
    (folder / "demo.json").write_text(json.dumps(demo))
    lines = [
        {"nodes": n, "ranks": n, "strategy": HOSTILE, "seconds": s, "resources": {HOSTILE: 0.1}, "problem": HOSTILE}
        for n, s in ((1, 0.5), (2, 0.9), (4, None))
    ]
    what_if = [{"what": HOSTILE, "speedup": 2.0}]
    (folder / "sim.json").write_text(json.dumps({"machine": HOSTILE, "lines": lines, "what_if": what_if}))
    return [folder / f"{name}.json" for name in ("timeline", "bench", "demo", "sim")]


@pytest.fixture
def hostile_page(tmp_path: Path) -> Path:
    made = [section for path in hostile_files(tmp_path) for section in sections(path)]
    made.append(schedule_section(LIBRARY["ring"].compile(4, target="staged")))
    made.append(page.Section(HOSTILE, (page.sentence(HOSTILE), page.facts({HOSTILE: HOSTILE}))))
    where = tmp_path / "page.html"
    where.write_text(page.page(HOSTILE, made), encoding="utf-8")
    return where


def test_text_stays_text(hostile_page: Path) -> None:
    text = hostile_page.read_text()
    elements = Elements(text)
    assert elements.count("img") == 0
    assert elements.count("script") == 3  # the data of a timeline and of a flow, and the page's own
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    assert "document.title='owned'" in "".join(elements.texts)  # shown, not lost


def test_nothing_is_fetched(hostile_page: Path) -> None:
    elements = Elements(hostile_page.read_text())
    assert not [
        attributes for _, attributes in elements.found if {"src", "href", "xlink:href", "srcset"} & set(attributes)
    ]
    assert not re.search(r"\bfetch\(|XMLHttpRequest|import\(|url\(", hostile_page.read_text())
    policies = [one["content"] for tag, one in elements.found if tag == "meta" and "http-equiv" in one]
    assert policies
    assert str(policies[0]).startswith("default-src 'none'")


def test_tables_are_those_of_the_terminal() -> None:
    shown = Table(title="a <b>")
    shown.add_column("name")
    shown.add_column("time", justify="right")
    shown.add_row("x & y", "1 < 2")
    assert page.table(shown) == (
        '<h3>a &lt;b&gt;</h3><div class="wide"><table><thead><tr><th>name</th><th class="right">time</th></tr></thead>'
        '<tbody><tr><td>x &amp; y</td><td class="right">1 &lt; 2</td></tr></tbody></table></div>'
    )


def test_a_long_timeline_shows_its_longest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_EVENTS", 10)
    made = page.timeline(Timeline([Event("e", 0, "compute", n, n) for n in range(25)]))
    data = json.loads(re.search(r'json">(.*?)</script>', made)[1])  # type: ignore[index]
    assert [event[2] for event in data["events"]] == list(range(15, 25))
    assert "shortest 15 events are left out" in made


def test_a_tall_timeline_shows_its_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_ROWS", 3)
    made = page.timeline(Timeline([Event("e", rank, "compute", 0, 0) for rank in range(5)]))
    data = json.loads(re.search(r'json">(.*?)</script>', made)[1])  # type: ignore[index]
    assert data["rows"] == [f"rank {rank} · compute" for rank in range(3)]
    assert len(data["events"]) == 3
    assert data["end"] == 1  # a moment without length can still be drawn
    assert "last 2 rows are left out" in made


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", "{", "no JSON"),
        ("a.json", "\udcff", "no JSON"),
        ("a.json", "[" * 100_000, "no JSON"),
        ("a.json", "{}", "something else in it"),
        ("a.json", "3", "something else in it"),
        ("a.json", '{"traceEvents": 5}', "TypeError"),
        ("a.json", '{"traceEvents": [{"ph": "X", "name": "a"}]}', "KeyError"),
        ("a.json", '{"format": "undertow comparison 1", "variants": {"a": {"samples": []}}}', "KeyError"),
        ("a.json", json.dumps({"format": DEMO_FORMAT, "title": "", "sentences": [], "rows": [{}]}), "KeyError"),
        ("a.json", '{"machine": "m", "lines": [{"nodes": "x"}]}', "ValueError"),
        ("a.json", "[" * 700 + "]" * 700, "RecursionError"),
        ("a.json", '{"gpus": []}', "a.json"),
        ("a.xml", "<algo", "a.xml"),
    ],
)
def test_damage_is_one_sentence(name: str, content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(Exception, match=re.escape(reason)) as caught:
        sections(path)
    assert type(caught.value).__module__ == "undertow.errors"
    assert "\n" not in str(caught.value)


def test_half_of_a_surrogate_pair_does_not_spoil_the_page(tmp_path: Path) -> None:
    path, out = tmp_path / "timeline.json", tmp_path / "page.html"
    path.write_text(json.dumps(Timeline([Event("\ud800", 0, "compute", 0, 5)], {"name": "\ud800"}).to_chrome()))
    report([path], out, "title \ud800")
    assert "<dd>?</dd>" in out.read_text()


def test_a_number_that_nobody_measured_is_refused(tmp_path: Path) -> None:
    row = StrategyResult("a", Estimate(float("nan"), 1.0, 1.0)).to_json()
    demo = {"format": DEMO_FORMAT, "title": "t", "sentences": [], "rows": [row], "environment": {}}
    (tmp_path / "demo.json").write_text(json.dumps(demo))
    with pytest.raises(InvalidArgument, match="nan is no measure"):
        sections(tmp_path / "demo.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        sections(tmp_path / "none.json")


def test_plots_place_what_they_are_given() -> None:
    made = plots.curves({"a": [(1, 1), (10, 10), (100, 100)], "zero": [(1, 0)]}, "t", "x", "y")
    circles = re.findall(r'circle cx="([\d.]+)" cy="([\d.]+)"', made)
    xs, ys = ([float(pair[side]) for pair in circles] for side in (0, 1))
    assert len(circles) == 3  # what is not positive has no place on a logarithmic axis
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1])
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2])
    assert plots.curves({}, "t", "x", "y") == ""
    assert plots.bars({"a": (0.0, 0.0, 0.0)}, "t", "ms") == ""
    widths = re.findall(r'<rect x="210" y="\d+" width="([\d.]+)"', plots.bars({"a": (1, 1, 1), "b": (2, 2, 4)}, "", ""))
    assert float(widths[1]) == pytest.approx(2 * float(widths[0]), rel=1e-3)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian's package: chromium)")
def test_a_browser_draws_it(hostile_page: Path) -> None:
    def drawn(fragment: str) -> str:
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
        address = f"{hostile_page.as_uri()}#{fragment}"
        done = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    whole = drawn("")
    assert 'data-ready="yes"' in whole
    assert 'data-drawn="10"' in whole
    assert 'data-step="0"' in whole
    title = re.search(r"<title>(.*?)</title>", whole, re.DOTALL)
    assert title is not None
    assert title[1].startswith("&lt;/script&gt;")
    part = drawn("timeline0=0..150&flow0=2")
    assert re.search(r'data-from="0" data-to="150"', part)
    assert 'data-drawn="4"' in part  # two events of each rank begin before 150 ns
    assert 'data-step="2"' in part
    moves = [int(found) for found in re.findall(r'data-moves="(\d+)"', part)]
    assert moves == [4]  # every rank of a ring sends one chunk in a step
