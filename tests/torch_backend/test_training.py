"""DDP, tensor-parallel and FSDP2 training over the backend: the losses of Gloo, and of no communication at all."""

from __future__ import annotations

import pytest
import training_targets as targets

import undertow as ut


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_are_those_of_gloo(ranks: int) -> None:
    alone = {kind: targets.alone(ranks, everybody=kind != "tensor") for kind in targets.KINDS}
    for rank, (losses, calls, said) in enumerate(ut.launch(targets.every_kind, ranks, device="cpu", deadline=60)):
        assert said == []  # nothing went to the fallback
        for kind in targets.KINDS:
            assert calls[kind, "undertow"] >= targets.STEPS
            assert calls[kind, "gloo"] == 0
            ours, theirs = losses[kind, "undertow"], losses[kind, "gloo"]
            assert ours == pytest.approx(alone[kind][rank], rel=1e-5)
            if ranks == 2:  # a sum of two has one order
                assert ours == theirs
            else:
                assert ours == pytest.approx(theirs, rel=1e-6)


def test_ddp_with_a_hook_and_uneven_inputs() -> None:
    assert ut.launch(targets.data_parallel_with_hooks, 2, device="cpu", deadline=60) == [[]] * 2
