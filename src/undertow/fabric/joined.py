"""All ranks' parts of a symmetric buffer in one range of addresses, one after the other, at equal distances.

torch maps the memory of every other rank wherever there is room. A kernel that may address any of them then needs a
table of addresses, and one that reads by tensor descriptors a descriptor for each rank, and a branch for each. Here the
same memory is mapped a second time, rank behind rank: one tensor [ranks, elements], one descriptor, no branch.

Two mappings of the same bytes: what a kernel writes through one of them it must not read through the other, which may
be cached apart. Between kernels of a stream there is no such rule.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint64
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UndertowError
from . import stream_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

_ON_DEVICE, _READ_AND_WRITE = 1, 3  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("kind", c_int), ("device", c_int), ("flags", c_int))


@cache
def _functions() -> dict[str, Any]:
    """Found at their first use."""
    driver = ctypes.CDLL("libcuda.so.1")
    number = ctypes.POINTER(c_uint64)
    signatures: dict[str, list[Any]] = {
        "cuMemGetAddressRange_v2": [number, ctypes.POINTER(c_size_t), c_uint64],
        "cuMemRetainAllocationHandle": [number, c_uint64],
        "cuMemRelease": [c_uint64],
        "cuMemAddressReserve": [number, c_size_t, c_size_t, c_uint64, c_uint64],
        "cuMemAddressFree": [c_uint64, c_size_t],
        "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
        "cuMemUnmap": [c_uint64, c_size_t],
        "cuMemSetAccess": [c_uint64, c_size_t, ctypes.POINTER(_Access), c_size_t],
    }
    for name, arguments in signatures.items():
        getattr(driver, name).argtypes, getattr(driver, name).restype = arguments, c_int
    return {name: getattr(driver, name) for name in signatures}


def _call(name: str, *arguments: Any) -> None:
    stream_memory.check(_functions()[name](*arguments))


def _range(address: int) -> tuple[int, int]:
    """Where the mapping that holds an address begins, and its bytes."""
    first, size = c_uint64(), c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(first), ctypes.byref(size), address)
    return first.value, size.value


class Joined:
    """The memory at `addresses`, one of each rank, mapped rank behind rank, `distance` bytes apart.

    The memory lives as long as this does: `release` when no kernel uses it any more.
    """

    def __init__(self, addresses: Sequence[int], device: torch.device) -> None:
        ranges = [_range(one) for one in addresses]
        offsets = {address - first for address, (first, _) in zip(addresses, ranges, strict=True)}
        sizes = {size for _, size in ranges}
        if len(offsets) != 1 or len(sizes) != 1:
            reason = f"ranks' parts of a buffer lie differently in their memory: {sorted(offsets)} of {sorted(sizes)}"
            raise UndertowError(reason=f"The memory of several ranks could not be mapped side by side: {reason}.")
        self._device = device
        self._offset, self.distance = offsets.pop(), sizes.pop()
        self._whole = self.distance * len(addresses)
        self._mapped: list[int] = []
        place = c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(place), self._whole, 0, 0, 0)
        self._place = place.value
        try:
            for first, _ in ranges:
                self._map(first)
            access = _Access(_ON_DEVICE, device.index, _READ_AND_WRITE)
            _call("cuMemSetAccess", self._place, self._whole, ctypes.byref(access), 1)
        except BaseException:
            self.release()
            raise

    def _map(self, first: int) -> None:
        handle = c_uint64()
        _call("cuMemRetainAllocationHandle", ctypes.byref(handle), first)
        try:
            there = self._place + len(self._mapped) * self.distance
            _call("cuMemMap", there, self.distance, 0, handle, 0)
            self._mapped.append(there)
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps the memory

    def view(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[ranks, count] elements: the first ones of each rank's part."""
        described = {
            "shape": (self._whole // dtype.itemsize,), "typestr": f"<i{dtype.itemsize}", "version": 3,
            "data": (self._place, False),
        }  # fmt: skip
        flat = torch.as_tensor(_Described(described), device=self._device).view(dtype)
        if flat.data_ptr() != self._place:  # where the first rank's memory is another GPU's, torch may copy it
            reason = "torch made a copy of it"
            raise UndertowError(reason=f"The memory of several ranks could not be used side by side: {reason}.")
        apart = self.distance // dtype.itemsize
        return flat.as_strided((len(self._mapped), count), (apart, 1), self._offset // dtype.itemsize)

    def release(self) -> None:
        """Unmap. Tensors made of it must not be used again."""
        if self._place == 0:
            return
        for one in self._mapped:
            _call("cuMemUnmap", one, self.distance)
        _call("cuMemAddressFree", self._place, self._whole)
        self._mapped, self._place = [], 0


class _Described:
    """What torch makes a tensor of."""

    def __init__(self, described: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = described
