"""Parts of a CPU, and of a GPU with a driver that is made up; the real one's are tested where there is a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from undertow import errors
from undertow.c3.together import _Divided
from undertow.fabric import green
from undertow.fabric.share import bound, bounded_grids, on_part, on_threads
from undertow.plan.plan import Share


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


# -- a GPU's parts, with a driver that is made up ----------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


def test_bounded_grids_tell_kernels_and_cublas(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ["cublas"]

    def library(name: str | None = None) -> str:
        chosen.extend([] if name is None else [name])
        return chosen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    device = torch.device("cuda", 0)

    def fails() -> None:
        with bounded_grids(64, device):
            assert bound() == 64
            raise KeyError

    assert bound() is None
    with bounded_grids(100, device):
        assert bound() == 100
        assert torch._C._get_sm_carveout_experimental() == 32
        with bounded_grids(None, device):
            assert bound() == 100
        with pytest.raises(KeyError):
            fails()
        assert bound() == 100
        assert chosen[-1] == "cublaslt"
    assert bound() is None
    assert chosen[-1] == "cublas"
    assert torch._C._get_sm_carveout_experimental() is None
    with pytest.raises(errors.InvalidArgument, match="at most the 132 SMs"), bounded_grids(133, device):
        pass
    with pytest.raises(errors.InvalidArgument, match="multiprocessors is 0"), bounded_grids(0, device):
        pass


class Driver:
    """Splits SMs as Hopper does, in multiples of 8, and remembers which SMs each green context was given."""

    def __init__(self) -> None:
        self.contexts: list[int] = []
        self.splits = 0
        self.fails = ""

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or not hasattr(Driver, f"call_{name}"):
            raise AttributeError(name)
        return lambda *arguments: 700 if name == self.fails else getattr(self, f"call_{name}")(*arguments)

    def call_cuDeviceGetDevResource(self, device: object, whole: Any, kind: Any) -> int:
        whole._obj.type, whole._obj.multiprocessors = kind.value, 132
        return 0

    def call_cuDevSmResourceSplitByCount(
        self, part: Any, groups: Any, whole: Any, rest: Any, flags: object, count: Any
    ) -> int:
        self.splits += 1
        taken = -(-count.value // 8) * 8
        part._obj.multiprocessors, rest._obj.multiprocessors = taken, max(0, whole._obj.multiprocessors - taken)
        groups._obj.value = 1
        return 0

    def call_cuDevResourceGenerateDesc(self, description: Any, resource: Any, count: object) -> int:
        description._obj.value = resource._obj.multiprocessors
        return 0

    def call_cuGreenCtxCreate(self, context: Any, description: Any, device: object, flags: Any) -> int:
        assert flags.value == 1
        self.contexts.append(description.value)
        context._obj.value = 1000 + len(self.contexts)
        return 0

    def call_cuGreenCtxStreamCreate(self, stream: Any, context: Any, flags: object, priority: object) -> int:
        stream._obj.value = context.value + 1000
        return 0


@pytest.fixture
def driver(card: None, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(green.ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: ("stream", handle))
    green.halves.cache_clear()
    return made


def test_a_card_is_divided_once(driver: Driver) -> None:
    first, second = green.halves(0, 100)
    assert (first.multiprocessors, second.multiprocessors) == (104, 28)
    assert driver.contexts == [104, 28]
    assert driver.splits == 1
    assert green.halves(0, 100) == (first, second)
    assert driver.splits == 1, "the same parts again, not others that overlap with them"


def test_the_communicating_part_is_split_off(driver: Driver) -> None:
    """32 SMs are what the driver gives; 100 it would round up to 104, and leave 28."""
    computing, beside = green.divided(torch.device("cuda", 0), 100)
    second, first = green.halves(0, 32)
    assert (first.multiprocessors, second.multiprocessors) == (100, 32)
    assert (computing, beside) == (first, second)
    assert driver.splits == 1


def test_grids_fit_the_part_that_computes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs that wait for each other must all run at once, so they are told how many SMs the driver left them."""
    fabric: Any = SimpleNamespace(
        stream=lambda name, priority: None, device=torch.device("cuda", 0),
        divide=lambda count: green.divided(torch.device("cuda", 0), count),
    )  # fmt: skip
    chosen: Any = SimpleNamespace(share=Share(multiprocessors=123))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    with _Divided(fabric, chosen).computing():
        assert bound() == 116, "the other part was rounded up"
        with on_part(120):
            assert bound() == 116
    assert bound() is None


@pytest.mark.parametrize("count", [0, -1, 132, 500])
def test_both_sides_need_multiprocessors(driver: Driver, count: int) -> None:
    with pytest.raises(errors.InvalidArgument, match="between 1 and 131"):
        green.halves(0, count)


def test_what_the_driver_refuses_is_said(driver: Driver) -> None:
    with pytest.raises(errors.StrategyUnavailable, match="cannot take 131 of 132"):
        green.halves(0, 131)
    driver.fails = "cuGreenCtxCreate"
    with pytest.raises(errors.StrategyUnavailable, match="cuGreenCtxCreate failed with CUDA error 700"):
        green.halves(0, 64)
