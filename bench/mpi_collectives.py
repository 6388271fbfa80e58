"""The workload of `cpu_collectives.py`, and its Open MPI party: one rank of an mpirun job.

    mpirun -n 4 python3 -m mpi4py bench/mpi_collectives.py '{"collective": "all_reduce", ...}'

The workload is here because this file needs NumPy only: the Python that has mpi4py need not have torch. `bytes` is the
larger side of a call, per rank:

| collective | a rank gives | a rank gets | MPI |
|---|---|---|---|
| all_reduce | bytes | bytes | Allreduce |
| all_gather | bytes / ranks | bytes | Allgather |
| reduce_scatter | bytes | bytes / ranks | Reduce_scatter_block |
| all_to_all | bytes | bytes | Alltoall |
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
PERIOD = 61
"""Inputs repeat after so many elements: a prime, so that a chunk at a wrong place shows."""
BLOCK_BYTES = 4 << 20
BLOCK_CALLS = 25
MINIMUM_BLOCKS = 3
WARMUP_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: which collective, on how many ranks, how large; in place is for all_reduce alone."""

    collective: str
    ranks: int
    nbytes: int
    in_place: bool

    @property
    def count(self) -> int:
        """Elements of the larger side, a multiple of the ranks."""
        return max(1, self.nbytes // 4 // self.ranks) * self.ranks

    @property
    def calls(self) -> int:
        """Timed calls of a block. The results of a block in place grow with each call, and must stay exact."""
        wanted = min(BLOCK_CALLS, max(1, BLOCK_BYTES // self.nbytes))
        if not self.in_place:
            return wanted
        bits = 120 if self.ranks & (self.ranks - 1) == 0 else 24  # a power of two changes the exponent only
        room = 2.0**bits / (self.ranks * (PERIOD + self.ranks))
        return min(wanted, max(1, int(np.log(room) / np.log(self.ranks)) - 1))


class WrongResult(Exception):
    """A party computed something else than the collective."""


class Workload:
    """A rank's buffers for a case, what they hold before a block, and what they must hold after it."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        ranks, count = case.ranks, case.count
        shard = count // ranks
        mine = slice(rank * shard, (rank + 1) * shard)
        base = np.resize(np.arange(PERIOD, dtype=np.float32), count)
        whole = base + np.float32(rank + 1)  # what a rank has where it gives as many elements as there are
        total = base * np.float32(ranks) + np.float32(ranks * (ranks + 1) // 2)
        if case.collective == "all_reduce":
            given = whole
            self.expected = total * np.float32(ranks) ** case.calls if case.in_place else total
        elif case.collective == "all_gather":
            given, self.expected = whole[mine], base + np.repeat(np.arange(1, ranks + 1, dtype=np.float32), shard)
        elif case.collective == "reduce_scatter":
            given, self.expected = whole, total[mine]
        else:
            given = whole
            self.expected = np.concatenate([base[mine] + np.float32(other + 1) for other in range(ranks)])
        self._given = given
        self.source = _memory(given.size)
        self.target = self.source if case.in_place else _memory(self.expected.size)

    def fill(self) -> None:
        """Before a block: inputs as they were, and an output that is wrong wherever a call does not write."""
        self.target.fill(-1.0)
        np.copyto(self.source, self._given)

    def check(self, party: str) -> None:
        """After a block: exact, or the run ends."""
        wrong = int(np.count_nonzero(self.target != self.expected))
        if wrong:
            first = int(np.flatnonzero(self.target != self.expected)[0])
            found, right = self.target[first], self.expected[first]
            raise WrongResult(f"{party}, {self.case}: {wrong} elements are wrong; [{first}] is {found}, not {right}")


def _memory(count: int) -> Floats:
    """Zeros at the begin of a page. Not NumPy's own: it asks for huge pages, which a torch tensor does not have."""
    memory = mmap.mmap(-1, max(1, count * 4), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.float32, count)


def time_block(call: Callable[[], object], calls: int) -> float:
    """Seconds per call. The first call is not timed: ranks leave it together, closer than they leave a barrier."""
    call()
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) * 1e-9 / calls


def busy_seconds() -> float:
    """Core seconds that all programs of this machine have computed so far, to the kernel's tick."""
    fields = Path("/proc/stat").read_text().split(maxsplit=4)
    return sum(int(ticks) for ticks in fields[1:4]) / 100  # USER_HZ: user, nice, system


class Neighbours:
    """What other programs computed while this rank measured; `own` sums a number over ranks."""

    def __init__(self, own: Callable[[float], float]) -> None:
        self._own = own
        self._start = (time.monotonic(), busy_seconds(), own(time.process_time()))

    def cores(self) -> float:
        """Cores that were not ours, on average since the begin."""
        start, busy, own = self._start
        ours = self._own(time.process_time()) - own
        return max(0.0, busy_seconds() - busy - ours) / (time.monotonic() - start)


def bound_call(comm: Any, mpi: Any, workload: Workload) -> Callable[[], object]:
    """The MPI call of a case. Buffers are described once, so that a call is as thin as mpi4py can make it."""
    source, target = [workload.source, mpi.FLOAT], [workload.target, mpi.FLOAT]
    collective = workload.case.collective
    if collective == "all_reduce":
        given = mpi.IN_PLACE if workload.case.in_place else source
        return lambda: comm.Allreduce(given, target, mpi.SUM)
    if collective == "all_gather":
        return lambda: comm.Allgather(source, target)
    if collective == "reduce_scatter":
        return lambda: comm.Reduce_scatter_block(source, target, mpi.SUM)
    return lambda: comm.Alltoall(source, target)


def measure(comm: Any, mpi: Any, case: Case, seconds: float, blocks: int) -> list[float]:
    """Seconds per call of the slowest rank, block by block."""
    workload = Workload(case, comm.rank)
    call = bound_call(comm, mpi, workload)
    samples: list[float] = []
    begin = time.monotonic()
    for block in range(-WARMUP_BLOCKS, blocks):
        workload.fill()
        comm.Barrier()
        taken = time_block(call, case.calls)
        comm.Barrier()  # whoever is done first must not check on the core of one who is not
        workload.check("mpi")
        slowest, elapsed = (comm.allreduce(value, mpi.MAX) for value in (taken, time.monotonic() - begin))
        if block >= 0:
            samples.append(slowest)
        if len(samples) >= MINIMUM_BLOCKS and elapsed > seconds:
            break
    return samples


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=json.loads, help="JSON: collective, sizes, in_place, seconds, blocks")
    task = parser.parse_args(arguments).task

    mpi: Any = importlib.import_module("mpi4py.MPI")  # starts MPI; only the Python of this party has it
    comm = mpi.COMM_WORLD
    neighbours = Neighbours(lambda value: float(comm.allreduce(value, mpi.SUM)))
    samples: dict[str, list[float]] = {}
    for nbytes in task["sizes"]:
        case = Case(task["collective"], comm.size, nbytes, task["in_place"])
        samples[str(nbytes)] = measure(comm, mpi, case, task["seconds"], task["blocks"])
    found = {"samples": samples, "neighbours": neighbours.cores(), "library": mpi.Get_library_version().split(",")[0]}
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
