"""The chunk language: a collective algorithm as ordinary Python that moves chunks.

    @program("all_reduce", chunks=lambda ranks: ranks)
    def two_shot(c):
        for owner in range(c.ranks):
            total = c.rank(owner).input[owner].copy(c.rank(owner).output[owner])
            for other in c.others(owner):
                total.reduce(c.rank(other).input[owner])
            for other in c.others(owner):
                total.copy(c.rank(other).output[owner])

The meaning is that of the statements one after the other. Threads, signals and waits are inferred: the compiler keeps
every order that matters and gives up every other. A function with a program's name in it runs nothing: it is traced.
"""

from __future__ import annotations

import contextlib
import math
import operator
import struct
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument, ProgramRefused
from .contract import BUILT_IN, ROOTED, Contract
from .signature import signature_of
from .topology import Topology

if TYPE_CHECKING:
    from .schedule import Schedule

INPUT, OUTPUT = 0, 1  # buffers; scratch buffers are numbered from 2 on, staging is added by the compiler
COPY, REDUCE, READY, NEEDED = 0, 1, 2, 3  # operations
COLUMNS = (
    "kind", "source_rank", "source_buffer", "source_start", "rank", "buffer", "start", "count",
    "code", "line", "channel", "parallel", "lane",
)  # fmt: skip
ANY_LANE, LANES = -1, ("net", "peer", "dma")
_pack = struct.Struct(f"{len(COLUMNS)}i").pack
MOST_OPERATIONS = 1 << 24  # of a program, and chunks of a contract: beyond them memory ends before patience does
_MOST_WAYS = 1 << 16
_MOST_BYTES = 4 * len(COLUMNS) * MOST_OPERATIONS
_SHARDED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")  # chunks are those of a shard


class Ref:
    """`count` chunks from `start` on in one buffer of one rank. What `copy` and `reduce` take and return."""

    __slots__ = ("_trace", "buffer", "count", "rank", "start")

    def __init__(self, trace: Trace, rank: int, buffer: int, start: int, count: int) -> None:
        self._trace = trace
        self.rank = rank
        self.buffer = buffer
        self.start = start
        self.count = count

    def copy(self, to: Ref | int, *, channel: int = -1, lane: str | None = None) -> Ref:
        """Copy these chunks to `to`, or to the same place of rank `to`; the destination.

        `channel` asks for a worker of its own (equal numbers share one), `lane` for who moves the bytes.
        """
        if not isinstance(to, Ref):
            if not hasattr(to, "__index__"):
                self._trace.refuse(f"{self} goes to {to!r}, which is neither chunks nor a rank", sys._getframe(1))
            to = self._trace.rank(to).at(self.buffer)[self.start : self.start + self.count]
        self._trace.record(COPY, self, to, channel, lane, sys._getframe(1))
        return to

    def reduce(self, other: Ref, *, channel: int = -1, lane: str | None = None) -> Ref:
        """self += other, chunk by chunk, in place; self."""
        if not isinstance(other, Ref):
            self._trace.refuse(f"{other!r} is to be added to {self}, but is no chunk", sys._getframe(1))
        self._trace.record(REDUCE, other, self, channel, lane, sys._getframe(1))
        return self

    def split(self, parts: int) -> list[Ref]:
        """`parts` equal pieces; the count must be a multiple of `parts`."""
        if parts < 1 or self.count % parts:
            must = f"a divisor of the {self.count} chunks of this range"
            raise InvalidArgument(argument="parts", was=parts, must=must)
        size = self.count // parts
        return [Ref(self._trace, self.rank, self.buffer, self.start + one * size, size) for one in range(parts)]

    def __getitem__(self, index: int | slice) -> Ref:
        start, count = _range(index, self.count)
        if start < 0 or count < 1 or start + count > self.count:
            self._trace.refuse(f"{self} has no chunks {start} to {start + count - 1}", sys._getframe(1))
        return Ref(self._trace, self.rank, self.buffer, self.start + start, count)

    def __iter__(self) -> Iterator[Ref]:
        return (self[one] for one in range(self.count))

    def __repr__(self) -> str:
        return self._trace.describe(self.rank, self.buffer, self.start, self.count)


def _range(index: int | slice, size: int | None) -> tuple[int, int]:
    """First chunk and count; negative numbers are not counted from the end: rank arithmetic goes wrong that way."""
    if isinstance(index, slice):
        start = 0 if index.start is None else index.start
        stop = index.stop if index.stop is not None else size
        if stop is None or index.step not in (None, 1):
            raise InvalidArgument(argument="chunks", was=index, must="a range with an end and without a step")
        return _whole("chunks", start), _whole("chunks", stop) - _whole("chunks", start)
    return _whole("chunks", index), 1


