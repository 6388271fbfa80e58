"""The layers of `undertow.nn` in a virtual node: the checks of the CPU, with tensors on the GPU, in fp32."""

from __future__ import annotations

from collections.abc import Callable

import expert_targets as experts
import layer_targets as layers
import operator_checks
import overlap_pass_targets as passes
import pytest
import shared_targets as shared
import torch
import vocabulary_targets as vocabulary

import undertow as ut

Check = tuple[Callable[..., object], tuple[object, ...]]
CHECKS: tuple[Check, ...] = (
    (layers.linears, (False,)), (layers.linears, (True,)), (layers.attention, (False,)), (layers.attention, (True,)),
    (layers.mlp, (True, True)), (layers.compiled, ()), (shared.clipped, ()), (layers.experts, ()),
    (experts.as_whole, ("auto",)), (experts.as_whole, ("chunked:peer",)), (experts.as_whole, ("signaled:dma",)),
    (experts.checkpoints, ()), (vocabulary.embeddings, (torch.float32,)), (vocabulary.embeddings, (torch.bfloat16,)),
    (vocabulary.tied, ()), (vocabulary.losses, (torch.float32,)), (vocabulary.losses, (torch.bfloat16,)),
)  # fmt: skip


def run() -> None:
    group = ut.init()
    for check, arguments in CHECKS:
        assert check(*arguments), check.__name__
        operator_checks.settle(group)
        if group.rank == 0:
            print(check.__name__, arguments, flush=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_check(ranks: int) -> None:
    ut.launch(run, ranks, device="cuda", deadline=60)


def test_the_compilers_pass() -> None:
    """Collectives by the backend `undertow`: no other connects ranks that share a GPU."""
    for found in ut.launch(passes.graphs, 2, device="cuda", args=("fake",), deadline=60):
        assert found["several"] == {"gather": 1}
    for told in ut.launch(passes.layers, 2, device="cuda", args=("traced",), deadline=60):
        assert all(apart < 1e-4 for apart, _ in told.values()), told
