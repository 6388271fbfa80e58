"""The CPU's partition. The GPU's is tested where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from undertow import errors
from undertow.fabric.share import on_threads


def test_threads_are_limited_inside_and_restored() -> None:
    before = torch.get_num_threads()
    with on_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), on_threads(1):
        raise KeyError
    assert torch.get_num_threads() == before


def test_none_is_everything() -> None:
    before = torch.get_num_threads()
    with on_threads(None):
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("count", [0, -3])
def test_nothing_is_refused(count: int) -> None:
    with pytest.raises(errors.InvalidArgument, match="multiprocessors is"), on_threads(count):
        pass
