"""Ours beside TorchRec's sharded EmbeddingBagCollection: the same results and gradients, from its own input type.

Needs `torchrec` and `fbgemm-gpu-cpu` of releases that fit the torch installed (for torch 2.13: 1.8.0 of both).
"""

from __future__ import annotations

import importlib.util

import pytest
import torchrec_targets as targets

import undertow as ut

if importlib.util.find_spec("torchrec") is None or importlib.util.find_spec("fbgemm_gpu") is None:
    pytest.skip("torchrec and fbgemm-gpu-cpu are not installed", allow_module_level=True)


@pytest.mark.parametrize(
    ("pooling", "weighted", "cut", "strategy"),
    [
        ("sum", False, False, "auto"),
        ("mean", False, False, "serial"),
        ("sum", True, False, "fused"),
        ("sum", False, True, "signaled"),
        ("mean", False, True, "chunked"),
    ],
)
def test_the_same_as_torchrec(pooling: str, weighted: bool, cut: bool, strategy: str) -> None:
    for wrong in ut.launch(targets.compared, 2, device="cpu", args=(pooling, weighted, cut, strategy), deadline=120):
        assert not wrong


def test_features_are_found_by_name() -> None:
    for same, said in ut.launch(targets.other_keys, 2, device="cpu", deadline=120):
        assert same
        assert (
            "keys is ['shops', 'users', 'ads'], but must be ['ads', 'users', 'words', 'shops'], as the tables" in said
        )
