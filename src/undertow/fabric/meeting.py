"""How the ranks of a new group find each other, before any of them is connected to another."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .. import errors, settings
from . import watchdog
from .flight import FlightRing
from .logs import get_logger

local_processes: dict[int, int] = {}  # of this node's ranks by global rank, as far as any group has met them
_incarnations: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's place in a group: the group's name, its rank there, the global ranks of all members."""

    group: str
    rank: int
    ranks: tuple[int, ...]


def store_for(process_group: dist.ProcessGroup) -> dist.Store:
    """A part of the group's store that no earlier group of that name has used.

    Every rank makes its groups in the same order, so their counts agree.
    """
    name = process_group.group_name
    _incarnations[name] = _incarnations.get(name, 0) + 1
    return dist.PrefixStore(f"undertow/{_incarnations[name]}", _store_of(process_group))


def _store_of(process_group: dist.ProcessGroup) -> dist.Store:
    """The store behind a group; torch has no public name for the default one."""
    if hasattr(process_group, "get_group_store"):
        return process_group.get_group_store()
    return dist.PrefixStore(process_group.group_name, dist.distributed_c10d._get_default_store())


def roll_call(store: dist.Store, place: Place, fact: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
    """Every rank's facts by rank, through the store: no connection between ranks is needed. Collective."""
    began = time.monotonic()
    missing = set(range(len(place.ranks)))
    try:
        store.set(f"rank {place.rank}", json.dumps(fact))
        while missing:
            missing = {rank for rank in missing if not store.check([f"rank {rank}"])}
            for rank in missing:
                pid = local_processes.get(place.ranks[rank]) or _launched_process(place.ranks[rank])
                if pid and watchdog.is_dead(pid):
                    raise errors.RankLost(rank=rank, group=place.group, reason=f"its process {pid} died")
            if missing and time.monotonic() - began > deadline:
                waited = f"it did not come to make the group in {deadline:g} s"
                raise errors.RankLost(rank=min(missing), group=place.group, reason=waited)
            if missing:
                time.sleep(0.001 if time.monotonic() - began < 0.1 else 0.02)
        return [json.loads(store.get(f"rank {rank}").decode()) for rank in range(len(place.ranks))]
    except errors.RankLost:
        raise
    except RuntimeError as error:  # torch raises DistStoreError and its kin
        reason = f"the store does not answer ({str(error).splitlines()[0]})"
        raise errors.RankLost(rank="unknown", group=place.group, reason=reason) from error


def open_rings(facts: list[dict[str, Any]], me: int) -> dict[int, FlightRing]:
    """The rings of the other ranks that this rank can map: the probe for shared memory."""
    rings: dict[int, FlightRing] = {}
    for rank, fact in enumerate(facts):
        if rank == me or fact["node"] != facts[me]["node"]:
            continue
        try:
            ring = FlightRing.open(str(fact["ring"]))
        except OSError as error:
            get_logger().warning(
                "Rank %d names the same node but cannot be mapped (%s): treated as remote.", rank, error
            )
            continue
        if ring.pid == fact["pid"]:
            rings[rank] = ring
    return rings


def _launched_process(rank: int) -> int:
    """Process of a rank of the same launch, from the launcher's rings; 0 without a launcher."""
    path = settings.FLIGHT_RING.get()
    if not path:
        return 0
    try:
        return FlightRing.open(f"{path.rpartition(':')[0]}:{rank}").pid
    except (OSError, ValueError):
        return 0
