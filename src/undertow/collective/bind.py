"""A schedule made concrete for one rank and one size of call: chunks become element ranges, waits become words.

The result is one flat array of 64-bit integers that an interpreter reads (on the CPU here, on a GPU after an upload).
An operand is (base, offset, scratch): an element offset into one of the call's base addresses. User memory advances
with the tile of the iteration; scratch does not, but alternates between its `depth` copies, and each instance has its
own part of every chunk of it. Places in scratch do not depend on the size of a call: a rank that is a call ahead writes
only to places whose semaphores it has heeded. Where a schedule has packets, every byte of scratch takes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument
from .language import INPUT, OUTPUT
from .schedule import END, MOVE, NEEDED, READY, START

if TYPE_CHECKING:
    from .schedule import Schedule

# Header words of a bound program.
(
    WORKERS, INSTRUCTIONS, WAITS, POSTS, PIECES, OPERANDS, TILE, ITEM_SIZE, TYPE, OPERATION, DEPTH, SCRATCH, SLICE,
    INSTANCES, RANKS, PACKETS,
) = range(16)  # fmt: skip
HEADER = 16
WORKER_ROW = 4  # start instruction or -1, first and last + 1 of the body, end instruction or -1
INSTRUCTION_ROW = 8  # kind, number, wait lo, wait hi, piece lo, piece hi, post lo, post hi
WAIT_ROW = 4  # semaphore of this rank, value, iterations back, posts an iteration (negative: a call)
POST_ROW = 2  # rank, semaphore of that rank
PIECE_ROW = 5  # elements, source lo, source hi, store lo, store hi
OPERAND_ROW = 3  # base, offset in elements, kind of memory
USER, SCRATCH_MEMORY, PACKET_MEMORY = 0, 1, 2
# Base addresses of a call: my input, my output, the workspace of each rank, then (direct) inputs and outputs of all.
MY_INPUT, MY_OUTPUT, FIRST_WORKSPACE = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Bound:
    """What one rank runs for calls of one size. `tile` is in elements."""

    code: NDArray[np.int64]
    workers: int
    iterations: int
    tile: int


def semaphore_words(schedule: Schedule) -> NDArray[np.int64]:
    """The number of each semaphore among those of its waiter's rank."""
    rank = schedule.worker_rank[schedule.semaphore_waiter]
    order = np.argsort(rank, kind="stable")
    count = np.bincount(rank, minlength=schedule.ranks)
    found = np.empty(len(rank), np.int64)
    found[order] = np.arange(len(rank)) - np.repeat(np.cumsum(count) - count, count)
    return found


def most_semaphores(schedule: Schedule) -> int:
    """Semaphores of the rank that has most of them, all instances together."""
    rank = schedule.worker_rank[schedule.semaphore_waiter]
    return int(np.bincount(rank, minlength=schedule.ranks).max(initial=0)) * schedule.instances


def workspace_bytes(schedule: Schedule, stride: int) -> int:
    """Scratch and staging of a rank, all copies, where a chunk of it takes `stride` bytes."""
    return int(schedule.atoms[:, 2:].sum(axis=1).max(initial=0)) * stride * schedule.depth * (1 + schedule.packets)


