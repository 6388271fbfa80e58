"""The parts of the demonstration that need no ranks: exact inputs, the check itself, and what is said."""

from __future__ import annotations

import pytest
import torch

from undertow.fabric.timer import Estimate
from undertow.ops.matmul_all_reduce import reference
from undertow.report.demo import Effort, _seen, exact_shards, wrong_results
from undertow.report.tables import StrategyResult

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "inner"), [(2, 64), (4, 640), (8, 1000)])
def test_sums_of_the_inputs_are_exact_in_any_order(dtype: torch.dtype, size: int, inner: int) -> None:
    effort = Effort(24, 40, dtype, 1, 1)
    shards = [exact_shards(rank, size, inner, effort, CPU) for rank in range(size)]
    y = reference([x for x, _ in shards], [w for _, w in shards])
    wide = sum(x.double() @ w.double() for x, w in shards)
    assert torch.equal(y.double(), wide)
    backwards = reference([x for x, _ in shards[::-1]], [w for _, w in shards[::-1]])
    assert torch.equal(y, backwards)
    assert not torch.equal(shards[0][0], shards[1][0])


def test_every_stretch_of_the_inner_extent_is_used() -> None:
    x, w = exact_shards(0, 4, 1000, Effort(50, 8, torch.bfloat16, 1, 1), CPU)
    assert {int(value) for value in x.unique()} == {-1, 0, 1}
    assert {int(value) for value in w.unique()} == {-1, 0, 1}
    assert (x != 0).sum(dim=1).tolist() == [64] * 50
    assert (x[:, :100] != 0).any()
    assert (x[:, -100:] != 0).any()


def test_wrong_results_are_named() -> None:
    expected = torch.ones(3, 3)
    y = torch.ones(3, 3)

    def right() -> None:
        y.fill_(1)

    def lazy() -> None:
        """Writes nothing: the poison stays."""

    def partly() -> None:
        y[:2] = 1

    assert wrong_results({"right": right, "lazy": lazy, "partly": partly}, y, expected) == ["lazy", "partly"]


def test_what_was_seen_in_one_sentence() -> None:
    serial = StrategyResult("serial:dma", Estimate(2, 2, 2))
    slow = StrategyResult("chunked:net", Estimate(2, 2, 2), Estimate(0.9, 0.8, 1.0), -0.2, None)
    fast = StrategyResult("chunked:dma", Estimate(1, 1, 1), Estimate(1.5, 1.4, 1.6), 0.75, 0.7, emulated=True)
    assert (
        _seen([serial, slow])
        == "Nothing clearly beat serial here: at best chunked:net ran 0.90× ± 0.10 as fast as serial."
    )
    said = _seen([serial, slow, fast])
    assert said.startswith("chunked:dma ran 1.50× ± 0.10 as fast as serial over the emulated link, hiding 75%")
