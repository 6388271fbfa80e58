"""Which ranks stand on one node: they can address each other's memory.

Two ranks share a node if their identities are equal *and* each opened a segment of the other (the probe). The
identity is the kernel's boot id, the shared-memory file system they see and their process namespace: two containers
on one machine differ, two shells on one machine do not. `UNDERTOW_NODE` replaces the identity, never the probe.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ..settings import NODE


def identity() -> str:
    """A string equal on all ranks that may share memory, and different on all others."""
    name = NODE.get()
    if name:
        return f"named {name}"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()  # sandboxes without a boot id: the probe still guards
    try:
        shared_memory = os.stat("/dev/shm").st_dev
    except OSError:
        shared_memory = -1
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        processes = "unknown"
    return f"boot {boot}, shm {shared_memory}, {processes}"


def assign(reachable: list[list[int]]) -> tuple[int, ...]:
    """Node index of every rank. `reachable[i]` lists the ranks whose segment rank i opened.

    Ranks share a node when each reached the other; a one-sided view does not count, so all ranks that are given the
    same lists come to the same answer.
    """
    nodes: list[int] = []
    leaders: list[int] = []
    for rank, reached in enumerate(reachable):
        leader = next((one for one in leaders if one in reached and rank in reachable[one]), None)
        if leader is None:
            leaders.append(rank)
            leader = rank
        nodes.append(leaders.index(leader))
    return tuple(nodes)
