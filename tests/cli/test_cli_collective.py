"""`undertow collective`: what each command prints, and its exit code: 0 right, 1 refused, 2 misused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import undertow
from undertow.cli import app
from undertow.cli.collective import size
from undertow.collective import LIBRARY
from undertow.report.collective_tune import candidates

SOURCE = Path(undertow.__file__).parents[1]
HUGE = 10**20
GOOD = """
    from undertow.collective import custom, program
    from undertow.collective.algorithms import ring

    @program("all_reduce", chunks=lambda ranks: ranks)
    def mine(c):
        ring(c)

    @program(custom("swap", [1, 1], [1, 1], {(0, 0): [(1, 0)], (1, 0): [(0, 0)]}))
    def swap(c):
        c.rank(0).input[0].copy(c.rank(1).output[0])
        c.rank(1).input[0].copy(c.rank(0).output[0])

    if __name__ == "__main__":
        raise AssertionError("this file is not run as a script")
"""
WRONG = """
    from undertow.collective import program

    @program("all_reduce")
    def unwritten(c):
        for rank in range(c.ranks):
            c.rank(0).scratch()[0].copy(c.rank(rank).output[0])

    @program("all_reduce")
    def forgets(c):
        c.rank(0).input[0].copy(c.rank(0).output[0]).reduce(c.rank(1).input[0])

    @program("all_gather")
    def beyond(c):
        c.rank(0).input[0].copy(c.rank(1).output[c.ranks])
"""
BROKEN = {
    "syntax.py": ("x = (", "syntax.py:1: SyntaxError: '(' was never closed."),
    "name.py": ("import os\nprint(nothing)", "name.py:2: NameError: name 'nothing' is not defined."),
    "exits.py": ("import sys\nsys.exit(3)", "exits.py:2: SystemExit: 3."),
    "contract.py": (
        "from undertow.collective import program\n@program('all_rduce')\ndef f(c): pass",
        "contract.py:2: InvalidArgument: collective is 'all_rduce', but must be one of all_reduce",
    ),
    "traced.py": (
        "from undertow.collective import program\n@program('all_reduce')\ndef f(c):\n    [][c.ranks]",
        "traced.py:4: IndexError: list index out of range.",
    ),
    "empty.py": ("from undertow.collective.algorithms import ring", "it makes no program at its top level"),
}


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The commands run in this process: in a folder of their own, and what they change comes back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("UNDERTOW_FLIGHT_DIR", str(tmp_path / "flight"))
    before = signal.getsignal(signal.SIGTERM)
    Path("good.py").write_text(textwrap.dedent(GOOD))
    Path("wrong.py").write_text(textwrap.dedent(WRONG))
    yield
    signal.signal(signal.SIGTERM, before)


def call(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error."""
    done = CliRunner().invoke(app, ["collective", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout, done.stderr


# -- check -------------------------------------------------------------------------------------------------------------


def test_check_has_a_line_for_every_form() -> None:
    said, complaints = call("check", "good.py", "-n", 2)
    lines = [line.split("  ") for line in said.splitlines()]
    forms = [(cells[0], cells[2], cells[3]) for cells in lines]
    apart = [("mine", "staged", "out of place"), ("mine", "direct", "out of place")]
    assert {*apart, ("mine", "staged", "in place"), ("mine", "direct", "in place")} <= set(forms)
    assert [one[1] for one in forms if one[0] == "swap"] == ["staged", "direct"]  # its contract knows no form in place
    assert all("2 ranks" in line and line.count(" instructions") == 1 for line in said.splitlines())
    assert all("  right" in line for line in said.splitlines())
    assert all(("least slots that work: 1" in line) == ("staged" in line) for line in said.splitlines())
    assert complaints == ""
    assert not Path("__pycache__").exists()


def test_check_picks_one_program_target_and_form() -> None:
    said, _ = call("check", "good.py:mine", "-n", 3, "--target", "direct", "--in-place")
    assert [line.split("  ")[:4] for line in said.splitlines()] == [["mine", "3 ranks", "direct", "in place"]]


def test_check_knows_the_library_nodes_and_roots() -> None:
    assert call("check", "hierarchical", "-n", 4, "--nodes", 2, "--target", "staged")[0].count("right") == 2
    assert call("check", "reduce_tree", "-n", 3, "--root", 2)[0].count("right") == 4
    assert "in place" not in call("check", "all_to_all_direct", "-n", 2)[0]  # the library says it has no such form


def test_check_refuses_with_the_line_and_goes_on() -> None:
    said, complaints = call("check", "wrong.py", "-n", 2, code=1)
    assert "Program unwritten is refused at wrong.py:7: scratch[0] of rank 0 is read before anything" in said
    assert "output[0] of rank 1 does not hold what it must: nothing was written there." in said
    assert "Program beyond is refused at wrong.py:15: output[2] of rank 1 is out of bounds" in said
    assert complaints == "9 of 9 are refused.\n"


def test_check_refuses_what_does_not_fit_the_program() -> None:
    assert "ranks is 3, but must be 2, as program swap is made for." in call("check", "good.py", "-n", 3, code=1)[0]
    assert "root is 1, but must be 0" in call("check", "ring", "-n", 2, "--root", 1, code=1)[0]
    assert call("check", "ring", "-n", 4, "--nodes", 3, code=1)[1].startswith("--nodes is 3, but must be a divisor")


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_fails_by_itself_is_misuse(name: str) -> None:
    text, expected = BROKEN[name]
    Path(name).write_text(text)
    said, complaints = call("check", name, "-n", 2, code=2)
    assert said == ""
    assert complaints.count("\n") == 1
    assert f"cannot be used: {expected}" in complaints


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("check", "nowhere.py", "-n", 2), "nowhere.py cannot be used: no such file or directory."),
        (("check", "good.py:other", "-n", 2), "good.py:other cannot be used: the programs of good.py are mine, swap."),
        (("check", "dance", "-n", 2), "dance cannot be used: it is neither a file"),
        (("run", "all_reduce", "-n", 2), "all_reduce cannot be used: it is a collective, of which the library has"),
        (("check", "ring"), "--ranks"),
        (("check", "ring", "-n", 0), "--ranks"),
        (("run", "ring", "-n", 2, "--bytes", "many"), "--bytes"),
        (("run", "ring", "-n", 2, "--bytes", HUGE), "more than 1048576G"),
        *(
            (("check", "ring", "-n", 2, f"--{one}", HUGE), "65536")
            for one in ("slots", "depth", "workers", "instances")
        ),
        (("bench", "ring", "-n", 2, "--iterations", HUGE), "1000000"),
        (("bench", "ring", "-n", 2, "--dtype", "float7"), "--dtype"),
        ((), "Usage"),
    ],
)
def test_misuse(arguments: tuple[object, ...], expected: str) -> None:
    said, complaints = call(*arguments, code=2)
    assert expected in said + complaints


