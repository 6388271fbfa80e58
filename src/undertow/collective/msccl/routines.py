"""Steps that programs share: rings over some of the ranks, in place."""

from __future__ import annotations

from .chunks import Buffer
from .program import Ref, chunk


def allgather_ring_inplace(gpus: int, gpu_offset: int = 0, index_offset: int = 0, ch: int = 0) -> None:
    """Every one of `gpus` ranks from `gpu_offset` on passes its chunk around."""
    for place in range(gpus):
        passed = _chunk(gpu_offset + place, Buffer.input, 0)
        for step in range(1, gpus):
            passed = passed.copy(gpu_offset + (place + step) % gpus, Buffer.output, index_offset + place, ch=ch)


def allreduce_ring_inplace(gpus: int, gpu_offset: int = 0, index_offset: int = 0, ch: int = 0) -> None:
    """Chunk i is summed around the ring from rank i on, and its sum passed around once more."""
    for place in range(gpus):
        index = index_offset + place
        passed = _chunk(gpu_offset + place, Buffer.input, index)
        for step in range(1, gpus):
            passed = _chunk(gpu_offset + (place + step) % gpus, Buffer.input, index).reduce(passed, ch=ch)
        for step in range(gpus - 1):
            passed = passed.copy(gpu_offset + (place + step) % gpus, Buffer.input, index, ch=ch)


def _chunk(rank: int, buffer: Buffer, index: int) -> Ref:
    found = chunk(rank, buffer, index)
    assert found is not None, f"{buffer} {index} of rank {rank} holds nothing"
    return found
