"""What ranks hold whole, in real ranks: its gradients, and the norm of all gradients."""

from __future__ import annotations

import pytest
import shared_targets as targets

import undertow as ut


@pytest.mark.parametrize(
    ("hows", "ranks"),
    [
        (["FSDP2"], 4),
        (["copy", "recomputed", "frozen", "patched", "named twice"], 2),
        (["graph"], 2),
        (["layer by layer"], 2),
    ],
)
def test_gradients_of_what_ranks_share(hows: list[str], ranks: int) -> None:
    assert all(ut.launch(targets.shared_gradients, ranks, device="cpu", args=(hows,)))


def test_gradients_of_what_is_used_otherwise() -> None:
    assert all(ut.launch(targets.odd_shared, 2, device="cpu"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_norm_of_all_gradients(ranks: int) -> None:
    for after in ut.launch(targets.clipped, ranks, device="cpu"):
        assert after == pytest.approx([0.1, 0.3, 0.02, after[3]], rel=1e-4)
