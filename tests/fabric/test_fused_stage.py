"""Stages of the fused kernels: calls of two streams follow each other; outgrown ones go, unless a graph uses them."""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_driver import World

from undertow.errors import InvalidArgument, StrategyUnavailable

CPU = torch.device("cpu")
NAMES = tuple(
    f"undertow.{name}" for name in ("fabric.stream_memory", "fabric.in_order", "fabric.cuda", "ops.fused_stage")
)


class Place:
    """A module of stages on a fake driver: what is current, what is captured, what was allocated and released."""

    def __init__(self, module: Any, cuda: Any, world: World) -> None:
        self.module, self.world = module, world
        self.current, self.capturing = world.new_stream(), set[int]()
        self.allocated: list[Any] = []
        group = types.SimpleNamespace(size=2, rank=0, barrier=lambda: None, failed=False)
        self.fabric = object.__new__(cuda.CudaFabric)
        self.fabric.group, self.fabric.device, self.fabric.kept, self.fabric.multiprocessors = group, CPU, {}, 4
        self.fabric.buffer, self.fabric._lock, self.fabric._turns = self._buffer, threading.RLock(), {}

    def _buffer(self, count: int, dtype: torch.dtype) -> Any:
        made = types.SimpleNamespace(count=count, released=False, address=lambda rank: rank)
        made.release = lambda: setattr(made, "released", True)
        self.allocated.append(made)
        return made

    def stage(self, elements: int, lines: int = 1, kind: str = "kind") -> Any:
        return self.module.stage_of(self.fabric, (kind,), elements, lines, torch.float32)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    world = World()

    class Library:
        def __getattr__(self, name: str) -> Any:
            found = world.functions().get(name)

            def call(*arguments: Any) -> int:
                assert found is not None, name
                result: int = found(*arguments)
                return result

            return call

    real: Any = ctypes.CDLL

    def opened(name: Any, *rest: Any, **more: Any) -> Any:
        return Library() if "libcuda" in str(name) else real(name, *rest, **more)

    monkeypatch.setattr(ctypes, "CDLL", opened)
    before = _forget(lambda name: name in NAMES)
    others = set(sys.modules)
    driver, order, cuda, module = (importlib.import_module(name) for name in NAMES)
    here = Place(module, cuda, world)
    events = iter(range(1, 1000))
    monkeypatch.setattr(driver, "new_event", lambda device: next(events))
    monkeypatch.setattr(driver, "current_stream", lambda device: here.current)
    monkeypatch.setattr(driver, "is_capturing", lambda: here.current in here.capturing)
    monkeypatch.setattr(order, "_captures", lambda stream, device: stream in here.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    yield here
    _forget(lambda name: name.startswith("undertow.") and name not in others)  # what was bound to the fake driver
    for name, found in before.items():
        sys.modules[name] = found
        setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], found)


def _forget(which: Callable[[str], bool]) -> dict[str, types.ModuleType]:
    """Modules that will be imported anew: `from . import` finds attributes of the package first."""
    found = {name: module for name, module in sys.modules.items() if which(name)}
    for name in found:
        del sys.modules[name]
        package = sys.modules.get(name.rpartition(".")[0])
        if package is not None and hasattr(package, name.rpartition(".")[2]):
            delattr(package, name.rpartition(".")[2])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_calls_of_two_streams_come_in_their_order(place: Place, seed: int) -> None:
    """Of one kind or of several: ranks whose GPUs took two of them in different orders would wait for each other."""
    stages, order = [place.stage(100, kind=f"kind {one}") for one in range(2)], list[int]()
    streams = (place.current, place.world.new_stream())
    for number in range(12):
        place.current = streams[number * (number + seed) % 3 % 2]
        stage = stages[number % 2 * (seed % 2)]
        stage.follow(place.fabric)
        place.world.put(place.current, lambda number=number: order.append(number))  # type: ignore[misc]
        stage.enqueued(place.fabric)
    place.world.run(seed)
    assert order == list(range(12))


def test_one_stream_waits_for_nothing(place: Place) -> None:
    stage = place.stage(100)
    for _ in range(3):
        stage.follow(place.fabric)
        stage.enqueued(place.fabric)
    assert len(place.world.streams[place.current]) == 3  # events that were recorded


def test_two_streams_of_one_capture_are_refused(place: Place) -> None:
    stage, other = place.stage(100), place.stage(100, kind="other")
    first, second = place.current, place.world.new_stream()
    place.capturing = {first, second}
    stage.follow(place.fabric)
    stage.follow(place.fabric)
    place.current = second
    for one in (stage, other):
        with pytest.raises(InvalidArgument, match="on a second stream of one CUDA graph capture"):
            one.follow(place.fabric)
    place.capturing = {second}  # the first capture has ended
    stage.follow(place.fabric)
    assert not place.world.streams[first]  # nothing that a graph would not allow was enqueued
    assert not place.world.streams[second]


def test_an_outgrown_stage_is_released(place: Place) -> None:
    small = place.stage(1 << 21)
    large = place.stage((1 << 21) + 1)
    assert large is not small
    assert large.half >= 3 * small.half // 2
    assert large.half % 64 == 0
    assert [one.released for one in place.allocated] == [True, True, False, False]
    assert place.stage(1 << 20) is large
    more = place.stage(1 << 20, lines=large.lines + 1)
    assert more.half >= large.half
    assert more.lines >= 3 * large.lines // 2


def test_a_stage_that_a_graph_uses_stays(place: Place) -> None:
    small = place.stage(1000)
    place.capturing = {place.current}
    small.follow(place.fabric)
    with pytest.raises(InvalidArgument, match="made once before it is captured"):
        place.stage(1 << 24)
    place.capturing = set()
    place.stage(1 << 24)
    assert not any(one.released for one in place.allocated)


def test_a_kernel_that_one_rank_cannot_load_is_refused_on_all(place: Place) -> None:
    with pytest.raises(StrategyUnavailable, match="rank 1 could not load the kernel"):
        place.module.agree(["", "CompilationError: no"])
    place.module.agree(["", ""])
