"""An MSCCLang program: its statements are recorded in our chunk language, and everything else follows from there.

    with MSCCLProgram("ring", fully_connected(8), AllReduce(8, 8, True), instances=1):
        ...
        Check()
        XML()

`Check` asks the collective about the statements one after the other, as MSCCLang does, and our checker about what they
compile to, which it does not. `XML` prints only what passes. `sendtb`, `recvtb` and `ch` are hints: equal channels
share a worker, and threadblocks are made so that no connection has two. Reductions between different places, partly
overwritten sums, shifted ranges, local reductions, instances with mixed counts, exchanges that fill every queue: each
is compiled as the statements mean it, or refused with a reason.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from copy import copy
from dataclasses import replace
from enum import Enum
from io import StringIO
from types import FrameType, TracebackType
from typing import Any

from ...errors import InvalidArgument, ProgramRefused
from ..checker import check as check_schedule
from ..compiler import compile_trace
from ..contract import custom
from ..formats import XML as XML_SUFFIX
from ..formats import text
from ..formats.msccl import SLOTS, Facts
from ..language import COLUMNS, COPY, INPUT, OUTPUT, REDUCE, Trace
from ..language import Ref as Place
from ..schedule import Schedule
from .chunks import Buffer, Chunk, Content
from .collectives import Collective
from .meaning import meaning
from .topologies import Topology

_current: MSCCLProgram | None = None
_UNSAID = -(1 << 31)  # -1 is the same for scratch, but a place like any other of a buffer that lies in another one


class ThreadblockPolicy(Enum):
    """Who gives operations to threadblocks; a hint here."""

    auto = "auto"
    manual = "manual"

    def __str__(self) -> str:
        return self.value


class MSCCLProgram:
    """What is written inside `with` belongs to it. `buffers[rank][buffer]` is what each slot holds by now."""

    def __init__(
        self,
        name: str,
        topo: Topology,
        collective: Collective,
        instances: int,
        protocol: str = "Simple",
        threadblock_policy: ThreadblockPolicy = ThreadblockPolicy.auto,
        interleaved_replication: bool = True,
        instr_fusion: bool = True,
        check_xml: bool = True,
        dependence_nop: bool = False,
    ) -> None:
        if protocol not in SLOTS:
            raise InvalidArgument(argument="protocol", was=repr(protocol), must=f"one of {', '.join(SLOTS)}")
        if topo.num_nodes() != collective.num_ranks:
            was, must = f"of {topo.num_nodes()} ranks", f"of {collective.num_ranks}, as the collective"
            raise InvalidArgument(argument="topo", was=was, must=must)
        self.name, self.topo, self.collective, self.instances = name, topo, collective, instances
        self.protocol, self.threadblock_policy, self.instr_fusion = protocol, threadblock_policy, instr_fusion
        self.num_ranks = collective.num_ranks
        self.buffers: list[dict[object, list[Content]]] = []
        for one in collective.init_buffers():
            self.buffers.append(dict(one.items()))
        for of_rank in self.buffers:  # where a file speaks of one buffer only, the other is the same
            of_rank.setdefault(Buffer.output, of_rank[Buffer.input])
        self._given = [list(one[Buffer.input]) for one in self.buffers]
        contract = collective.contract()
        self.in_place = collective.inplace
        if contract is None:
            sizes = [[len(one[buffer]) for one in self.buffers] for buffer in (Buffer.input, Buffer.output)]
            contract = custom(collective.name, sizes[0], sizes[1], {})
            self.in_place = self._overlap() is not None  # a custom collective shows it by its buffers
        self.trace = Trace(name, contract, topo.as_ours())
        self._names: dict[object, str] = {Buffer.scratch: "scratch"}

    def __enter__(self) -> MSCCLProgram:
        global _current
        if _current is not None:
            raise InvalidArgument(argument="program", was="begun inside another one", must="begun outside all others")
        _current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _current
        _current = None

    # -- what it compiles to -------------------------------------------------------------------------------------------

    def compile(self, target: str = "staged", **options: Any) -> Schedule:
        """The schedule, checked. Options as of `undertow.collective.Program.compile`."""
        trace, in_place = self._finished()
        chosen = {"in_place": in_place, "instances": self.instances, "fuse": self.instr_fusion, **options}
        schedule = compile_trace(trace, target=target, check=False, **chosen)
        rows = trace.rows()
        stored = rows[rows[:, COLUMNS.index("kind")] <= REDUCE, COLUMNS.index("buffer")]
        if not schedule.in_place and (stored == INPUT).any():  # MSCCLang lets inputs be overwritten
            schedule = replace(schedule, keeps_input=False)
        check_schedule(schedule)
        return schedule

    def _finished(self) -> tuple[Trace, bool]:
        """The trace and whether it is for calls in place; a custom collective's contract is what the statements do."""
        if self.collective.contract() is not None:
            return self.trace, self.in_place
        inputs, outputs, overlap = self.trace.contract.inputs, self.trace.contract.outputs, self._overlap()
        if overlap is None:
            touched = self._touched()
            if len(touched) == 1:  # where statements speak of one user buffer only, its result stands there
                inputs, outputs = (inputs, inputs) if touched == {INPUT} else (outputs, outputs)
                overlap = (0,) * self.num_ranks
            elif self._wants_inputs():
                reason = "its result stands in inputs as well as in outputs, and no file can say so"
                raise ProgramRefused(program=self.name, where="its collective", reason=reason, trace="")
        sizes = replace(custom("custom", inputs, outputs, {}), in_place=overlap)
        finished = copy(self.trace)
        finished.contract = replace(custom("custom", inputs, outputs, meaning(self.trace, sizes)), in_place=overlap)
        return finished, overlap is not None

    def _touched(self) -> set[int]:
        """The user buffers that the statements speak of."""
        rows = self.trace.rows()
        named = rows[:, [COLUMNS.index("buffer"), COLUMNS.index("source_buffer")]]
        return {INPUT, OUTPUT} & set(named.reshape(-1).tolist())

    def _wants_inputs(self) -> bool:
        """Whether the collective is content with the buffers, but would not be if inputs were as they were given."""
        changed = [one[Buffer.input] for one in self.buffers]
        if changed == self._given:
            return False
        try:
            with redirect_stdout(StringIO()):
                content = self.collective.check(self)
                for one, given in zip(self.buffers, self._given, strict=True):
                    one[Buffer.input] = given
                return content and not self.collective.check(self)
        finally:
            for one, slots in zip(self.buffers, changed, strict=True):
                one[Buffer.input] = slots

    def check(self) -> bool:
        """Whether the statements do what the collective says, and what they compile to is right in every order."""
        if not self.collective.check(self):
            return False
        try:
            self.compile()
        except ProgramRefused as error:
            print(error)
            return False
        return True

    def xml(self) -> str:
        """What `XML` prints; a wrong program is refused."""
        schedule = self.compile()
        return text(schedule, XML_SUFFIX, facts=Facts(self.protocol, (schedule.in_place,)))

    def generate_xml(self) -> str:
        """As msccl-tools calls it."""
        return self.xml()

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _overlap(self) -> tuple[int, ...] | None:
        """Of a custom collective: the place of the shorter user buffer inside the longer, on each rank; None: apart."""
        if all(one[Buffer.input] is one[Buffer.output] for one in self.buffers):
            return (0,) * self.num_ranks
        for inner, outer in ((Buffer.output, Buffer.input), (Buffer.input, Buffer.output)):
            found = [self.collective.get_buffer_index(rank, inner, 0) for rank in range(self.num_ranks)]
            if all(buffer is outer for buffer, _ in found):
                return tuple(index for _, index in found)
        return None

    def _at(self, rank: int, buffer: object, index: int) -> Content:
        slots = self.buffers[rank].get(buffer, [])
        return slots[index] if 0 <= index < len(slots) else None

    def _put(self, rank: int, buffer: object, index: int, content: Content) -> None:
        slots = self.buffers[rank].setdefault(buffer, [])
        if index >= len(slots) and buffer not in (Buffer.input, Buffer.output):
            slots.extend([None] * (index + 1 - len(slots)))
        slots[index] = content

    def _ref(self, rank: int, buffer: object, index: int, size: int) -> Ref:
        """To where these slots really lie: in place, an index may lead beyond the buffer it is said of, as there."""
        if not 0 <= rank < self.num_ranks:  # a collective of the user's own is asked about ranks that exist only
            self.trace.refuse(f"rank {rank} does not exist: there are ranks 0 to {self.num_ranks - 1}", _caller())
        real, at = self.collective.get_buffer_index(rank, buffer, index)
        self._place(rank, real, at, size)
        return Ref(self, rank, real, at, size)

    def _place(self, rank: int, buffer: object, index: int, size: int) -> Place:
        """The same in our language; what is out of bounds is refused with the program's own line."""
        contract = self.trace.contract
        own = contract.inputs if buffer is Buffer.input else contract.outputs if buffer is Buffer.output else None
        if not 0 <= rank < self.num_ranks:
            self.trace.refuse(f"rank {rank} does not exist: there are ranks 0 to {self.num_ranks - 1}", _caller())
        if index < 0 or size < 1 or (own is not None and index + size > own[rank]):
            held = "" if own is None else f", which has {own[rank]}"
            reason = f"{size} chunks from {index} on are no part of buffer {buffer} of rank {rank}{held}"
            self.trace.refuse(reason, _caller())
        view = self.trace.rank(rank)
        if buffer is Buffer.input:
            return view.input[index : index + size]
        if buffer is Buffer.output:
            return view.output[index : index + size]
        if buffer not in self._names:
            name = buffer if isinstance(buffer, str) else repr(buffer)
            while name in self._names.values():  # 'scratch' and Buffer.scratch are two buffers
                name += "'"
            self._names[buffer] = name
        return view.scratch(self._names[buffer])[index : index + size]

    def _record(self, kind: int, source: Ref, to: Ref, channel: int, frame: FrameType) -> None:
        self.trace.record(kind, source._place(), to._place(), channel, None, frame)
        for part in range(to.size):
            content = self._at(source.rank, source.buffer, source.index + part)
            if kind == REDUCE:
                old = self._at(to.rank, to.buffer, to.index + part)
                content = None if old is None or content is None else old.reduce(to.rank, content)
            self._put(to.rank, to.buffer, to.index + part, content)


