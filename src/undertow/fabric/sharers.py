"""Which ranks of the whole job share a GPU, as far as groups of this process have met them.

Kernels that wait for each other must all run at once, so a rank may only take its part of a GPU; and ranks outside its
group take theirs. The group of all ranks knows every rank's GPU (`met`); a smaller group knows it from that one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_met: dict[int, str] = {}  # a rank's GPU by its global number


class Seat(NamedTuple):
    """A rank's GPU and its SMs; how many ranks of the job are known to have it, and whether all ranks are known."""

    gpu: str
    multiprocessors: int
    sharers: int
    all_known: bool


def name_of(device: torch.device) -> str:
    """The GPU's own name, the same in processes that see other GPUs; empty on a CPU."""
    return "" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def met(ranks: tuple[int, ...], gpus: list[str]) -> None:
    """A group has met its members: their global numbers, and their GPUs."""
    _met.update(zip(ranks, gpus, strict=True))


def seat(gpu: str, multiprocessors: int, world: int) -> Seat:
    """What this process knows of its own place among `world` ranks."""
    known = {rank: other for rank, other in _met.items() if rank < world}
    sharers = sum(other == gpu for other in known.values())
    return Seat(gpu, multiprocessors, max(1, sharers), len(known) == world)


def sharing(seats: list[Seat]) -> dict[str, int]:
    """How many ranks have each GPU, as far as any rank of a group knows."""
    most: dict[str, int] = {}
    for one in seats:
        here = sum(other.gpu == one.gpu for other in seats)
        most[one.gpu] = max(most.get(one.gpu, 1), one.sharers, here)
    return most


def part(seats: list[Seat]) -> int:
    """SMs that each rank of a group may fill: the least of their parts, as all of them run the same plans."""
    most = sharing(seats)
    return max(1, min(one.multiprocessors // most[one.gpu] for one in seats))


def unknown(seats: list[Seat], could_share: bool) -> str:
    """Why nobody can tell how many ranks share the group's GPUs, or ""."""
    if not could_share or any(one.all_known for one in seats):
        return ""
    return "ranks outside the group may share its GPU: call undertow.init() on all ranks before the group is first used"
