"""The graph that a stream is being captured into, and whether anything can still replay it.

What a captured call writes to belongs to the graph as long as that can be replayed, and nobody says when it cannot any
more: torch destroys it with its object. So the graph holds a *user object* of the driver, which goes with it and with
all executable graphs made of it, after their last replay; its destructor posts a semaphore. The destructor is the C
library's own `sem_post`: it may run on any thread, must not call the driver, and should not wait for Python's lock.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from . import stream_memory

_SEMAPHORE_BYTES = 64  # at least those of a sem_t
_NO_DESTRUCTOR_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC: the only kind there is
_MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE: the graph's is then the only reference
_semaphores: list[Any] = []  # as long as the process: the driver holds their addresses


@cache
def _functions() -> dict[str, Any]:
    """Found at their first use: only captured calls need them."""
    driver, library = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
    handle = ctypes.POINTER(c_void_p)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "cuUserObjectCreate": (driver, [handle, c_void_p, c_void_p, c_uint32, c_uint32]),
        "cuGraphRetainUserObject": (driver, [c_void_p, c_void_p, c_uint32, c_uint32]),
        "sem_init": (library, [c_void_p, c_int, c_uint32]),
        "sem_getvalue": (library, [c_void_p, ctypes.POINTER(c_int)]),
        "sem_post": (library, [c_void_p]),
    }
    found = {}
    for name, (where, arguments) in signatures.items():
        function = getattr(where, name)
        function.argtypes, function.restype = arguments, c_int
        found[name] = function
    return found


class Captured:
    """The graph that `stream` is being captured into, by the number of its capture."""

    def __init__(self, stream: int) -> None:
        self.number, graph = stream_memory.captured_graph(stream)
        functions = _functions()
        self._semaphore = (c_uint64 * (_SEMAPHORE_BYTES // 8))()
        _semaphores.append(self._semaphore)
        functions["sem_init"](self._semaphore, 0, 0)
        held = c_void_p()
        destructor = ctypes.cast(functions["sem_post"], c_void_p)
        made = functions["cuUserObjectCreate"](
            ctypes.byref(held), ctypes.addressof(self._semaphore), destructor, 1, _NO_DESTRUCTOR_SYNC
        )
        stream_memory.check(made)
        stream_memory.check(functions["cuGraphRetainUserObject"](graph, held, 1, _MOVE))

    @property
    def is_gone(self) -> bool:
        """Whether the graph and all executable ones made of it are destroyed, and no replay of them runs."""
        value = c_int()
        _functions()["sem_getvalue"](self._semaphore, ctypes.byref(value))
        return value.value > 0
