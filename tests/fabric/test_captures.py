"""When a captured graph is gone: a driver that is not there calls the destructor of the graph's user object."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest

_real = ctypes.CDLL
GRAPH, CAPTURE = 0x1234, 42


class Driver:
    """Graphs own what is moved to them."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.owned: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, number: Any, graph: Any, *rest: Any) -> int:
        status._obj.value, number._obj.value, graph._obj.value = 1, CAPTURE, GRAPH
        return 0

    def cuUserObjectCreate(self, made: Any, pointer: int, destructor: Any, count: int, flags: int) -> int:
        assert (count, flags) == (1, 1)
        self.made.append((pointer, destructor.value))
        made._obj.value = len(self.made)
        return 0

    def cuGraphRetainUserObject(self, graph: int, held: Any, count: int, flags: int) -> int:
        assert (count, flags) == (1, 1)
        self.owned.append((graph, held.value))
        return 0


class _Function:
    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> int:
        return int(self._call(*arguments))


class _Library:
    """Functions of a driver whose argument types can be set."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        return _Function(getattr(self._driver, name))


def test_a_graph_is_gone_when_its_user_object_is(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, before = Driver(), set(sys.modules)
    monkeypatch.setattr(
        ctypes,
        "CDLL",
        lambda name, *rest, **more: _Library(driver) if "libcuda" in str(name) else _real(name, *rest, **more),
    )
    from undertow.fabric import captures, stream_memory

    stream_memory._capture_info.cache_clear()
    captures._functions.cache_clear()
    try:
        graph = captures.Captured(stream=3)
        assert (graph.number, driver.owned) == (CAPTURE, [(GRAPH, 1)])
        assert not graph.is_gone
        pointer, destructor = driver.made[0]
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor)(pointer)
        assert graph.is_gone
    finally:
        stream_memory._capture_info.cache_clear()
        captures._functions.cache_clear()
        for name in set(sys.modules) - before:
            if name.startswith("undertow."):
                del sys.modules[name]
