"""Plans are integers and names: everything about them is tested without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.errors import InvalidArgument, StrategyUnavailable
from undertow.plan import plan as plan_module
from undertow.plan.defaults import default_plan
from undertow.plan.plan import Plan, Share, parse_strategy, split
from undertow.plan.problem import Problem

LANES = {"net": "", "peer": "the group spans several nodes", "dma": ""}
FUSED = Plan("fused", "peer", ((0, 1),), tile=(128, 256), group_bands=8, own_last=True, piece=2048, split=0)


def test_plan_imports_no_torch() -> None:
    rooms = [path.stem for path in Path(plan_module.__file__).parent.glob("[a-z]*.py")]
    assert len(rooms) >= 11
    code = f"import sys, {', '.join(f'undertow.plan.{room}' for room in rooms)}; sys.exit('torch' in sys.modules)"
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


SIGNALED = Plan(
    "signaled",
    "peer",
    ((0, 4), (4, 6)),
    Share(24, 8, -5),
    tile=(16, 8),
    group_bands=2,
    layout="packed",
    program="two_shot",
    deterministic=True,
)


def test_every_field_survives_the_file() -> None:
    assert Plan.from_json(FUSED.to_json()) == FUSED
    assert Plan.from_json(SIGNALED.to_json()) == SIGNALED
    assert SIGNALED.digest == "685ef747efd46d94"  # plans on disk and ranks of other versions count on it
    for field in ("lane", "tile", "group_bands", "layout", "program", "deterministic", "order", "own_last", "share"):
        other = Plan(**{**{name: getattr(SIGNALED, name) for name in Plan.__slots__}, field: None})
        assert other.digest != SIGNALED.digest


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("surprise", 1, "unknown surprise"),
        ("tile", [1], "no pair"),
        ("tile", [0, 8], "plan.tile"),
        ("tile", None, "given for a signaled plan"),
        ("tile", [True, 8], "no pair"),
        ("parcels", [[0, 1.5]], "no pair"),
        ("parcels", 7, "plan in JSON"),
        ("group_bands", 0, "at least 1"),
        ("group_bands", "2", "plan.group_bands"),
        ("layout", "woven", "natural, packed"),
        ("order", ["natural"], "rotated"),
        ("own_last", 1, "true or false"),
        ("deterministic", "no", "true or false"),
        ("program", None, "a text"),
        ("share", {"multiprocessors": 1}, "share without"),
        ("share", {"multiprocessors": 0, "communication_ctas": None, "communication_priority": 0}, "plan.share"),
        ("share", {"multiprocessors": 1, "communication_ctas": None, "communication_priority": "x"}, "plan.share"),
        ("grain", "eager", "serial, chunked"),
        ("lane", None, "net, peer, dma"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: Any, said: str) -> None:
    fields = json.loads(SIGNALED.to_json())
    fields[field] = value
    with pytest.raises(InvalidArgument) as caught:
        Plan.from_json(json.dumps(fields))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fused_plan_of_before_is_read() -> None:
    fields = json.loads(FUSED.to_json())
    del fields["in_step"]
    assert Plan.from_json(json.dumps(fields)) == FUSED


@pytest.mark.parametrize("field", [one for one in Plan.__slots__ if one != "in_step"])
def test_a_missing_field_is_refused(field: str) -> None:
    fields = json.loads(FUSED.to_json())
    del fields[field]
    with pytest.raises(InvalidArgument, match=f"plan without {field}"):
        Plan.from_json(json.dumps(fields))


def problem(operator: str = "matmul_all_reduce", m: int = 40, n: int = 16) -> Problem:
    return Problem.of(operator, m, n, 8, dtype="float32", ranks=4, device="cpu", multiprocessors=2)


def changed(**fields: Any) -> Plan:
    return Plan(**{**{name: getattr(SIGNALED, name) for name in Plan.__slots__}, **fields})


def test_a_plan_fits_its_problem() -> None:
    SIGNALED.check(problem())  # 3 bands of 2 columns
    changed(layout="natural").check(problem())
    Plan("chunked", "net", ((0, 10), (10, 40))).check(problem())
    Plan("serial", "net", ((0, 7),)).check(problem("matmul_all_to_all"))  # fractions fit any rows
    changed(order="proportional").check(problem("matmul_all_to_all"))
    changed(order="proportional", parcels=((0, 0),)).check(problem("matmul_all_to_all", m=0))
    parcels = ((0, 2), (2, 4), (4, 5), (5, 6), (6, 8))
    changed(order="rotated", layout="natural", parcels=parcels).check(problem("all_gather_matmul"))


@pytest.mark.parametrize(
    ("plan", "problem", "said"),
    [
        (SIGNALED, problem(m=80), "must be made for 10 tiles of 16 x 8"),
        (SIGNALED, problem(n=17), "must be made for 9 tiles"),
        (SIGNALED, problem("matmul_reduce_scatter"), "in interleaved order"),
        (changed(parcels=((4, 6), (0, 4))), problem(), "parcel after parcel"),
        (changed(parcels=((0, 5), (4, 6))), problem(), "parcel after parcel"),
        (changed(parcels=((0, 8), (8, 6))), problem(), "parcel after parcel"),
        (changed(parcels=()), problem(), "0 parcels"),
        (changed(parcels=((0, 3), (3, 6)), layout="natural"), problem(), "whole bands"),
        (changed(tile=None), problem(), "given for a signaled plan"),
        (changed(order="rotated"), problem("all_gather_matmul"), "natural where tiles wait"),
        (
            changed(order="rotated", layout="natural", parcels=((0, 8),)),
            problem("all_gather_matmul"),
            "rows of several ranks",
        ),
        (changed(order="proportional", parcels=((0, 0),)), problem("matmul_all_to_all"), "made for 1 tiles"),
        (Plan("serial", "net", ((0, 0),)), problem("matmul_all_to_all"), "made for 40 rows"),
        (Plan("chunked", "net", ((0, 39),)), problem(), "made for 40 rows"),
        (Plan("chunked", "net", ((0, 39),)), problem("matmul_reduce_scatter"), "made for 40 rows"),
    ],
)
def test_a_plan_for_another_problem_is_refused(plan: Plan, problem: Problem, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        plan.check(problem)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_no_parcel_of_a_cpus_usual_plans_is_empty() -> None:
    """From 17 to 32 bands, as many as rows make."""
    for operator in ("matmul_all_reduce", "matmul_reduce_scatter"):
        for ranks, m in ((ranks, m) for ranks in (2, 3) for m in range(32, 200)):
            asked = Problem.of(operator, m, 64, 8, dtype="float32", ranks=ranks, device="cpu", multiprocessors=1)
            plan = default_plan(asked, "signaled", "dma")
            plan.check(asked)
            assert all(start < stop for start, stop in plan.parcels), (operator, ranks, m, plan.parcels)
