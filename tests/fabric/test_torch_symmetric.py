"""Ranks that map each other's memory by a rendezvous with torch's habits: threads as ranks, no GPU.

It keeps the interpreter's lock to itself, and numbers the keys of the store by what its process did, in all groups.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import undertow.fabric.meeting as here

PATIENCE = 10.0


class Meeting:
    """A group: a store for all, and what its ranks tell each other."""

    def __init__(self, name: str, ranks: Iterable[int]) -> None:
        self.name, self.ranks, self.store = name, list(ranks), dist.HashStore()
        self.store.set_timeout(timedelta(seconds=PATIENCE / 2))
        self._said: dict[int, Any] = {}
        self._barrier = threading.Barrier(len(self.ranks), timeout=PATIENCE)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._said[rank] = value
        self._barrier.wait()
        found = [self._said[one] for one in range(len(self.ranks))]
        self._barrier.wait()
        return found


class _Group:
    """As one rank sees it."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.group_name, self._meeting, self._rank = meeting.name, meeting, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._meeting.ranks)

    def get_group_store(self) -> dist.Store:
        return self._meeting.store


class Process:
    """One rank of the job: its own module, its own numbers, an interpreter's lock."""

    def __init__(self, number: int) -> None:
        specification = importlib.util.find_spec("undertow.fabric.torch_symmetric")
        assert specification is not None
        assert specification.loader is not None
        module: Any = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        self.number, self.module = number, module
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._known: dict[str, _Group] = {}
        self._numbers, self._interpreter = 0, threading.Lock()
        module.symmetric = SimpleNamespace(rendezvous=self._rendezvous)
        module.meeting = SimpleNamespace(store_for=lambda group: dist.PrefixStore("apart", here._store_of(group)))
        module._SymmetricMemory = SimpleNamespace(set_group_info=lambda *arguments: None)
        module._register_process_group, module._unregister_process_group = self._groups.__setitem__, self._groups.pop

    def share(self, meeting: Meeting, value: int) -> list[int]:
        """A tensor of every rank; `value` is this rank's."""
        rank = meeting.ranks.index(self.number)
        group: Any = self._known.setdefault(meeting.name, _Group(meeting, rank))
        self._groups.setdefault(meeting.name, dist.ProcessGroup(meeting.store, rank, len(meeting.ranks)))
        views, _ = self.module.share(torch.tensor([value]), group, lambda said, purpose: meeting.exchange(rank, said))
        return [int(one) for one in views]

    def _rendezvous(self, tensor: torch.Tensor, name: str) -> Any:
        with self._interpreter:
            group: Any = self._groups[name]
            store = dist.PrefixStore("CUDASymmetricMemory", group.get_group_store())
            keys = [f"{self._numbers}/{rank}" for rank in range(group.size())]
            self._numbers += 1
            store.set(keys[group.rank()], str(int(tensor)))
            parts = [int(one) for one in store.multi_get(keys)]
            if len(keys) > 1:  # alone, it tries no multicast
                store.wait([f"{self._numbers - 1}/{rank}" for rank in range(group.size())])
                store.add(f"{self._numbers}", 1)
                assert store.check([f"{self._numbers}"])
                self._numbers += 1
        return SimpleNamespace(
            rank=group.rank(), world_size=group.size(),
            get_buffer=lambda rank, shape, dtype: torch.tensor([parts[rank]], dtype=dtype),
        )  # fmt: skip


def at_once(*calls: Callable[[], None]) -> None:
    """Each on a thread of its own; what one raises is raised here."""
    raised: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for one in threads:
        one.start()
    for one in threads:
        one.join(2 * PATIENCE)
    assert not any(one.is_alive() for one in threads), "somebody waits for ever"
    if raised:
        raise raised[0]


@pytest.mark.parametrize("alone", [[0], [0, 1]])
def test_ranks_meet_that_have_met_others_more_often(alone: list[int]) -> None:
    """A group of some ranks, then all of them, twice over: torch's numbers are then different on each rank."""
    processes = [Process(number) for number in range(3)]
    world, some = Meeting("0", range(3)), Meeting("1", alone)

    def run(process: Process) -> None:
        for turn in range(3):
            assert process.share(world, 10 * turn + process.number) == [10 * turn + rank for rank in range(3)]
            for extra in range(turn + 1):
                if process.number in alone:
                    assert process.share(some, extra + process.number) == [extra + rank for rank in alone]

    at_once(*(lambda process=process: run(process) for process in processes))
    assert len({process._numbers for process in processes}) > 1
    assert len(processes[0]._groups) == 3, "one more name, for the group whose ranks count differently"


def test_groups_meet_on_threads_of_their_own() -> None:
    """In whatever order they come to it on each rank."""
    processes = [Process(number) for number in range(2)]
    groups = [Meeting(str(number), range(2)) for number in range(2)]

    def run(process: Process, group: Meeting) -> None:
        for step in range(10):
            assert process.share(group, step + process.number) == [step, step + 1]

    calls = [(process, group) for process in processes for group in groups]
    at_once(*(lambda process=process, group=group: run(process, group) for process, group in calls))