@pytest.mark.parametrize("arguments", [("run", "ring"), ("bench", "ring")])
def test_a_gpu_is_refused_in_one_sentence(arguments: tuple[str, ...]) -> None:
    _, complaints = call(*arguments, "-n", 2, "--device", "cuda", code=1)
    assert complaints.startswith("--device is cuda, but must be cpu: this command starts CPU ranks; ")


# -- compile -----------------------------------------------------------------------------------------------------------


def test_compile_lists_one_rank() -> None:
    said, _ = call("compile", "good.py:swap", "-n", 2, "--rank", 1)
    head, *lines = said.splitlines()
    assert head.startswith("swap for swap, 2 ranks, staged, out of place: 4 instructions, 2 waits, 2 posts, 2 workers")
    assert lines == [
        "rank 1, worker 0: 2 instructions",
        "     0  move   input[0] -> staging[0] of rank 0  (good.py:12)",
        "        post   rank 0, worker 0",
        "     1  wait   rank 0, worker 0, post 1 of 1",
        "        move   staging[0] -> output[0]  (good.py:11)",
    ]
    said, _ = call("compile", "two_shot", "-n", 3, "--target", "direct", "--in-place")
    assert "output[0] + output[0] of rank 1 + output[0] of rank 2 -> output[0], output[0] of rank 1" in said
    assert "has started" in said


def test_compile_refuses() -> None:
    assert "wrong.py:7" in call("compile", "wrong.py:unwritten", "-n", 2, code=1)[1]
    assert call("compile", "ring", "-n", 2, "--rank", 2, code=1)[1] == "--rank is 2, but must be below 2.\n"
    assert "--out is /proc/no/file" in call("compile", "ring", "-n", 2, "-o", "/proc/no/file", code=1)[1]


def test_compile_writes_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    written = []
    command = [sys.executable, "-c", "from undertow.cli import main; main()", "collective", "compile"]
    for seed in ("1", "2"):
        out = tmp_path / f"{seed}.json"
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SOURCE)}
        subprocess.run([*command, str(tmp_path / "good.py"), "-n", "2", "-o", str(out)], env=env, check=True)
        written.append(out.read_bytes())
    assert written[0] == written[1]
    found = json.loads(written[0])
    assert (found["format"], found["version"]) == ("undertow schedules", 1)
    mine, swap = found["schedules"]
    assert (mine["name"], mine["contract"]["name"], mine["staged"], mine["in_place"]) == (
        "mine",
        "all_reduce",
        True,
        False,
    )
    assert len(mine["digest"]) == 16
    assert mine["digest"] in call("compile", "good.py:mine", "-n", 2)[0]
    assert swap["codes"] == [{"file": "good.py", "function": "swap"}]
    instructions = swap["instructions"]
    assert len(instructions["kind"]) == len(instructions["wait_start"]) - 1 == 4


