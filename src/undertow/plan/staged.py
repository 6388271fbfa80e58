"""Parcels over a lane that is staged through host memory: who waits for which engine. Equations only: nothing runs.

A parcel passes these stages, in order; a stage takes the parcels one after the other:

    stage     all_to_all   reduce_scatter   all_reduce   works on       each rank, of pieces of p bytes
    out           x              x               x       engine out     R - 1 pieces leave
    in            x              x               x       engine in      R - 1 pieces arrive
    sum                          x               x       SMs            reads R pieces, writes one
    share                                        x       engine out     one piece leaves, once for all
    gather                                       x       engine in      R - 1 pieces arrive

What a kernel posts (`posts`) goes to one rank at a time, one piece in a copy: `post` is as `out`, and `land` as `in`,
but that its first job can start as soon as the first of `post` is done.

A copy costs its engine a `pause` and its bytes at the engine's `speed`; pieces longer than `chunk` are copied in parts,
each of which passes the stages as a parcel would, so that the first part arrives while the second leaves. Pieces of
peers that lie evenly apart go in one copy, so a rank needs one for what it sums (it chooses the places) and,
as its own place is a gap among the others', two elsewhere unless it is the first or the last.

Ranks of one GPU share its engines, which take their copies one after the other: a stage of a parcel is S jobs, S = R
there and 1 elsewhere. The first rank is ready at early_i, the last one at ready_i: where matmuls take the whole GPU one
after the other, ranks are not ready at once. With F and L the moments when the first and the last job of stage s of
parcel i are done, d the seconds of a job, and f the moment when the stage's engine has done all work it was given:

    out       its first job  early_i, its last one ready_i, and when the other ranks' `in` of the part is over that had
                             its place: two places for parcels of even numbers, two for others (of many ranks one)
    in        its first job  when all jobs of `out` but the last are done: it misses only its own rank's bytes, and
                             ranks are ready at even distances; its last job L(out, i)
              both after     the sum of parcel i - 1, which reads what these bytes overwrite
    sum       F(in, i), L(in, i): no queue, every rank has SMs of its own; the rank with most to sum counts
    share     F(sum, i), L(sum, i), and as `out`, of gather
    gather    as `in`, of share

    start = max(f, first + hop)      F = start + d      f = start + S d      L_i = max(f, last + hop + d, L_(i-1) + d)

Of the stages that want an engine, the one that can start first has it. Parcels of no bytes pass at once, and cost the
host nothing. Besides, nothing of parcel i starts before the host has enqueued it, which takes so many seconds for each
parcel before it (`enqueues`, by operator, or `enqueue` for each copy's stage). A call begins `call` seconds before all
this, for the host, and is over `end` seconds after it. Where the host runs ahead, `call` and enqueueing cost nothing
(`ahead`).

`fit` finds the engines' constants from measured runs of bare communication, each a `Sample`: speeds, pauses and `hop`
with which the equations are right, in proportion, as nearly as can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import InvalidArgument

STAGES = {
    "matmul_all_to_all": ("out", "in"),
    "matmul_reduce_scatter": ("out", "in", "sum"),
    "matmul_all_reduce": ("out", "in", "sum", "share", "gather"),
}
"""By operator; others are not described here."""
POSTS = "posts"
_STAGES = STAGES | {POSTS: ("post", "land")}
_ENGINE = {"post": 0, "out": 0, "share": 0, "land": 1, "in": 1, "gather": 1}
_LEFT_BY = {"land": "post", "in": "out", "gather": "share"}
_WAIT_FOR = {
    "post": ("post", "land"),
    "land": ("land", "post"),
    "out": ("out", "in"),
    "in": ("in", "sum", "out"),
    "sum": ("sum", "share", "in"),
    "share": ("share", "gather"),
    "gather": ("gather", "share"),
}
"""Which stages may go on when a parcel is through one."""
READ_BY = {"post": "land", "out": "in", "share": "gather"}
"""Who must have read a place before the next part may have it."""
_FITTED = ("out_speed", "in_speed", "out_pause", "in_pause", "hop", "end")
_FEW_RANKS, _MANY_PLACES, _FEW_PLACES = 4, 4, 2  # places between two ranks: `fabric.cuda_lanes.chunk_slots`
_SWEEPS = 60
_SMALLEST_STEP = 0.004


@dataclass(frozen=True, slots=True)
class Engines:
    """Bytes per second and seconds; see the module's equations. `sum_speed`: bytes read and written beside a matmul on
    all other SMs, `sum_speed_alone` without one.
    """

    out_speed: float
    in_speed: float
    out_pause: float
    in_pause: float
    hop: float
    chunk: int
    sum_speed: float
    sum_speed_alone: float
    end: float = 0.0
    call: float = 0.0
    enqueue: float = 0.0
    enqueues: tuple[tuple[str, float], ...] = ()

    @property
    def ahead(self) -> Engines:
        """The same for a host that has enqueued everything before the GPU gets there."""
        return replace(self, call=0.0, enqueue=0.0, enqueues=())

    def parcel_seconds(self, operator: str) -> float:
        """What the host needs to enqueue one parcel of that operator."""
        return dict(self.enqueues).get(operator, copy_stages(operator) * self.enqueue)


@dataclass(frozen=True, slots=True)
class Sample:
    """Bare communication of an operator: bytes of a rank's product, cut into equal parcels, and measured seconds."""

    operator: str
    nbytes: int
    parcels: int
    seconds: float