def bind(
    schedule: Schedule,
    rank: int,
    span_lengths: Sequence[int],
    stride: int,
    item_size: int,
    type_code: int,
    operation: int,
    tile: int | None = None,
    merge: bool = True,
) -> Bound:
    """The program of `rank` for spans of these lengths; a chunk of scratch has `stride` bytes.

    `tile`: bytes of a chunk that an iteration moves; None for `stride` where there is scratch, else all of it. `merge`:
    whether chunks that lie side by side everywhere may be one piece.
    """
    unit = max(1, 16 // item_size)  # chunks begin on 16 bytes where they can
    length = schedule.contract.class_lengths(span_lengths, unit)
    check_places(schedule, length)
    room = stride // item_size
    step, iterations = tiling(schedule, length, stride, item_size, tile)
    offsets = Offsets(schedule, rank, length, room)
    words = semaphore_words(schedule)
    one = schedule.instructions
    mine = schedule.workers_of(rank)
    workers: list[tuple[int, int, int, int]] = []
    instructions: list[tuple[int, ...]] = []
    waits: list[tuple[int, ...]] = []
    posts: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    operands: list[tuple[int, ...]] = []
    for worker in mine:
        span = range(int(schedule.worker_start[worker]), int(schedule.worker_start[worker + 1]))
        first = len(instructions)
        kinds = [int(one.kind[at]) for at in span]
        starts, ends = START in kinds, END in kinds
        last = first + len(span)
        workers.append((first if starts else -1, first + starts, last - ends, last - 1 if ends else -1))
        for at in span:
            wait_from, piece_from, post_from = len(waits), len(pieces), len(posts)
            for entry in range(one.wait_start[at], one.wait_start[at + 1]):
                semaphore = int(one.wait_semaphore[entry])
                if schedule.semaphore_of_packets[semaphore]:
                    continue
                counted = int(schedule.semaphore_posts[semaphore])
                counted = -counted if schedule.semaphore_of_start[semaphore] else counted
                waits.append((int(words[semaphore]), int(one.wait_value[entry]), int(one.wait_back[entry]), counted))
            for entry in range(one.post_start[at], one.post_start[at + 1]):
                semaphore = int(one.post_semaphore[entry])
                if schedule.semaphore_of_packets[semaphore]:
                    continue
                posts.append((int(schedule.worker_rank[schedule.semaphore_waiter[semaphore]]), int(words[semaphore])))
            if one.kind[at] == MOVE:
                # Instances cut pieces into parts: whoever else touches one of the chunks must cut it alike.
                merges = merge and iterations == 1 and schedule.instances == 1
                _add_pieces(schedule, at, length, offsets, merges, pieces, operands)
            instructions.append(
                (int(one.kind[at]), int(one.number[at]), wait_from, len(waits), piece_from, len(pieces), post_from,
                 len(posts))
            )  # fmt: skip
    tables = [
        _table(workers, WORKER_ROW), _table(instructions, INSTRUCTION_ROW), _table(waits, WAIT_ROW),
        _table(posts, POST_ROW), _table(pieces, PIECE_ROW), _table(operands, OPERAND_ROW),
    ]  # fmt: skip
    header = np.zeros(HEADER, np.int64)
    at = HEADER + len(tables[0])
    for word, table in zip((INSTRUCTIONS, WAITS, POSTS, PIECES, OPERANDS), tables[1:], strict=True):
        header[word] = at
        at += len(table)
    if iterations == 1:
        step = max(step, max((piece[0] for piece in pieces), default=1))  # neighbouring chunks are moved as one
    copies = schedule.depth * (1 + schedule.packets)
    header[[WORKERS, TILE, ITEM_SIZE, TYPE, OPERATION, DEPTH, SCRATCH, SLICE, INSTANCES, RANKS, PACKETS]] = (
        len(mine), step, item_size, type_code, operation, schedule.depth,
        workspace_bytes(schedule, stride) // copies // item_size, room // schedule.instances, schedule.instances,
        schedule.ranks, schedule.packets,
    )  # fmt: skip
    return Bound(np.concatenate([header, *tables]), len(mine), iterations, step)


def tiling(
    schedule: Schedule, length: NDArray[np.int64], stride: int, item_size: int, tile: int | None
) -> tuple[int, int]:
    """Elements of a chunk that an iteration moves, and how many iterations the longest chunk takes."""
    longest = max(1, int(length.max(initial=0)))
    wanted = longest if tile is None and not schedule.loops else (stride if tile is None else tile) // item_size
    if schedule.loops:
        wanted = min(wanted, stride // item_size)
    step = max(1, min(wanted, longest))
    return step, -(-longest // step)


def _table(rows: Sequence[tuple[int, ...]], width: int) -> NDArray[np.int64]:
    return np.array(rows, np.int64).reshape(-1, width).ravel()


def check_places(schedule: Schedule, length: NDArray[np.int64]) -> None:
    """Refuse, on all ranks alike, lengths with which a chunk would not fit where this program puts it."""
    for home, content in schedule.misplaced:
        # In place, input and output are cut into chunks at the same places, so there lengths must be equal.
        fits = length[home] == length[content] if schedule.in_place else length[home] >= length[content]
        if not fits:
            was = f"such that {schedule.name} puts a chunk of {length[content]} elements where {length[home]} stand"
            must = f"equal spans, each a multiple of {schedule.contract.factor} chunks of equal length"
            raise InvalidArgument(argument="span_lengths", was=was, must=must)


class Offsets:
    """Where each atom lies, as (base, element offset, scratch or not)."""

    def __init__(self, schedule: Schedule, rank: int, length: NDArray[np.int64], room: int) -> None:
        self._schedule, self._rank, self._room = schedule, rank, room
        contract = schedule.contract
        self._user: dict[tuple[int, int], NDArray[np.int64]] = {}
        ranks = range(contract.ranks) if not schedule.staged else (rank,)
        for other in ranks:
            items = contract.item_class[contract.first_item[other] : contract.first_item[other + 1]]
            outputs = contract.output_class[contract.first_output[other] : contract.first_output[other + 1]]
            for buffer, classes in ((INPUT, items), (OUTPUT, outputs)):
                self._user[other, buffer] = np.concatenate([[0], np.cumsum(length[classes])])
        scratch = schedule.atoms[:, 2:]
        self._scratch_first = np.zeros_like(scratch)
        if scratch.shape[1]:
            self._scratch_first[:, 1:] = np.cumsum(scratch, axis=1)[:, :-1]

    def of(self, atom: int, count: int, length: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
        """(base, offset, scratch) of each of `count` chunks, and whether the next one follows without a gap."""
        schedule = self._schedule
        other, buffer = int(schedule.atom_rank[atom]), int(schedule.atom_buffer[atom])
        if atom < schedule.user_atoms:
            index = atom - int(schedule.first_atom[other, buffer])
            begins = self._user[other, buffer]
            base = buffer if other == self._rank else FIRST_WORKSPACE + schedule.ranks * (1 + buffer) + other
            found = []
            for part in range(count):
                follows = part + 1 < count and begins[index + part] + length[part] == begins[index + part + 1]
                found.append((base, int(begins[index + part]), 0, int(follows)))
            return found
        index = int(self._scratch_first[other, buffer - 2]) + atom - int(schedule.first_atom[other, buffer])
        staging = schedule.packets and buffer == len(schedule.buffers) - 1
        kind = PACKET_MEMORY if staging else SCRATCH_MEMORY
        return [(FIRST_WORKSPACE + other, (index + part) * self._room, kind, 0) for part in range(count)]


def _add_pieces(
    schedule: Schedule,
    at: int,
    class_length: NDArray[np.int64],
    offsets: Offsets,
    merges: bool,
    pieces: list[tuple[int, ...]],
    operands: list[tuple[int, ...]],
) -> None:
    """One piece a chunk; neighbours that lie side by side everywhere become one, if the whole call `merges`.

    Empty pieces are left out, but not with packets: their flags are what others wait for.
    """
    one = schedule.instructions
    count = int(one.count[at])
    length = class_length[one.class_of[one.class_start[at] : one.class_start[at] + count]]
    sources = [
        offsets.of(int(atom), count, length)
        for atom in one.source_atom[one.source_start[at] : one.source_start[at + 1]]
    ]
    stores = [
        offsets.of(int(atom), count, length) for atom in one.store_atom[one.store_start[at] : one.store_start[at + 1]]
    ]
    part = 0
    while part < count:
        elements = int(length[part])
        last = part
        while merges and last + 1 < count and all(one_of[last][3] for one_of in (*sources, *stores)):
            last += 1
            elements += int(length[last])
        if elements or schedule.packets:
            first = len(operands)
            operands.extend(one_of[part][:3] for one_of in sources)
            middle = len(operands)
            operands.extend(one_of[part][:3] for one_of in stores)
            pieces.append((elements, first, middle, middle, len(operands)))
        part = last + 1


def waits_for_kernels(schedule: Schedule) -> bool:
    """Whether the schedule is tied to kernels by `tile_ready` or `tile_needed`."""
    return bool(np.isin(schedule.instructions.kind, (READY, NEEDED)).any())
