"""Plans are integers and names: everything about them is tested without torch."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.errors import InvalidArgument, StrategyUnavailable
from undertow.plan.plan import Plan, Share, parse_strategy, split

LANES = {"net": "", "peer": "the group spans several nodes", "dma": ""}


def test_plan_imports_no_torch() -> None:
    code = (
        "import sys, undertow.plan.plan, undertow.plan.machine, undertow.plan.metrics; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.integers(0, 1000), st.integers(1, 40))
def test_split_follows_tensor_split(count: int, parts: int) -> None:
    ranges = split(count, parts)
    sizes = [stop - start for start, stop in ranges]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert all(one[1] == other[0] for one, other in pairwise(ranges))


def test_round_trip_and_digest() -> None:
    plan = Plan("chunked", "dma", ((0, 3), (3, 7)), Share(multiprocessors=16, communication_ctas=4))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.digest == Plan.from_json(plan.to_json()).digest
    assert plan.digest != Plan("chunked", "dma", ((0, 4), (4, 7))).digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"grain": "serial", "lane": "moon", "parcels": []}',
        '{"grain": 1, "lane": "net", "parcels": [[1]]}',
    ],
)
def test_foreign_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="plan is"):
        Plan.from_json(text)


@pytest.mark.parametrize("parcels", [((0, 3),), ((0, 3), (4, 7)), ((0, 4), (3, 7)), ((0, 7), (7, 8)), ((0, 9),)])
def test_parcels_must_cover_the_rows_once(parcels: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidArgument, match="7 rows"):
        Plan("chunked", "net", parcels).check_rows(7)


def test_parcels_may_come_in_any_order() -> None:
    Plan("chunked", "net", ((4, 7), (0, 4))).check_rows(7)
    Plan("serial", "net", ((0, 0),)).check_rows(0)


def test_strategies() -> None:
    grains = ("serial", "chunked")
    assert parse_strategy("chunked:dma", grains, LANES, "net") == ("chunked", "dma")
    assert parse_strategy("serial", grains, LANES, "net") == ("serial", "net")
    with pytest.raises(StrategyUnavailable, match=r"several nodes.*serial:net"):
        parse_strategy("serial:peer", grains, LANES, "net")
    with pytest.raises(StrategyUnavailable, match="no fused form"):
        parse_strategy("fused:net", grains, LANES, "net")
    with pytest.raises(InvalidArgument, match="strategy is 'fast'"):
        parse_strategy("fast", grains, LANES, "net")