def _whole(argument: str, value: Any) -> int:
    """As a Python integer; numpy's count."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(argument=argument, was=repr(value), must="a whole number") from None


class Buffer:
    """A buffer of one rank; indexed by chunk or range of chunks."""

    __slots__ = ("_number", "_rank", "_size", "_trace")

    def __init__(self, trace: Trace, rank: int, number: int, size: int | None) -> None:
        self._trace, self._rank, self._number, self._size = trace, rank, number, size

    def __getitem__(self, index: int | slice) -> Ref:
        start, count = (index, 1) if type(index) is int else _range(index, self._size)
        size = self._size
        if start < 0 or count < 1 or start + count > (MOST_OPERATIONS if size is None else size):
            what = self._trace.describe(self._rank, self._number, start, count)
            limits = f"it must be a non-empty range below {MOST_OPERATIONS}"
            if size is not None:
                limits = f"there are chunks 0 to {size - 1}"
            self._trace.refuse(f"{what} is out of bounds: {limits}", sys._getframe(1))
        return Ref(self._trace, self._rank, self._number, start, count)

    def __iter__(self) -> Iterator[Ref]:
        return (self[one] for one in range(len(self)))

    def __len__(self) -> int:
        """Chunks of an input or output; of a scratch buffer, as many as were named so far."""
        return self._size if self._size is not None else self._trace.scratch_size(self._rank, self._number)


class RankView:
    """One rank as a program sees it."""

    __slots__ = ("_trace", "input", "number", "output")

    def __init__(self, trace: Trace, number: int) -> None:
        self._trace = trace
        self.number = number
        self.input = Buffer(trace, number, INPUT, trace.contract.inputs[number])
        self.output = Buffer(trace, number, OUTPUT, trace.contract.outputs[number])

    def scratch(self, name: str = "scratch") -> Buffer:
        """A buffer of this name on this rank, as large as the largest chunk that is ever named in it."""
        return Buffer(self._trace, self.number, self._trace.scratch_number(name), None)

    def at(self, buffer: int) -> Buffer:
        return self.input if buffer == INPUT else self.output if buffer == OUTPUT else Buffer(
            self._trace, self.number, buffer, None
        )  # fmt: skip


class Trace:
    """What a program's function is handed: the ranks it moves chunks between, and the record of what it did."""

    def __init__(self, name: str, contract: Contract, topology: Topology, root: int = 0) -> None:
        self.name = name
        self.contract = contract
        self.root = root
        self.ranks = contract.ranks
        self.topology = topology
        self.chunks = contract.factor
        self.buffers = ["input", "output"]
        self.codes: list[CodeType] = []
        self._code_numbers: dict[CodeType, int] = {}
        self._scratch_numbers: dict[str, int] = {}
        self._scratch_sizes: dict[tuple[int, int], int] = {}
        self._rows = bytearray()
        self._parallel = 1
        self._views = [RankView(self, rank) for rank in range(self.ranks)]

    def rank(self, number: int) -> RankView:
        if type(number) is not int:
            number = _whole("rank", number)
        if not 0 <= number < self.ranks:
            self.refuse(f"rank {number} does not exist: there are ranks 0 to {self.ranks - 1}", sys._getframe(1))
        return self._views[number]

    def others(self, rank: int) -> list[int]:
        """All ranks but this one, starting with the next, so that no receiver is everybody's first."""
        rank = self.rank(rank).number
        return [(rank + step) % self.ranks for step in range(1, self.ranks)]

    @contextlib.contextmanager
    def parallel(self, ways: int) -> Iterator[None]:
        """What is moved inside goes in `ways` equal pieces by as many workers."""
        if not 1 <= _whole("ways", ways) <= _MOST_WAYS:
            raise InvalidArgument(argument="ways", was=ways, must=f"from 1 to {_MOST_WAYS}")
        before, self._parallel = self._parallel, self._parallel * ways
        try:
            yield
        finally:
            self._parallel = before

    def tile_ready(self, ref: Ref, parcel: int) -> Ref:
        """`ref`, of an input, holds its data once a kernel has signalled `parcel`; before that nobody may read it."""
        if not isinstance(ref, Ref) or ref.buffer != INPUT:
            self.refuse(f"{ref} cannot become ready: only an input can", sys._getframe(1))
        self.record(READY, Ref(self, ref.rank, ref.buffer, parcel, ref.count), ref, -1, None, sys._getframe(1))
        return ref

    def tile_needed(self, ref: Ref, tile: int) -> Ref:
        """Tell the kernel that waits for `tile` when `ref` has arrived."""
        self.record(NEEDED, Ref(self, ref.rank, ref.buffer, tile, ref.count), ref, -1, None, sys._getframe(1))
        return ref

    # -- the record ------------------------------------------------------------------------------------------------

    def record(self, kind: int, source: Ref, to: Ref, channel: int, lane: str | None, frame: FrameType) -> None:
        count = source.count
        if len(self._rows) >= _MOST_BYTES:
            must = f"of at most {MOST_OPERATIONS} operations on {self.ranks} ranks"
            raise InvalidArgument(argument="program", was=f"{self.name}, which is longer", must=must)
        if to.count != count:
            self.refuse(f"{source} has {count} chunks and {to} has {to.count}", frame)
        if kind <= REDUCE:
            if source.rank == to.rank and source.buffer == to.buffer:
                distance = source.start - to.start
                if kind == COPY and distance == 0:
                    return
                if -count < distance < count:
                    self.refuse(f"{source} and {to} overlap", frame)
            if source._trace is not self or to._trace is not self:
                self.refuse("a chunk of another program is used", frame)
            if source.rank != to.rank and not self.topology.reaches(source.rank, to.rank):
                self.refuse(f"no link leads from rank {source.rank} to rank {to.rank}", frame)
        if source.buffer > OUTPUT or to.buffer > OUTPUT:
            self._grow(source if kind <= REDUCE else to)
            self._grow(to)
        code = frame.f_code
        number = self._code_numbers.get(code)
        if number is None:
            number = self._code_numbers[code] = len(self.codes)
            self.codes.append(code)
        if lane is not None and lane not in LANES:
            raise InvalidArgument(argument="lane", was=repr(lane), must=f"one of {', '.join(LANES)}")
        try:
            self._rows += _pack(
                kind, source.rank, source.buffer, source.start, to.rank, to.buffer, to.start, count, number,
                frame.f_lineno, channel, self._parallel, ANY_LANE if lane is None else LANES.index(lane),
            )  # fmt: skip
        except struct.error:
            numbers = f"channel {channel!r}, or parcel or tile {source.start!r}"
            self.refuse(f"{numbers}, is no whole number below 2^31", frame)

    def rows(self) -> NDArray[np.int32]:
        """One row an operation, in program order; columns as `COLUMNS`. A view: look at it once all is recorded."""
        return np.frombuffer(self._rows, np.int32).reshape(-1, len(COLUMNS))

    def grain(self) -> int:
        """Pieces into which chunks must be cut for every `parallel` of this program."""
        return (
            math.lcm(*(int(one) for one in np.unique(self.rows()[:, COLUMNS.index("parallel")]))) if self._rows else 1
        )

    def scratch_number(self, name: str) -> int:
        number = self._scratch_numbers.get(name)
        if number is None:
            number = self._scratch_numbers[name] = len(self.buffers)
            self.buffers.append(name)
        return number

    def scratch_size(self, rank: int, buffer: int) -> int:
        return self._scratch_sizes.get((rank, buffer), 0)

    def _grow(self, ref: Ref) -> None:
        if ref.buffer > OUTPUT:
            key = (ref.rank, ref.buffer)
            self._scratch_sizes[key] = max(self._scratch_sizes.get(key, 0), ref.start + ref.count)

    # -- words for people --------------------------------------------------------------------------------------------

    def describe(self, rank: int, buffer: int, start: int, count: int) -> str:
        chunks = f"{start}" if count == 1 else f"{start}:{start + count}"
        return f"{self.buffers[buffer]}[{chunks}] of rank {rank}"

    def refuse(self, reason: str, frame: FrameType) -> NoReturn:
        """At the line of the program, be it that this file was called by itself on the way."""
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        raise ProgramRefused(program=self.name, where=where, reason=reason, trace="")


