"""For tests of lanes without a GPU: their modules on a driver of streams only."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from fake_driver import World
from fake_node import CHUNK


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, World]]:
    """The lane's module and the driver's, bound to a fake driver."""
    world = World()

    class Library:
        def __getattr__(self, name: str) -> Any:
            functions = world.functions()
            found = functions.get(name)

            def call(*arguments: Any) -> int:
                assert found is not None, name
                result: int = found(*arguments)
                return result

            return call

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    names = ("undertow.fabric.stream_memory", "undertow.fabric.cuda_lanes")
    before = {name: sys.modules.pop(name, None) for name in names}
    import undertow.fabric

    for name in names:  # `from . import` finds attributes of the package first
        if hasattr(undertow.fabric, name.rsplit(".", 1)[1]):
            delattr(undertow.fabric, name.rsplit(".", 1)[1])
    import undertow.fabric.cuda_lanes as lanes
    import undertow.fabric.stream_memory as module

    events = iter(range(1, 1000))
    monkeypatch.setattr(lanes, "_MOST_CHUNK", CHUNK)
    monkeypatch.setattr(
        module, "new_stream", lambda device, priority=0: types.SimpleNamespace(cuda_stream=world.new_stream())
    )
    monkeypatch.setattr(module, "new_event", lambda device: next(events))
    monkeypatch.setattr(module, "is_capturing", lambda: False)
    yield lanes, module, world
    for name in names:
        sys.modules.pop(name, None)
        delattr(undertow.fabric, name.rsplit(".", 1)[1])
        if before[name] is not None:
            sys.modules[name] = before[name]  # type: ignore[assignment]
            setattr(undertow.fabric, name.rsplit(".", 1)[1], before[name])
