"""`undertow collective` on schedule files of other systems, and its pictures."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from undertow.cli import app
from undertow.collective.algorithms import LIBRARY
from undertow.collective.topology import Topology
from undertow.report.collective_picture import MOST_ROWS, flow, svg, terminal


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDERTOW_FLIGHT_DIR", str(tmp_path / "flight"))
    before = signal.getsignal(signal.SIGTERM)
    LIBRARY["two_shot"].compile(2).save("two.xml")
    LIBRARY["two_shot"].compile(2, target="direct").save("two.json")
    yield
    signal.signal(signal.SIGTERM, before)


def call(*arguments: object, code: int = 0) -> tuple[str, str]:
    done = CliRunner().invoke(app, ["collective", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout, done.stderr


def test_check_says_right_and_how_many_slots() -> None:
    said = call("check", "two.xml")[0]
    assert said.startswith("two_shot  2 ranks  staged  out of place")
    assert "right  least slots that work: 2" in said
    assert "2 ranks  direct  out of place" in call("check", "two.json")[0]


def test_check_says_what_is_wrong() -> None:
    text = Path("two.xml").read_text()
    Path("wrong.xml").write_text(text.replace('type="cpy"', 'type="nop"', 1))
    said, error = call("check", "wrong.xml", code=1)
    assert "is refused at wrong.xml:" in said
    assert "1 of 1 are refused." in error
    Path("short.xml").write_text(text[:200])
    assert "short.xml cannot be read: line 2: this is no XML" in call("check", "short.xml", code=1)[1]
    Path("odd.xml").write_text(text.replace('type="r"', 'type="nop"', 1))
    assert "messages are sent from gpu" in call("check", "odd.xml", code=1)[0]
    assert "no such file" in call("check", "none.json", code=1)[1]


def test_options_that_a_file_contradicts() -> None:
    assert "--ranks is 3, but must be 2 or left out" in call("check", "two.xml", "-n", 3, code=1)[1]
    assert "only for calls out of place" in call("check", "two.xml", "--in-place", code=1)[1]
    assert "--ranks" in call("show", "ring", code=2)[1]


def test_forms_of_a_file_are_chosen_and_all_checked() -> None:
    text = Path("two.xml").read_text().replace('inplace="0"', 'inplace="1"', 1)
    Path("both.xml").write_text(text)
    assert "only for calls out of place" in call("show", "two.xml", "--in-place", code=1)[1]
    assert "in place" in call("compile", "both.xml", "--in-place", "-o", "one.xml")[0]
    assert 'inplace="1" outofplace="0"' in Path("one.xml").read_text()
    call("compile", "both.xml", "-o", "again.xml")
    assert Path("again.xml").read_text() == text
    Path("wrong.xml").write_text(text.replace('type="cpy"', 'type="nop"'))  # in place, nobody misses the copies
    call("compile", "wrong.xml", "--in-place")
    for command in ("compile", "show"):
        assert "is refused at wrong.xml" in call(command, "wrong.xml", code=1)[1]


def test_run_and_bench() -> None:
    assert "4096 bytes of float32" in call("run", "two.json", "--bytes", "4K")[0]
    said = call("bench", "two.xml", "two.json", "--min-bytes", "1K", "--max-bytes", "1K", "--iterations", 2)[0]
    assert said.count("# Wrong elements: 0 OK") == 2


def test_a_gather_in_both_forms() -> None:
    """Its contract says where buffers meet only in place, and its root is not named."""
    LIBRARY["gather_direct"].compile(2, root=1).save("gather.xml")
    text = Path("gather.xml").read_text().replace('inplace="0"', 'inplace="1"', 1)
    assert 'coll="gather"' in text
    Path("gather.xml").write_text(text)
    assert call("check", "gather.xml")[0].count("right") == 2
    assert call("run", "gather.xml", "--bytes", "1K")[0].count("right") == 2
    said = call("bench", "gather.xml", "--min-bytes", "1K", "--max-bytes", "1K", "--iterations", 2)[0]
    assert "# Wrong elements: 0 OK" in said


def test_compile_from_and_to_every_format() -> None:
    call("compile", "two.xml", "-o", "again.xml")
    assert Path("again.xml").read_bytes() == Path("two.xml").read_bytes()
    call("compile", "two.json", "-o", "again.json", "--format", "mscclpp")
    assert Path("again.json").read_bytes() == Path("two.json").read_bytes()
    call("compile", "ring", "-n", 4, "-o", "ring.xml", "--protocol", "LL128")
    assert 'proto="LL128"' in Path("ring.xml").read_text()
    call("compile", "ring", "-n", 4, "-o", "ring.json", "--format", "mscclpp")
    assert "right" in call("check", "ring.json")[0]
    refused = call("compile", "two.xml", "-o", "two.plan", "--format", "mscclpp", code=1)[1]
    assert "two_shot cannot be written as MSCCL++ JSON: only a direct schedule can be" in refused


def test_show_in_the_terminal() -> None:
    said = call("show", "two_shot", "-n", 4)[0].splitlines()
    assert said[0] == "two_shot for all_reduce, 4 ranks, staged, out of place: 32 moves in 8 steps"
    assert [line.split()[:2] for line in said[1:5]] == [["rank", str(rank)] for rank in range(4)]
    assert all(len(line.split()[2]) == 8 for line in said[1:5])
    assert said[1].split()[2] == "03210123"
    assert "rank 1" in call("show", "two.xml")[0]


def test_show_as_svg() -> None:
    call("show", "ring", "-n", 8, "-o", "ring.svg")
    drawn = ElementTree.parse("ring.svg").getroot()
    boxes = list(drawn.iter("{http://www.w3.org/2000/svg}g"))
    assert len(boxes) == 176  # own copies, sums, copies of sums
    assert {one[2].text for one in boxes} == {str(chunk) for chunk in range(8)}
    assert len({one[1].get("fill") for one in boxes}) == 8
    assert "script" not in Path("ring.svg").read_text()


def test_many_ranks_are_summed_up() -> None:
    shown = flow(LIBRARY["all_gather_doubling"].compile(256, check=False))
    lines = list(terminal(shown, columns=40))
    assert len(lines) == MOST_ROWS + 2
    assert lines[1].startswith("0-7 ")
    assert len(svg(shown)) < 200_000


def test_pictures_in_the_documentation_are_of_the_code_as_it_is() -> None:
    folder = Path(__file__).parents[2] / "docs" / "pictures"
    for name, program, nodes in (
        ("ring-8", "ring", Topology.flat(8)),
        ("two-shot-8", "two_shot", Topology.flat(8)),
        ("hierarchical-2x8", "hierarchical", Topology.grid(2, 8)),
    ):
        assert (folder / f"{name}.svg").read_text() == svg(flow(LIBRARY[program].compile(topology=nodes))), name
