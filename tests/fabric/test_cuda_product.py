"""What decides, without a GPU, by which kernel a GPU multiplies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from no_driver import imported


@pytest.mark.parametrize(
    ("gpu", "major", "kilobytes", "wanted"),
    [("A100", 8, 164, False), ("H200", 9, 228, True), ("B200", 10, 228, True), ("RTX 5090", 12, 100, False)],
)
def test_kernels_with_tma_run_where_their_stages_find_room(
    gpu: str, major: int, kilobytes: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that asks for more would fail after others have begun to wait."""
    about = SimpleNamespace(major=major, shared_memory_per_multiprocessor=kilobytes << 10)
    with imported("undertow.ops.cuda_product", monkeypatch) as module:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
        assert module.has_tma(torch.device("cuda", 0)) == wanted, gpu