class Ref:
    """`size` chunks from `index` on of a buffer of a rank: in place, of the buffer that they really lie in."""

    def __init__(self, prog: MSCCLProgram, rank: int, buffer: object, index: int, size: int) -> None:
        self.prog, self.rank, self.buffer, self.index, self.size = prog, rank, buffer, index, size

    def __repr__(self) -> str:
        return f"Ref({self.buffer}, index {self.index}, size {self.size}, rank {self.rank})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return id(self.prog), self.rank, self.buffer, self.index, self.size

    def copy(
        self, dst: int, buffer: object = None, index: int = _UNSAID, sendtb: int = -1, recvtb: int = -1, ch: int = -1
    ) -> Ref:
        """To rank `dst`: the same place, or that buffer and index; in scratch, without an index, behind all of it.

        In place, buffer and index are understood as on the rank that sends: AllGather's input 0 is where the sender's
        shard lies, at the receiver too.
        """
        if buffer is None:
            buffer = self.buffer
            index = self.index if index in (_UNSAID, -1) else index
        if index in (_UNSAID, -1) and buffer not in (Buffer.input, Buffer.output):
            index = len(self.prog.buffers[dst].get(buffer, []))
        if index == _UNSAID:
            self.prog._place(dst, buffer, -1, self.size)  # which is refused
        to = self.prog._ref(dst, *self.prog.collective.get_buffer_index(self.rank, buffer, index), self.size)
        if (to.rank, to.buffer, to.index) == (self.rank, self.buffer, self.index):
            return to  # in place, it is there already
        self.prog._record(COPY, self, to, _channel(ch, sendtb, recvtb), sys._getframe(1))
        return to

    def reduce(self, other_chunkref: Ref, sendtb: int = -1, recvtb: int = -1, ch: int = -1) -> Ref:
        """self += other, at self."""
        if not isinstance(other_chunkref, Ref):  # chunk() gives None where nothing stands yet
            must = "a reference, as chunk() gives it where something stands"
            raise InvalidArgument(argument="other_chunkref", was=repr(other_chunkref), must=must)
        self.prog._record(REDUCE, other_chunkref, self, _channel(ch, sendtb, recvtb), sys._getframe(1))
        return self

    def split(self, num: int) -> list[Ref]:
        """`num` equal parts."""
        if num < 1 or self.size % num:
            raise InvalidArgument(
                argument="num", was=num, must=f"a divisor of {self.size}, the chunks of this reference"
            )
        size = self.size // num
        return [Ref(self.prog, self.rank, self.buffer, self.index + part * size, size) for part in range(num)]

    def group(self, other: Ref) -> Ref:
        """The smallest range with both in it; of one buffer."""
        if (self.rank, self.buffer) != (other.rank, other.buffer):
            raise InvalidArgument(argument="other", was=repr(other), must=f"in the buffer of {self!r}")
        first = min(self.index, other.index)
        end = max(self.index + self.size, other.index + other.size)
        return Ref(self.prog, self.rank, self.buffer, first, end - first)

    def get_origin_rank(self, index: int = 0) -> int:
        return self._chunk(index).origin_rank

    def get_origin_index(self, index: int = 0) -> int:
        return self._chunk(index).origin_index

    def get_dst_rank(self, index: int = 0) -> int:
        return self._chunk(index).dst_rank

    def get_dst_index(self, index: int = 0) -> int:
        return self._chunk(index).dst_index

    def print_chunk_info(self, index: int = 0) -> None:
        print(self.prog._at(self.rank, self.buffer, self.index + index))

    def _chunk(self, index: int) -> Chunk:
        found = self.prog._at(self.rank, self.buffer, self.index + index)
        if not isinstance(found, Chunk):
            raise InvalidArgument(
                argument="index", was=index, must=f"that of a single chunk, but {self!r} holds {found}"
            )
        return found

    def _place(self) -> Place:
        return self.prog._place(self.rank, self.buffer, self.index, self.size)