def copy_stages(operator: str) -> int:
    """How many stages of its parcels are copies."""
    return sum(stage in _ENGINE for stage in _STAGES[operator])


def places(ranks: int) -> int:
    """How many chunks can be under way between two ranks."""
    return _MANY_PLACES if ranks <= _FEW_RANKS else _FEW_PLACES


class Part(NamedTuple):
    """At most a chunk of each piece of a parcel. `before`: the part that had its place, -1 for none. `full`: how many
    parcels before it hold any bytes.
    """

    piece: float
    summed: float
    ready: float
    early: float
    parcel: int
    before: int
    full: int


def parts(
    pieces: Sequence[float],
    largest: Sequence[float],
    ready: Sequence[float],
    early: Sequence[float],
    chunk: int,
    slots: int,
) -> list[Part]:
    """All parcels in parts, in their order; `slots`: the places between two ranks."""
    found: list[Part] = []
    users: dict[int, int] = {}
    full = 0
    for number, piece in enumerate(pieces):
        for part in range(math.ceil(piece / chunk)):
            place = (number % 2 * (slots // 2) + part) % slots
            held = min(float(chunk), piece - part * chunk)
            summed = held * largest[number] / piece
            found.append(Part(held, summed, ready[number], early[number], number, users.get(place, -1), full))
            users[place] = len(found) - 1
        full += piece > 0
    return found


def last_arrival(
    engines: Engines,
    operator: str,
    ranks: int,
    shared: bool,
    pieces: Sequence[float],
    ready: Sequence[float],
    computing_until: float = 0.0,
    early: Sequence[float] | None = None,
    largest: Sequence[float] | None = None,
) -> float:
    """When the last parcel is through its last stage. `pieces[i]`: bytes that parcel i holds for each rank.

    `shared`: all ranks use one GPU's engines. Up to `computing_until` a matmul holds all SMs but those left to sums.
    `early[i]`: when the first rank is ready, None where all are at once; `ready[i]` is when the last one is.
    `largest[i]`: where a parcel does not hold the same for each rank, the most that it holds for one of them.
    """
    stages = _STAGES[operator]
    if ranks == 1:
        return 0.0
    steps = parts(pieces, largest or pieces, ready, early or ready, engines.chunk, places(ranks))
    count = len(steps)
    if not count:
        return 0.0
    jobs = ranks if shared else 1
    sizes = {part.piece for part in steps}  # few: most parts are whole chunks
    by_size = {
        stage: {piece: job_seconds(engines, stage, stages, ranks, shared, piece) for piece in sizes} for stage in stages
    }
    seconds = {stage: [by_size[stage][part.piece] for part in steps] for stage in stages}
    host = engines.parcel_seconds(operator)
    first: dict[str, list[float]] = {stage: [] for stage in stages}  # F of the parts that are through
    last: dict[str, list[float]] = {stage: [] for stage in stages}
    nearly: dict[str, list[float]] = {stage: [] for stage in stages}  # when all jobs but the last one are done
    free = [0.0, 0.0]
    hop = engines.hop

    def may_start(stage: str, at: int) -> tuple[float, float] | None:
        """When the stage's first and last job of part `at` can start; None: what they wait for is not known yet."""
        part = steps[at]
        enqueued = host * (part.full + 1)
        if stage in ("post", "out"):
            enqueued = host * part.full
            early, late = max(part.early, enqueued), max(part.ready, enqueued)
        elif stage in _LEFT_BY:
            before = _LEFT_BY[stage]
            if len(last[before]) <= at:
                return None
            begun = first if stage == "land" else nearly  # one piece of one rank
            early, late = max(enqueued, begun[before][at]), max(enqueued, last[before][at])
            if stage == "in" and "sum" in last and at:
                if len(last["sum"]) < at:
                    return None
                early, late = max(early, first["sum"][at - 1]), max(late, last["sum"][at - 1])
        else:
            before = "in" if stage == "sum" else "sum"
            if len(last[before]) <= at:
                return None
            early, late = max(first[before][at], enqueued), max(last[before][at], enqueued)
        if stage in READ_BY and part.before >= 0:
            reader = READ_BY[stage]
            if len(last[reader]) <= part.before:
                return None
            over = last[reader][part.before]
            early, late = max(early, nearly[reader][part.before]), max(late, over)
        return early + hop, late + hop

    waiting = {stage: may_start(stage, 0) for stage in stages}
    for _ in range(count * len(stages)):
        chosen: tuple[float, float, float, str] | None = None
        for stage, found in waiting.items():
            if found is not None:
                begin = max(found[0], free[_ENGINE[stage]]) if stage in _ENGINE else found[0]
                if chosen is None or (begin, found[0]) < chosen[:2]:
                    chosen = begin, found[0], found[1], stage
        assert chosen is not None  # the earliest part that is not through can always go on
        begin, _, late, stage = chosen
        at = len(last[stage])
        if stage == "sum":
            nbytes = (ranks + 1) * steps[at].summed
            first[stage].append(begin + _summing(engines, nbytes, begin, computing_until))
            last[stage].append(late + _summing(engines, nbytes, late, computing_until))
        else:
            job = seconds[stage][at]
            end = free[_ENGINE[stage]] = begin + jobs * job
            first[stage].append(begin + job)
            last[stage].append(max(end, late + job, (last[stage][-1] if at else 0.0) + job))
            one_less = late - (late - chosen[1]) / (jobs - 1) if shared else late
            nearly[stage].append(max(end - job, one_less + job) if shared else last[stage][-1])
        for other in _WAIT_FOR[stage]:
            if other in waiting:
                waiting[other] = may_start(other, len(last[other])) if len(last[other]) < count else None
    return last[stages[-1]][-1]


def job_seconds(engines: Engines, stage: str, stages: Sequence[str], ranks: int, shared: bool, piece: float) -> float:
    """Seconds of one rank's copies of one stage of a part. Summing is no copy."""
    if stage == "sum":
        return 0.0
    alone = stage in ("post", "land", "share")  # one piece
    together = alone or (stage == "in" and "sum" in stages)
    apart = (2 * ranks - 2) / ranks if shared else min(2, ranks - 1)  # on average, and of a rank that has most
    copies = 1.0 if together else apart
    moved = piece if alone else (ranks - 1) * piece
    if _ENGINE[stage] == 0:
        return float(copies * engines.out_pause + moved / engines.out_speed)
    return float(copies * engines.in_pause + moved / engines.in_speed)


def _summing(engines: Engines, nbytes: float, begin: float, computing_until: float) -> float:
    """Seconds of a sum that starts then; it is faster once the matmul has left the SMs."""
    beside = min(nbytes / engines.sum_speed, max(0.0, computing_until - begin))
    return beside + (nbytes - beside * engines.sum_speed) / engines.sum_speed_alone


def fit(samples: Iterable[Sample], guess: Engines, ranks: int, shared: bool) -> Engines:
    """`guess` with speeds, pauses, `hop` and `end` that suit the samples: a search by coordinates, step by step finer.

    Samples are measured with hosts that run ahead.
    """
    measured = list(samples)
    if len(measured) <= len(_FITTED):
        raise InvalidArgument(argument="samples", was=f"{len(measured)} runs", must=f"more than {len(_FITTED)}")

    def seconds(engines: Engines, one: Sample) -> float:
        pieces = [one.nbytes / one.parcels / ranks] * one.parcels
        return engines.end + last_arrival(engines, one.operator, ranks, shared, pieces, [0.0] * one.parcels)

    def loss(engines: Engines) -> float:
        return sum(math.log(seconds(engines, one) / one.seconds) ** 2 for one in measured)

    return replace(
        _searched(guess.ahead, _FITTED, loss), call=guess.call, enqueue=guess.enqueue, enqueues=guess.enqueues
    )


def _searched(guess: Engines, names: Sequence[str], loss: Callable[[Engines], float]) -> Engines:
    best, least = guess, loss(guess)
    steps = dict.fromkeys(names, 0.25)
    for _ in range(_SWEEPS):
        for name in names:
            for factor in (1 + steps[name], 1 / (1 + steps[name])):
                other = replace(best, **{name: getattr(best, name) * factor})
                found = loss(other)
                if found < least * (1 - 1e-6):
                    best, least = other, found
                    break
            else:
                steps[name] /= 2
        if max(steps.values()) < _SMALLEST_STEP:
            break
    return best
