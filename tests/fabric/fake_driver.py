"""A CUDA driver of streams only, in one process: what was enqueued runs later, in any order that streams allow.

Addresses are those of ordinary memory, so copies copy. One `World` holds the streams of several ranks; `run` picks, at
random, a stream whose first operation can run, until all are empty or nothing can move.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

_OPERATION = struct.Struct("<iiQQIiQQ")
_ROWS = struct.Struct("<QQIIQQQQ" + "QQIIQQQQ" + "QQ")
_WAIT, _WRITE = 1, 2
_HOST = 1
Operation = tuple[Callable[[], bool], Callable[[], None]]  # whether it can run, and what it does


def _word(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


class World:
    """Streams are numbers; the functions have the driver's names and argument order, and return 0."""

    def __init__(self) -> None:
        self.streams: dict[int, deque[Operation]] = {}
        self._records: dict[int, list[bool]] = {}
        self.copies: list[tuple[int, int]] = []  # bytes and rows of each
        self.stops = 0

    def new_stream(self) -> int:
        self.streams[len(self.streams) + 1] = deque()
        return len(self.streams)

    def put(self, stream: int, act: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> int:
        self.streams[stream].append((ready, act))
        return 0

    def wait_value(self, stream: int, address: int, target: int, flags: int) -> int:
        return self.put(stream, lambda: None, lambda: ctypes.c_int32(_word(address).value - target).value >= 0)

    def write_value(self, stream: int, address: int, value: int, flags: int) -> int:
        def act() -> None:
            _word(address).value = value

        return self.put(stream, act)

    def batch(self, stream: int, count: int, operations: bytes, flags: int) -> int:
        assert len(operations) == count * _OPERATION.size
        assert 0 < count < 256, "the driver takes no more at once"
        self.stops += 1
        for kind, _, address, value, *_rest in _OPERATION.iter_unpack(operations):
            assert kind in (_WAIT, _WRITE)
            (self.wait_value if kind == _WAIT else self.write_value)(stream, address, value, 0)
        return 0

    def _copy(self, stream: int, to: int, source: int, size: int) -> int:
        self.copies.append((size, 1))
        return self.put(stream, lambda: ctypes.memmove(to, source, size) and None)

    def to_host(self, host: int, device: int, size: int, stream: int) -> int:
        return self._copy(stream, host, device, size)

    def to_device(self, device: int, host: int, size: int, stream: int) -> int:
        return self._copy(stream, device, host, size)

    def copy_rows(self, packed: bytes, stream: int) -> int:
        fields = _ROWS.unpack(packed)
        ends = [half[4] if half[2] == _HOST else half[5] for half in (fields[:8], fields[8:16])]
        steps = [half[7] for half in (fields[:8], fields[8:16])]
        width, height = fields[16:]
        assert min(steps) >= width, "rows overlap"
        self.copies.append((width * height, height))

        def act() -> None:
            for row in range(height):
                ctypes.memmove(ends[1] + row * steps[1], ends[0] + row * steps[0], width)

        return self.put(stream, act)

    def record(self, event: int, stream: int) -> int:
        self._records[event] = reached = [False]
        return self.put(stream, lambda: reached.__setitem__(0, True))

    def wait_event(self, stream: int, event: int, flags: int) -> int:
        reached = self._records[event]
        return self.put(stream, lambda: None, lambda: reached[0])

    def functions(self) -> dict[str, Any]:
        return {
            "cuStreamWriteValue32_v2": self.write_value, "cuStreamWaitValue32_v2": self.wait_value,
            "cuStreamBatchMemOp_v2": self.batch, "cuMemcpyDtoHAsync_v2": self.to_host,
            "cuMemcpyHtoDAsync_v2": self.to_device, "cuMemcpy2DAsync_v2": self.copy_rows,
            "cuEventRecord": self.record, "cuStreamWaitEvent": self.wait_event,
        }  # fmt: skip

    def run(self, seed: int, late: Collection[int] = ()) -> None:
        """Until everything has run; an AssertionError if nothing can. The `late` streams move when no other can."""
        chosen = random.Random(seed)
        while left := [stream for stream, queue in self.streams.items() if queue]:
            can = [stream for stream in left if self.streams[stream][0][0]()]
            assert can, f"deadlock: {len(left)} streams wait"
            self.streams[chosen.choice([one for one in can if one not in late] or can)].popleft()[1]()
