"""A walk (`lane_plan`) for calls of one size: its steps with operands, offsets and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import lane_steps as steps
from .bind import FIRST_WORKSPACE, SCRATCH, bind
from .lane_rows import Operand, Piece, Rows

if TYPE_CHECKING:
    from .lane_plan import Walk
    from .schedule import Schedule

WORKSPACE, SPARE = FIRST_WORKSPACE, FIRST_WORKSPACE + 1  # bases, after source and out


@dataclass(frozen=True, slots=True)
class Addition:
    """One chunk of one instruction: the first of `stores` becomes the sum of `sources`, the others copies of it."""

    elements: int
    sources: tuple[Operand, ...]
    stores: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Letter:
    """A message of mine; to all others, if it is `shared`. `offset` is in the receiver's workspace."""

    lane: int
    peers: tuple[int, ...]
    offset: int
    elements: int
    value: Operand  # what is sent
    slot: int
    step: int  # of the slot, in every iteration
    shared: bool


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message to me."""

    lane: int
    peer: int
    offset: int
    elements: int
    slot: int
    step: int
    shared: bool


@dataclass(frozen=True, slots=True)
class BoundWalk:
    """Runs of steps on one track each. Lengths in elements."""

    runs: list[tuple[int, list[tuple[int, Any]]]]
    iterations: int
    tile: int
    copy: int  # of the workspace: there are `depth` of them
    needs: tuple[int, int]  # elements of source and out
    parts: frozenset[int]  # how many are summed


def bind_walk(
    schedule: Schedule, walk: Walk, rank: int, span_lengths: Sequence[int], stride: int, item_size: int
) -> BoundWalk:
    """The walk of `rank` for spans of these lengths; a chunk of the workspace has `stride` bytes.

    What a lane holds is counted in messages of a chunk, so where it holds few of them chunks stay apart.
    """
    bound = bind(schedule, rank, span_lengths, stride, item_size, 0, 0, merge=not walk.counted)
    rows = Rows(bound.code, rank, stride // item_size)
    mine = (
        at
        for worker in schedule.workers_of(rank)
        for at in range(int(schedule.worker_start[worker]), int(schedule.worker_start[worker + 1]))
    )
    pieces = {at: rows.pieces(row) for row, at in enumerate(mine)}  # as `bind` puts them
    lengths = {
        (at, place): elements for at, some in pieces.items() for place, elements in rows.places_read(some).items()
    }
    runs: list[tuple[int, list[tuple[int, Any]]]] = []
    for kind, track, numbers in walk.steps:
        if kind == steps.RUN:
            found: Any = list(_additions(walk, pieces[numbers[0]], numbers[0], rows.room))
        elif kind == steps.SEND:
            found = [one for at in numbers for one in _letters(schedule, walk, pieces[at], at, rows.room)]
        elif kind in (steps.EXPECT, steps.RECEIVE, steps.FREE):
            found = [_transfer(walk, number, lengths, rows.room) for number in numbers]
        else:
            found = numbers[0]
        if not runs or runs[-1][0] != track:
            runs.append((track, []))
        runs[-1][1].append((kind, found))
    contract, unit = schedule.contract, max(1, 16 // item_size)  # as `bind` cuts
    classes = contract.class_lengths(span_lengths, unit)
    items = contract.item_class[contract.first_item[rank] : contract.first_item[rank + 1]]
    outputs = contract.output_class[contract.first_output[rank] : contract.first_output[rank + 1]]
    needs = int(classes[items].sum()), int(classes[outputs].sum())
    every = [one for some in pieces.values() for one in some]
    parts = frozenset(len(one.sources) for one in every)
    tile = bound.tile
    if bound.iterations == 1:  # chunks that lie side by side everywhere are one piece then
        tile = max([tile, *(one.elements for one in every)])
    return BoundWalk(runs, bound.iterations, tile, int(bound.code[SCRATCH]), needs, parts)


def _additions(walk: Walk, pieces: list[Piece], at: int, room: int) -> Iterator[Addition]:
    for number, one in enumerate(pieces):
        yield Addition(one.elements, one.sources, _stores(walk, one, number, at, room))


def _stores(walk: Walk, piece: Piece, number: int, at: int, room: int) -> tuple[Operand, ...]:
    """Where piece `number` of an instruction goes: to a spare, if it is only sent."""
    spare = walk.spare_of.get(at)
    return piece.stores if spare is None else ((SPARE, (spare + number) * room),)


def _letters(schedule: Schedule, walk: Walk, pieces: list[Piece], at: int, room: int) -> Iterator[Letter]:
    for number, piece in enumerate(pieces):
        sends_source = steps.sends_source(schedule, at)
        value = piece.sources[0] if sends_source else _stores(walk, piece, number, at, room)[0]
        sent = [walk.sent_as[at, peer, place] for peer, place in piece.remote]
        shared = walk.messages[sent[0]].shared
        for some in [sent] if shared else [[one] for one in sent]:
            peers = tuple(walk.messages[one].receiver for one in some)
            one, lane = walk.messages[some[0]], walk.lane_of[some[0]]
            yield Letter(lane, peers, one.place * room, piece.elements, value, one.slot, one.step, shared)


def _transfer(walk: Walk, number: int, lengths: dict[tuple[int, int], int], room: int) -> Transfer:
    one, lane = walk.messages[number], walk.lane_of[number]
    elements = lengths.get((one.first_read, one.place), 0)
    return Transfer(lane, one.sender, one.place * room, elements, one.slot, one.step, one.shared)
