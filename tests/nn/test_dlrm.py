"""The DLRM example: it learns, and several ranks follow the loss curve of one."""

from __future__ import annotations

import dlrm_targets as targets
import pytest

import undertow as ut

OPTIONS = {"steps": 24, "batch": 256, "tests": 2048}


@pytest.mark.parametrize("strategy", ["fused:peer", pytest.param("signaled:dma", marks=pytest.mark.nightly)])
def test_ranks_follow_the_loss_curve_of_one(strategy: str) -> None:
    one = ut.launch(targets.train, 1, device="cpu", kwargs={**OPTIONS, "strategy": "serial"})[0]
    two = ut.launch(targets.train, 2, device="cpu", kwargs={**OPTIONS, "strategy": strategy})
    for found in two:
        assert found["losses"] == pytest.approx(one["losses"], rel=2e-3)
        assert found["auc"] == pytest.approx(one["auc"], abs=5e-3)
        assert strategy in found["explained"]
    assert abs(one["auc_before"] - 0.5) < 0.06
    assert one["auc"] > 0.7