def _caller() -> FrameType:
    """The innermost frame that is not of this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _channel(ch: int, sendtb: int, recvtb: int) -> int:
    """One hint of three: threadblocks of their own ask for a connection of their own."""
    return ch if ch >= 0 else max(sendtb, recvtb)


def _curr() -> MSCCLProgram:
    if _current is None:
        raise InvalidArgument(argument="program", was="not begun", must="begun by `with MSCCLProgram(...)`")
    return _current


def chunk(rank: int, buffer: object, index: int, size: int = 1) -> Ref | None:
    """A reference to chunks; None where nothing stands at the first of them."""
    prog = _curr()
    found = prog._ref(rank, buffer, index, size)
    return found if prog._at(rank, found.buffer, found.index) is not None else None


def create_scratch(rank: int, name: object) -> None:
    """A scratch buffer of this name; copying to it makes one just as well."""
    _curr().buffers[rank].setdefault(name, [])


def Check() -> bool:
    """Whether the program is right; says what is not."""
    return _curr().check()


def XML() -> None:
    """Print the program as MSCCL's XML."""
    print(_curr().xml())


def Print() -> None:
    """Print what every slot holds."""
    for rank, of_rank in enumerate(_curr().buffers):
        for buffer, contents in of_rank.items():
            print(rank, buffer, contents)