MADE: WeakValueDictionary[tuple[str, str], Program] = WeakValueDictionary()
"""Every program of this process by name and signature: what a table by size may name."""


class Program:
    """A traced function with its contract; made by `program`."""

    def __init__(
        self,
        function: Callable[[Trace], None],
        collective: str | Callable[[int, int], Contract] | Contract,
        ranks: int | None,
        chunks: int | Callable[[int], int],
    ) -> None:
        self.name = function.__name__
        self.__doc__ = function.__doc__
        self._function = function
        self._collective = collective
        self._chunks = chunks
        self.ranks = collective.ranks if isinstance(collective, Contract) else ranks
        promised = (
            [collective.name, collective.inputs, collective.outputs] if isinstance(collective, Contract) else collective
        )
        #: a few letters that differ where programs of one name differ: ranks compare them
        self.signature = signature_of(function, promised, chunks)
        MADE[self.name, self.signature] = self

    def __call__(self, trace: Trace) -> None:
        """A program may be a step of another one."""
        self._function(trace)

    def contract(self, ranks: int, root: int = 0) -> Contract:
        """What this program promises for so many ranks; `root` for collectives that have one."""
        if self.ranks is not None and ranks != self.ranks:
            raise InvalidArgument(argument="ranks", was=ranks, must=f"{self.ranks}, as program {self.name} is made for")
        if isinstance(self._collective, Contract):
            return self._collective
        make = BUILT_IN[self._collective] if isinstance(self._collective, str) else self._collective
        chunks = self._chunks(ranks) if callable(self._chunks) else self._chunks
        if _whole("chunks", chunks) < 1:
            raise InvalidArgument(argument="chunks", was=chunks, must=f"at least 1, also for {ranks} ranks")
        held = ranks * chunks * (ranks if self._collective in _SHARDED else 1)
        if held > MOST_OPERATIONS:  # before arrays of that length are made
            must = (
                f"so few that all of them hold at most {MOST_OPERATIONS} chunks, not {held} as by program {self.name}"
            )
            raise InvalidArgument(argument="ranks", was=ranks, must=must)
        if root == 0:
            return make(ranks, chunks)
        if self._collective not in ROOTED or not 0 <= root < ranks:
            must = f"below {ranks}" if self._collective in ROOTED else f"0: {self._collective} has no root"
            raise InvalidArgument(argument="root", was=root, must=must)
        rooted: Callable[..., Contract] = make
        return rooted(ranks, chunks, root=root)

    @property
    def collective(self) -> str:
        """The name of its contract."""
        return (
            self._collective if isinstance(self._collective, str) else getattr(self._collective, "__name__", "custom")
        )

    def trace(
        self,
        ranks: int | None = None,
        topology: Topology | None = None,
        root: int = 0,
        ready: bool = False,
        needed: bool = False,
    ) -> Trace:
        """Run the function once, moving nothing.

        `ready`: chunk i of every input comes with parcel i of a kernel. `needed`: tile i of a kernel waits for chunk i
        of every output. A program that says so itself needs neither.
        """
        count = ranks if ranks is not None else self.ranks if self.ranks is not None else topology and topology.ranks
        if not count or _whole("ranks", count) < 1:
            raise InvalidArgument(argument="ranks", was=ranks, must=f"at least 1 for program {self.name}")
        if topology is not None and topology.ranks != count:
            raise InvalidArgument(argument="topology", was=f"of {topology.ranks} ranks", must=f"of {count} ranks")
        trace = Trace(self.name, self.contract(count, root), topology or Topology.flat(count), root)
        for rank, chunks in enumerate(trace.contract.inputs if ready else ()):
            for chunk in range(chunks):
                trace.tile_ready(trace.rank(rank).input[chunk], chunk)
        self._function(trace)
        for rank, chunks in enumerate(trace.contract.outputs if needed else ()):
            for chunk in range(chunks):
                trace.tile_needed(trace.rank(rank).output[chunk], chunk)
        return trace

    def compile(
        self,
        ranks: int | None = None,
        topology: Topology | None = None,
        root: int = 0,
        ready: bool = False,
        needed: bool = False,
        **options: Any,
    ) -> Schedule:
        """Trace, lower and check; see `trace` and `compiler.compile_trace` for the options."""
        from .compiler import compile_trace

        return compile_trace(self.trace(ranks, topology, root, ready, needed), **options)


def program(
    collective: str | Callable[[int, int], Contract] | Contract,
    ranks: int | None = None,
    chunks: int | Callable[[int], int] = 1,
) -> Callable[[Callable[[Trace], None]], Program]:
    """Make a program of a function.

    `collective`: the name of a built-in contract, a function (ranks, chunks) -> Contract, or a Contract. `ranks`: the
    only number of ranks it works for; None for any. `chunks`: of a buffer (all_reduce, broadcast, ...) or of a shard
    (all_gather, reduce_scatter, all_to_all, ...), a number or a function of the number of ranks.
    """
    named = isinstance(collective, str) and collective in BUILT_IN
    if not named and not isinstance(collective, Contract) and (isinstance(collective, str) or not callable(collective)):
        must = f"one of {', '.join(BUILT_IN)}, or a contract"
        raise InvalidArgument(argument="collective", was=repr(collective), must=must)
    if isinstance(collective, FunctionType) and collective.__code__.co_argcount == 1:
        was, must = f"function {collective.__name__}", "the name of what it does: @program('all_reduce') above it"
        raise InvalidArgument(argument="collective", was=was, must=must)

    def decorate(function: Callable[[Trace], None]) -> Program:
        return Program(function, collective, ranks, chunks)

    return decorate
