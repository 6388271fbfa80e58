"""The one shared-memory class: bytes that several processes of one node map.

A segment is an anonymous memory file (memfd). Others open it through the creator's descriptor table,
`/proc/<pid>/fd/<n>`. It has no name in any file system, so there is nothing that a SIGKILL could leave behind:
the kernel frees the pages when the last mapping goes. It is also not bound by the size of /dev/shm.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from math import prod
from pathlib import Path

import torch

from ..errors import InvalidArgument, OutOfSharedMemory

PAGE = mmap.PAGESIZE
_RESERVE = 256 << 20  # bytes of memory that a segment never takes: the node must stay able to report the failure


class Segment:
    """`size` bytes of memory shared between processes of one node, zeroed at creation."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._descriptor = descriptor  # owned from here on: whoever fails above closes it
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)

    @classmethod
    def create(cls, size: int, purpose: str) -> Segment:
        """Allocate `size` bytes now. Touching them later cannot fail: a full node is reported here."""
        if size <= 0:
            raise InvalidArgument(argument="size", was=size, must="a positive number of bytes")
        size = -(-size // PAGE) * PAGE
        available = available_memory()
        if size > available - _RESERVE:
            raise OutOfSharedMemory(purpose=purpose, wanted=human(size), available=human(max(0, available)))
        descriptor = os.memfd_create(f"undertow-{purpose}".replace(" ", "-"), os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return cls(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise OutOfSharedMemory(purpose=purpose, wanted=human(size), available=human(available)) from error

    @classmethod
    def open(cls, path: str) -> Segment:
        """Map a segment that another process of this node created. `path` is its `path`."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, os.fstat(descriptor).st_size)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def path(self) -> str:
        """Where other processes open this segment, as long as `seal` was not called."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def seal(self) -> None:
        """Close the descriptor: nobody else can open the segment; mappings stay."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over bytes `offset` onward. It keeps the mapping alive by itself."""
        count = prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def close(self) -> None:
        """Let go. The pages are freed once no tensor over them is left, here or in another process."""
        self.seal()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def available_memory() -> int:
    """Bytes this process may still take: the machine's free memory, or the control group's limit if smaller."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * PAGE
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        text = limit.read_text().strip()
        if text != "max":
            available = min(available, int(text) - int(used.read_text()))
    except (OSError, ValueError):
        pass  # no control group of this kind: the machine's figure stands
    return available


def human(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
