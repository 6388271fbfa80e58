"""Overlap efficiency and share of the ideal speed-up, against hand-made times."""

import ast
from pathlib import Path

import pytest

from undertow.plan import metrics
from undertow.plan.metrics import overlap_efficiency, share_of_ideal


@pytest.mark.parametrize(("total", "efficiency"), [(10.0, 1.0), (14.0, 0.0), (12.0, 0.5), (16.0, -0.5), (9.0, 1.25)])
def test_overlap_efficiency_is_the_hidden_part_of_the_communication(total: float, efficiency: float) -> None:
    assert overlap_efficiency(total, gemm=10.0, serial=14.0) == pytest.approx(efficiency)


@pytest.mark.parametrize("serial", [10.0, 9.0])
def test_overlap_efficiency_is_undefined_with_nothing_to_hide(serial: float) -> None:
    assert overlap_efficiency(10.0, gemm=10.0, serial=serial) is None


@pytest.mark.parametrize(("gemm", "communication"), [(10.0, 5.0), (5.0, 10.0), (10.0, 10.0)])
def test_perfect_overlap_reaches_the_whole_ideal(gemm: float, communication: float) -> None:
    assert share_of_ideal(max(gemm, communication), gemm, communication) == pytest.approx(1.0)
    assert share_of_ideal(gemm + communication, gemm, communication) == pytest.approx(0.0)


def test_share_of_ideal_between_the_ends() -> None:
    # S = 15 / 12 = 1.25, S_ideal = 15 / 10 = 1.5
    assert share_of_ideal(12.0, gemm=10.0, communication=5.0) == pytest.approx(0.5)


def test_share_of_ideal_is_not_reported_for_a_negligible_gain() -> None:
    assert share_of_ideal(10.4, gemm=10.0, communication=0.49) is None
    assert share_of_ideal(10.0, gemm=10.0, communication=0.51) == pytest.approx(1.0)
    assert share_of_ideal(1.0, gemm=0.0, communication=0.0) is None


def test_plan_stays_free_of_torch() -> None:
    for path in Path(metrics.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                named = [node.module or ""]
            assert not any(name.split(".")[0] == "torch" for name in named), f"{path.name} imports torch"
