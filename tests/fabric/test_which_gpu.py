"""Which GPU a rank computes on, and what is said to the driver before it is called: no GPU is needed."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

from undertow.fabric import launch, registry

SAID = ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process without a launcher, that has not chosen one."""
    for name in ("UNDERTOW_DEVICE", "UNDERTOW_DEVICE_INDEX", "LOCAL_RANK", *SAID):
        monkeypatch.setenv(name, "")  # so that it is as before when the test is over
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.parametrize(
    ("variables", "has_chosen", "index"),
    [
        ({}, False, 2),
        ({}, True, 5),
        ({"LOCAL_RANK": "3"}, True, 3),
        ({"LOCAL_RANK": "11"}, False, 3),
        ({"LOCAL_RANK": "3", "UNDERTOW_DEVICE_INDEX": "2"}, True, 2),
    ],
)
def test_the_launchers_then_the_one_that_was_chosen_then_the_ranks(
    variables: dict[str, str], has_chosen: bool, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that spawn ranks by themselves choose a GPU for each, and say so to nobody else."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_chosen)
    assert registry.default_device(10) == torch.device("cuda", index)


def test_the_driver_is_told_before_it_is_asked_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> bool:
        assert os.environ["CUDA_MODULE_LOADING"] == "EAGER", "it reads this when it is first called"
        raise KeyboardInterrupt

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "7")
    monkeypatch.setattr(torch.cuda, "is_available", asked)
    with pytest.raises(KeyboardInterrupt):
        registry.init()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "7", "the user's word counts"


@pytest.mark.parametrize("index", [0, 3])
def test_it_is_the_current_one_once_the_group_is_made(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what a program makes on "cuda" before its first call would be on the first GPU, of all ranks."""
    current: list[torch.device] = []
    group = SimpleNamespace(device=torch.device("cuda", index))
    monkeypatch.setattr(registry.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(registry, "as_group", lambda given, deadline: group)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert registry.init() is group
    assert current == [group.device]


def test_ranks_of_a_launch_are_told_before_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they call first; each has a GPU. And that NCCL does not end whose loss of a rank the watchdog tells."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "7")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with contextlib.ExitStack() as stack:
        found = launch._device_environments(stack, ranks=3, gpus=8, mps="auto")
    assert [one["UNDERTOW_DEVICE_INDEX"] for one in found] == ["0", "1", "2"]
    names = (*SAID, "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    assert {tuple(one[name] for name in names) for one in found} == {("EAGER", "7", "0")}


@pytest.mark.parametrize("why", ["a CPU is wanted", "torch has no CUDA", "CUDA has started"])
def test_it_is_told_nothing_where_that_would_be_of_no_use(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "a CPU is wanted":
        monkeypatch.setenv("UNDERTOW_DEVICE", "cpu")
    elif why == "torch has no CUDA":
        monkeypatch.setattr(torch.version, "cuda", None)
    else:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    registry._prepare_cuda()
    assert not any(name in os.environ for name in SAID)
