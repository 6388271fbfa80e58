"""A schedule: what a program compiles to, for all ranks. Arrays of integers; immutable, told apart by `digest`.

Each rank has *workers*. A worker runs its instructions in order, once for every *iteration* of a call (long chunks are
cut into tiles, one tile an iteration), and knows of other workers only through *semaphores*. The IR has four verbs:

    move    stores <- the sum of sources, chunk by chunk (one source: a copy)
    wait    until semaphore s has been posted so often
    post    semaphore s, once: releases everything this worker has done so far
    ready / needed   wait for a parcel of a kernel / tell a kernel that a tile's chunks have arrived

`start` and `end` bracket a call where other ranks reach into a rank's own buffers: start posts "you may", end waits for
"I am done with yours". A semaphore has one poster and one waiter. A wait for `value` posts, `back` iterations ago, is
over when the count reaches (iteration - back) * posts + value; counts go on from call to call.

Scratch and staging exist `depth` times, used in turn by iterations; one chunk of them holds one tile. Staging lies at
the receiver of a message, or at its sender where several ranks take it (`publishes`). With *packets*
every 32 bits in staging travel with a flag in one 64-bit store; the receiver polls the data itself, and the semaphore
that would announce it exists in the schedule only (the checker sees an order, the runtimes drop it).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument
from .contract import Contract
from .topology import Topology

if TYPE_CHECKING:
    from ..sim.cluster import Cluster
    from ..sim.schedules import Result

MOVE, READY, NEEDED, START, END = 0, 2, 3, 4, 5  # kinds of instructions
Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Instructions:
    """The instructions of all workers, worker by worker, each worker's in order. `*_start` are compressed rows."""

    kind: Ints
    count: Ints
    number: Ints  # parcel or tile of `ready` and `needed`
    source_start: Ints
    source_atom: Ints
    store_start: Ints
    store_atom: Ints
    class_start: Ints
    class_of: Ints  # length class of each chunk that is moved
    wait_start: Ints
    wait_semaphore: Ints
    wait_value: Ints
    wait_back: Ints
    post_start: Ints
    post_semaphore: Ints
    row: Ints  # the operation that began it
    source_row: Ints
    store_row: Ints

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, eq=False)
class Schedule:
    name: str
    contract: Contract
    topology: Topology
    in_place: bool
    staged: bool
    packets: bool
    grain: int  # atoms of a chunk, where `parallel` cuts chunks
    instances: int
    depth: int
    buffers: tuple[str, ...]
    first_atom: Ints  # [rank, buffer]
    atoms: Ints  # [rank, buffer]: how many
    user_atoms: int
    instructions: Instructions
    worker_start: Ints  # compressed rows: instructions of each worker
    worker_rank: Ints
    semaphore_poster: Ints
    semaphore_waiter: Ints
    semaphore_posts: Ints  # an iteration
    semaphore_of_start: NDArray[np.bool_]  # posted once a call, by a start
    semaphore_of_packets: NDArray[np.bool_]  # never posted: the flags in the packets say the same
    codes: tuple[CodeType, ...] = field(repr=False)
    rows: NDArray[np.int32] = field(repr=False)  # code and line of each operation
    worker_channel: Ints | None = None  # of each worker, where the format it was read from numbers channels
    publishes: bool = False  # staging of other ranks may be read, too: a sender's own, by all who take what is in it
    keeps_input: bool = True  # False: a call that is not in place uses its input as scratch, as foreign ones may

    @property
    def ranks(self) -> int:
        return self.contract.ranks

    @property
    def loops(self) -> bool:
        """Whether iterations share memory, so that more than one must be looked at."""
        return bool(self.atoms[:, 2:].any())

    @cached_property
    def atom_rank(self) -> Ints:
        return self._of_atoms(np.repeat(np.arange(self.ranks), len(self.buffers)))

    @cached_property
    def atom_buffer(self) -> Ints:
        return self._of_atoms(np.tile(np.arange(len(self.buffers)), self.ranks))

    def _of_atoms(self, values: NDArray[np.int64]) -> Ints:
        """Per atom; where two buffers share atoms (in place), the value of the larger one stands."""
        found = np.zeros(int((self.first_atom + self.atoms).max(initial=0)), np.int32)
        first, count = self.first_atom.ravel(), self.atoms.ravel()
        for one in np.argsort(count, kind="stable"):
            found[first[one] : first[one] + count[one]] = values[one]
        return found

    @cached_property
    def misplaced(self) -> tuple[tuple[int, int], ...]:
        """Pairs of length classes (of a place in user memory, of what is put or found there) that differ."""
        contract, one = self.contract, self.instructions
        home = np.full(self.user_atoms, -1, np.int64)
        for rank in range(self.ranks):
            inputs = contract.item_class[contract.first_item[rank] : contract.first_item[rank + 1]]
            outputs = contract.output_class[contract.first_output[rank] : contract.first_output[rank + 1]]
            # The larger buffer last: places are cut by its classes, as `atom_buffer` says.
            for buffer, classes in sorted(((0, inputs), (1, outputs)), key=lambda pair: len(pair[1])):
                home[self.first_atom[rank, buffer] : self.first_atom[rank, buffer] + len(classes)] = classes
        total = contract.factor * contract.spans
        found: set[int] = set()
        for start, atom in ((one.source_start, one.source_atom), (one.store_start, one.store_atom)):
            owner = np.repeat(np.arange(len(one)), np.diff(start))
            width = one.count[owner].astype(np.int64)
            part = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
            place = np.repeat(atom.astype(np.int64), width) + part
            content = one.class_of[np.repeat(one.class_start[owner].astype(np.int64), width) + part]
            user = place < self.user_atoms
            here, there = home[place[user]], content[user]
            found.update(np.unique((here * total + there)[here != there]).tolist())
        return tuple(sorted(divmod(pair, total) for pair in found))

    def workers_of(self, rank: int) -> list[int]:
        return [int(one) for one in np.flatnonzero(self.worker_rank == rank)]

    @cached_property
    def digest(self) -> str:
        """Equal for equal schedules, in every process."""
        found = hashlib.sha256(repr((self.name, self.contract.name, self.in_place, self.staged, self.packets)).encode())
        found.update(repr((self.instances, self.depth, self.buffers, self.topology.nodes)).encode())
        arrays = [getattr(self.instructions, one.name) for one in fields(self.instructions)]
        arrays += [self.first_atom, self.atoms, self.worker_start, self.worker_rank, self.semaphore_poster]
        arrays += [self.semaphore_waiter, self.semaphore_posts, self.semaphore_of_start]
        for one in arrays:
            found.update(np.ascontiguousarray(one).tobytes())
        return found.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """For another system: MSCCL's XML (a staged schedule) or an MSCCL++ plan in JSON (a direct one), by suffix."""
        from .formats import write

        write(self, path)

    def simulate(self, machine: str | Path | Cluster, *, nbytes: int, **options: Any) -> Result:
        """What a call takes on a machine that need not be here: a shipped one, a file, or a `Cluster`.

        `nbytes`: of the longest buffer of a rank. See `undertow.sim.schedules.simulate` for the options.
        """
        from ..sim.cluster import Cluster
        from ..sim.schedules import simulate

        cluster = machine if isinstance(machine, Cluster) else Cluster.load(machine)
        return simulate(self, cluster.network, nbytes=nbytes, rules=cluster.rules, **options)

    # -- words for people --------------------------------------------------------------------------------------------

    def chunk_name(self, atom: int) -> str:
        if not 0 <= atom < len(self.atom_rank):
            return f"chunk {atom} of no buffer"
        rank, buffer = int(self.atom_rank[atom]), int(self.atom_buffer[atom])
        return f"{self.buffers[buffer]}[{(atom - int(self.first_atom[rank, buffer])) // self.grain}] of rank {rank}"

    def where(self, row: int) -> str:
        """File and line of an operation; formats whose readers know no lines have line 0."""
        if row < 0 or row >= len(self.rows):
            return "its contract"
        code, line = self.rows[row]
        path = self.codes[code].co_filename
        return f"{path}:{line}" if line else path

    def describe(self, instruction: int) -> str:
        """One instruction in a line, with its source line."""
        one = self.instructions
        kind = int(one.kind[instruction])
        if kind in (START, END):
            worker = int(np.searchsorted(self.worker_start, instruction, side="right")) - 1
            return f"rank {self.worker_rank[worker]} {'starts' if kind == START else 'ends'}"
        sources = one.source_atom[one.source_start[instruction] : one.source_start[instruction + 1]]
        stores = one.store_atom[one.store_start[instruction] : one.store_start[instruction + 1]]
        where = self.where(int(one.row[instruction]))
        if kind == READY:
            return f"{self.chunk_name(int(stores[0]))} becomes ready ({where})"
        if kind == NEEDED:
            return f"{self.chunk_name(int(sources[0]))} is needed ({where})"
        left = " + ".join(self.chunk_name(int(atom)) for atom in sources[:3]) + (" + ..." if len(sources) > 3 else "")
        right = ", ".join(self.chunk_name(int(atom)) for atom in stores[:3]) + (", ..." if len(stores) > 3 else "")
        return f"{left} -> {right} ({where})"

    def without_wait(self, index: int) -> Schedule:
        """The same with wait number `index` removed: for tests of the checker."""
        return self._without("wait", index)

    def without_post(self, index: int) -> Schedule:
        """The same with post number `index` removed: for tests of the checker."""
        return self._without("post", index)

    def _without(self, what: str, index: int) -> Schedule:
        from dataclasses import replace

        start: Ints = getattr(self.instructions, f"{what}_start")
        if not 0 <= index < start[-1]:
            raise InvalidArgument(argument="index", was=index, must=f"below {start[-1]}")
        names = [
            one.name for one in fields(Instructions) if one.name.startswith(f"{what}_") and one.name[-5:] != "start"
        ]
        changed = {name: np.delete(getattr(self.instructions, name), index) for name in names}
        changed[f"{what}_start"] = start - (start > index).astype(np.int32)
        return replace(self, instructions=replace(self.instructions, **changed))