# -- run and bench -----------------------------------------------------------------------------------------------------


def test_run_compares_every_form_exactly() -> None:
    said, _ = call("run", "good.py", "-n", 2, "--bytes", "6K", "--dtype", "bfloat16")
    lines = said.splitlines()
    assert len(lines) == 6
    assert all("6144 bytes of bfloat16" in line and line.endswith(" us  right") for line in lines)


def test_run_does_not_start_what_is_refused() -> None:
    said, complaints = call("run", "wrong.py:forgets", "-n", 2, code=1)
    assert said.count("does not hold what it must") == 4
    assert complaints == "4 of 4 are refused or wrong.\n"


@pytest.mark.parametrize("command", ["check", "compile", "show", "run", "bench"])
def test_too_many_ranks_are_refused_before_anything_is_made(command: str) -> None:
    assert call(command, "ring", "-n", HUGE, code=1)[1] == f"--ranks is {HUGE}, but must be at most 16777216.\n"


def test_calls_larger_than_memory_are_refused() -> None:
    for arguments in (
        ("run", "ring", "-n", 2, "--bytes", "900000G"),
        ("bench", "ring", "-n", 2, "--max-bytes", "900000G"),
    ):
        complaints = call(*arguments, code=1)[1]
        assert "for which 2 ranks need about" in complaints
        assert complaints.count("\n") == 1


def test_tune_says_what_is_left_out_and_what_cannot_be() -> None:
    assert call("tune", "all_reduce", "-n", HUGE, code=1)[1].startswith(f"--ranks is {HUGE}, but must be so few")
    refused: list[str] = []
    own = [LIBRARY["all_gather_ring"], LIBRARY["ring"]]
    found = [one.program for one in candidates("all_reduce", 2, own, refused.append)]
    assert refused == ["all_gather_ring is left out: program is for all_gather, but must be for all_reduce."]
    assert found.count(LIBRARY["ring"]) == 3  # once for each length of tiles


def rows_of(said: str) -> list[list[str]]:
    return [line.split() for line in said.splitlines() if not line.startswith("#")]


def test_bench_prints_the_columns_of_nccl_tests() -> None:
    arguments = ("--min-bytes", 256, "--max-bytes", "4K", "--iterations", 2, "--against", "gloo")
    said, _ = call("bench", "good.py:mine", "all_gather", "-n", 2, *arguments)
    heads = [line for line in said.splitlines() if line.startswith("#") and " size " in line]
    columns = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
    assert " ".join(heads[0].split()[1:14]) == columns
    rows = rows_of(said)
    assert [row[:5] for row in rows] == [
        ["256", "64", "float32", "sum", "-1"],
        ["1024", "256", "float32", "sum", "-1"],
        ["4096", "1024", "float32", "sum", "-1"],
        ["256", "32", "float32", "none", "-1"],
        ["1024", "128", "float32", "none", "-1"],
        ["4096", "512", "float32", "none", "-1"],
    ]
    for row in rows[:3]:
        assert row[8] == row[12] == row[16] == row[21] == "0"  # wrong elements
        for time_at in (5, 9, 13, 18):
            assert float(row[time_at]) > 0
    for row in rows[3:]:
        assert row[9:13] == ["N/A"] * 4  # all_gather has no call in place
        assert float(row[6]) >= float(row[7])  # half of the bytes are one's own
    assert said.count("# Wrong elements: 0 OK") == 2


def test_bench_direct_with_a_contract_of_ones_own() -> None:
    said, _ = call("bench", "good.py:swap", "-n", 2, "--max-bytes", "1K", "--target", "direct", "--op", "max")
    ((size_, count, *_, algbw, busbw, wrong, a, b, c, d),) = rows_of(said)
    assert (size_, count, busbw, wrong, a, b, c, d) == ("1024", "256", "N/A", "0", *["N/A"] * 4)
    assert float(algbw) > 0


def test_bench_refuses() -> None:
    assert "wrong.py:7" in call("bench", "wrong.py:unwritten", "-n", 2, code=1)[1]
    assert call("bench", "all_gather", "-n", 2, "--in-place", code=1)[1].startswith("--in-place is given, but must be")
    arguments = ("--min-bytes", "2K", "--max-bytes", "1K")
    assert call("bench", "ring", "-n", 2, *arguments, code=1)[1].startswith("--min-bytes is 2048, but must be")


@pytest.mark.parametrize(
    ("text", "expected"), [("17", 17), ("4k", 4096), ("64M", 64 << 20), ("1GB", 1 << 30), ("0", 0)]
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "4KK", "many", "1T"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        size(text)
