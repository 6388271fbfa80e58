"""torch's symmetric memory. Its module is private and moves between releases: nothing else may import it.

Ranks map each other's memory by torch's `rendezvous`, which has three habits:

- It keeps the interpreter's lock while it waits for the others, and has one socket for a process. Two groups on two
  threads, in another order on another rank, would wait for ever. So each process gives one group its turn, and a group
  goes on when it has its turn on all ranks (`_turn_of_all`).
- What ranks tell each other there goes through the group's store, under keys that every process numbers by itself, over
  all its groups. Ranks that have met others more often than their peers would look under other numbers, and wait for
  ever. Where counts differ, the group's keys are numbered anew (`_Renumbered`).
- It knows a group by its name and a store (`known_name`).
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

from . import meeting

_PATIENCE = 0.05  # seconds
_turn = threading.Lock()  # of whoever meets other ranks, of all groups of this process
_met: Counter[int] = Counter()  # how often this process has, by the number of ranks: torch counts by that, too

# Names are of a type that not every release of torch has.
_names: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
_made: Counter[str] = Counter()


def folder() -> str:
    """Where torch makes sockets, by which ranks hand memory to each other: it must be the same for all of them."""
    named = (os.environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if name in os.environ)
    return next(named, "/tmp")


def allocate(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`count` elements of memory that other ranks can map. Local; follow with `share`."""
    return symmetric.empty((count,), dtype=dtype, device=device)


def share(
    tensor: torch.Tensor, process_group: dist.ProcessGroup, exchange: Callable[[Any, str], list[Any]]
) -> tuple[list[torch.Tensor], Any]:
    """Every rank's tensor as a view here, and the handle that keeps the mappings. Collective.

    `exchange`: as a group's; it lets other threads go on.
    """
    with _turn_of_all(str(process_group.group_name), exchange) as count_alike:
        name = known_name(process_group) if count_alike else _name_with_own_numbers(process_group)
        _met[process_group.size()] += 1
        handle = symmetric.rendezvous(tensor, name)
    count = tensor.numel()
    views = [
        tensor if rank == handle.rank else handle.get_buffer(rank, (count,), tensor.dtype)
        for rank in range(handle.world_size)
    ]
    return views, handle


@contextlib.contextmanager
def _turn_of_all(name: str, exchange: Callable[[Any, str], list[Any]]) -> Iterator[bool]:
    """Inside, no process of the group is in a rendezvous of another one. Gives whether all have met as often.

    Groups that each have their turn on some ranks give it back, and try again after pauses that are a group's own.
    """
    pauses = random.Random(name)  # alike on all ranks
    while True:
        mine = _turn.acquire(timeout=_PATIENCE)
        try:
            said = exchange([mine, sorted(_met.items())], "a turn to map memory")
            if all(has_turn for has_turn, _ in said):
                yield all(counts == said[0][1] for _, counts in said)
                return
        finally:
            if mine:
                _turn.release()
        time.sleep(_PATIENCE * pauses.random())


def known_name(process_group: dist.ProcessGroup) -> Any:
    """The name by which torch's C++ finds the group and its store.

    A group made in Python is known there without its store, and a null pointer would be followed: its carrier, an
    ordinary group over the same ranks, is registered beside it. The registry does not keep it, so the name goes with
    it.
    """
    carrier = getattr(process_group, "carrier", None)
    if carrier is None:
        return process_group.group_name
    if carrier not in _names:
        name = _new_name(process_group)
        _register_process_group(name, carrier)
        _SymmetricMemory.set_group_info(name, carrier.rank(), carrier.size(), process_group.get_group_store())
        weakref.finalize(carrier, _unregister_process_group, name)
        _names[carrier] = name
    return _names[carrier]


def _new_name(process_group: dist.ProcessGroup) -> Any:
    again = _made[process_group.group_name]  # torch remembers names of groups that are gone; alike on all ranks
    _made[process_group.group_name] += 1
    return f"undertow symmetric memory {process_group.group_name} {again}"


class _Apart(NamedTuple):
    """A group's other name, and what torch's registry finds by it but does not keep."""

    name: Any
    group: dist.ProcessGroup
    store: _Renumbered


_apart: weakref.WeakKeyDictionary[dist.ProcessGroup, _Apart] = weakref.WeakKeyDictionary()


def _name_with_own_numbers(process_group: dist.ProcessGroup) -> Any:
    """Another name of the group, whose keys in the store are numbered by what this group has exchanged. Collective."""
    if process_group not in _apart:
        store, rank, size = _Renumbered(meeting.store_for(process_group)), process_group.rank(), process_group.size()
        made = _Apart(_new_name(process_group), dist.ProcessGroup(store, rank, size), store)
        _register_process_group(made.name, made.group)
        _SymmetricMemory.set_group_info(made.name, rank, size, store)
        weakref.finalize(process_group, _unregister_process_group, made.name)
        _apart[process_group] = made
    return _apart[process_group].name


class _Renumbered(dist.Store):
    """`store` under keys `what/number/...` whose numbers are replaced by 0, 1, ..., in the order of their first use.

    That order is the same on all ranks of a group, which exchange one thing after the other.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        what, _, rest = key.partition("/")
        number, _, last = rest.partition("/")
        return f"{what}/{self._numbers.setdefault(number, len(self._numbers))}/{last}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(one) for one in keys])

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(one) for one in keys], *timeout)
