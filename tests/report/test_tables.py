"""Tables: the figures in them, the marks for what is missing or emulated, plain text in pipes."""

from __future__ import annotations

import io

import pytest

from undertow.fabric.timer import Comparison, Estimate
from undertow.report.tables import (
    StrategyResult,
    comparison_table,
    factor,
    percent,
    plain,
    seconds,
    show,
    strategy_results,
    strategy_table,
)


@pytest.fixture
def comparison() -> Comparison:
    """A GEMM of 10 ms and a copy of 4 ms over two lanes; chunking hides half of it over one, all over the other."""
    times = {
        "gemm": 10e-3,
        "moved:net": 4e-3,
        "moved:dma": 4e-3,
        "serial:net": 14e-3,
        "serial:dma": 15e-3,
        "chunked:net": 12e-3,
        "chunked:dma": 10e-3,
    }
    return Comparison("hand", 1, {name: [value] * 5 for name, value in times.items()})


LANES = {f"{grain}:{lane}": f"serial:{lane}" for grain in ("serial", "chunked") for lane in ("net", "dma")}
MOVED = {name: name.replace("serial", "moved").replace("chunked", "moved") for name in LANES}


def test_results_compare_each_strategy_with_the_serial_one_of_its_lane(comparison: Comparison) -> None:
    rows = strategy_results(comparison, serial=LANES, gemm="gemm", communication=MOVED, emulated={"chunked:dma"})
    found = {row.name: row for row in rows}
    assert list(found) == ["serial:net", "serial:dma", "chunked:net", "chunked:dma"]
    assert found["chunked:net"].speedup == Estimate(*[pytest.approx(14 / 12)] * 3)
    assert found["chunked:net"].efficiency == pytest.approx(0.5)
    assert found["chunked:net"].share == pytest.approx((14 / 12 - 1) / 0.4)
    assert found["chunked:dma"].speedup == Estimate(*[pytest.approx(1.5)] * 3)
    assert found["chunked:dma"].efficiency == pytest.approx(1.0)
    assert found["chunked:dma"].share == pytest.approx(1.0)
    assert [row.name for row in rows if row.emulated] == ["chunked:dma"]


def test_without_parts_there_are_times_only(comparison: Comparison) -> None:
    rows = strategy_results(comparison, serial=None)
    assert len(rows) == 7
    assert all((row.speedup, row.efficiency, row.share) == (None, None, None) for row in rows)


def test_table_shows_missing_values_and_marks_emulated_ones() -> None:
    rows = [
        StrategyResult("serial:net", Estimate(14e-3, 13.9e-3, 14.2e-3), Estimate(1, 1, 1), 0.0, 0.0),
        StrategyResult("chunked:dma", Estimate(10e-3, 9e-3, 10.5e-3), Estimate(1.4, 1.38, 1.45), 1.0, None, True),
        StrategyResult("fused", None, note="not yet built"),
    ]
    lines = plain(strategy_table(rows, title="matmul_all_reduce")).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert lines[0] == "matmul_all_reduce"
    assert cells[0] == ["strategy", "time", "speed-up over serial", "overlap E", "share of ideal", "remarks"]
    assert cells[2] == ["serial:net", "14.00 ms ± 0.20", "1.00× ± 0.00", "0%", "0%", ""]
    assert cells[3] == ["chunked:dma", "10.00 ms ± 1.00", "1.40× ± 0.05", "100%", "–", "emulated"]
    assert cells[4] == ["fused", "–", "–", "–", "–", "not yet built"]


def test_remarks_are_left_out_where_there_are_none() -> None:
    assert "remarks" not in plain(strategy_table([StrategyResult("serial:net", Estimate(1, 1, 1))]))


def test_comparison_table_gives_ratios_to_the_reference(comparison: Comparison) -> None:
    text = plain(comparison_table(comparison, against="serial:net"))
    line = next(line for line in text.splitlines() if "chunked:net" in line)
    assert "12.00 ms" in line
    assert "0.86×" in line
    reference = next(line for line in text.splitlines() if line.startswith("| serial:net"))
    assert reference.rstrip("| ").endswith("–")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.5, "2.500 s ± 0.000"),
        (0.1234, "123.4 ms ± 0.0"),
        (12.3e-6, "12.30 µs ± 0.00"),
        (4e-7, "0.400 µs ± 0.000"),
    ],
)
def test_seconds_choose_their_unit(value: float, text: str) -> None:
    assert seconds(Estimate(value, value, value)) == text


def test_missing_figures() -> None:
    assert [seconds(None), factor(None), percent(None)] == ["–"] * 3
    assert percent(-0.25) == "-25%"


def test_show_writes_plain_text_to_a_file_and_colour_to_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    table = strategy_table([StrategyResult("serial:net", Estimate(1e-3, 1e-3, 1e-3))])
    file, terminal = io.StringIO(), Terminal()
    show(table, file)
    show(table, terminal)
    assert "| serial:net " in file.getvalue()
    assert "\x1b" not in file.getvalue()
    assert "╭" in terminal.getvalue(), "plain printing changed the table"


def test_show_survives_a_narrow_encoding() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    show(strategy_table([StrategyResult("serial:net", Estimate(1e-6, 1e-6, 1e-6))]), file)
    file.flush()
    assert b"1.000 ?s ? 0.000" in raw.getvalue()
