"""A compiled schedule on a network: the same instructions that the executors run, timed instead of run.

    result = simulate(schedule, network, nbytes=64 << 20)
    result.seconds, result.busy("nvlink")           # with traced=True also `timelines.schedule_timeline(result)`

What moves are chunks as the contract cuts the call's spans; long chunks move tile by tile, one tile an iteration, as
`tile` says. A schedule that is not right in every order of events is refused, not timed: `check=False` is for those
that were checked when they were compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..collective.schedule import MOVE, Schedule
from ..errors import InvalidArgument, SimulationRefused
from . import core, engines
from .links import BUSY, HOP_LINK, LAST, LINK_COLUMNS, MOVED, RATE
from .moves import moves_of
from .network import Floats, Ints, Network
from .state import State

MOST_EVENTS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Rules:
    """How a network and its ranks behave, apart from what links can do.

    `fair`: messages share links equally, else they follow each other. `store_and_forward`: a message leaves a link when
    it has arrived whole. `step_seconds`: what a worker spends on an instruction before anything moves.
    `message_seconds`: what the receiver adds to a message. `call_seconds`: what a call takes before its first step.
    `worker_rate`: bytes per second that one worker of one instance copies. `memory_rate`: bytes per second that a rank
    reads and writes, shared by those of its workers that are active, as messages share a link; with `copies_are_free`,
    for sums only. `engines`: copy engines of a rank, which move what goes to others and comes from them, a copy at a
    time each, `engine_seconds` beside its bytes; with `engines_have_directions` half of them write to other ranks and
    half read from them. 0: kernels move everything.
    """

    fair: bool = False
    store_and_forward: bool = False
    step_seconds: float = 0.0
    message_seconds: float = 0.0
    worker_rate: float = math.inf
    memory_rate: float = math.inf
    call_seconds: float = 0.0
    copies_are_free: bool = False
    engines: int = 0
    engine_seconds: float = 0.0
    engines_have_directions: bool = False

    def __post_init__(self) -> None:
        if self.fair and self.store_and_forward:
            must = "'fifo': a message that shares all its links at one rate is never stored on its way"
            raise InvalidArgument(argument="sharing", was="'fair' with store_and_forward", must=must)
        if self.engines_have_directions and (self.engines < 2 or self.engines % 2):
            must = "an even number of at least 2 where half of them read and half of them write"
            raise InvalidArgument(argument="engines", was=self.engines, must=must)


@dataclass(frozen=True, eq=False)
class Result:
    """What a simulation found. `link_seconds` and `link_bytes`: of each link, busy and carried. `log`: if traced.

    `memory`: bytes of all that was under way at once. `hops`: of a traced run over FIFO links, which hop bounded each
    row of the log, and all hops, as `links` has their columns."""

    seconds: float
    events: int
    flights: int
    network: Network
    link_seconds: Floats
    link_bytes: Floats
    schedule: Schedule = field(repr=False)
    arrivals: Floats = field(repr=False)
    log: Floats = field(repr=False)
    memory: int = 0
    hops: tuple[Ints, Ints, Floats] | None = field(default=None, repr=False)
    by_engines: bool = False

    def busy(self, kind: str) -> float:
        """Seconds for which the busiest link of a kind had work."""
        names = [one.name for one in self.network.links.kinds]
        if kind not in names:
            raise InvalidArgument(argument="kind", was=repr(kind), must=f"one of {', '.join(dict.fromkeys(names))}")
        chosen = np.isin(self.network.links.kind_of(), [at for at, name in enumerate(names) if name == kind])
        return float(self.link_seconds[chosen].max(initial=0.0))

    def algorithm_bandwidth(self, nbytes: int) -> float:
        """Bytes per second, as benchmarks count a call's size."""
        return nbytes / self.seconds if self.seconds else math.inf


def simulate(
    schedule: Schedule,
    network: Network,
    *,
    nbytes: int | None = None,
    spans: Sequence[int] | None = None,
    tile: int | None = None,
    rules: Rules | None = None,
    ready: NDArray[np.float64] | None = None,
    traced: bool = False,
    check: bool = True,
    most_events: int = MOST_EVENTS,
) -> Result:
    """Run one call of `schedule`, whose longest buffer on a rank has `nbytes`, or whose spans have these bytes each.

    `tile`: bytes of a chunk that an iteration moves, None for all of it. `ready[rank, p]`: seconds at which parcel p of
    a rank is complete, for schedules that wait for a kernel. `traced` keeps what ran when.
    """
    rules = rules if rules is not None else Rules()
    if schedule.ranks != network.ranks:
        must = f"of {schedule.ranks} ranks, as schedule {schedule.name} is made for"
        raise InvalidArgument(argument="network", was=f"of {network.ranks} ranks", must=must)
    if rules.fair and any(kind.points for kind in network.links.kinds):
        raise InvalidArgument(argument="sharing", was="'fair' with links that have curves", must="'fifo' for them")
    if check:
        from ..collective.checker import check as check_schedule

        check_schedule(schedule)
    class_bytes = _class_bytes(schedule, nbytes, spans)
    tile_bytes, times = _tiles(class_bytes, tile)
    moves = moves_of(schedule, network)
    given = np.zeros((schedule.ranks, 1)) if ready is None else np.asarray(ready, np.float64)
    parcels = max(given.shape[1], int(schedule.instructions.number.max(initial=-1)) + 1)
    ready_at = np.zeros((schedule.ranks, parcels))
    ready_at[:, : given.shape[1]] = given
    links, curves = network.tables()
    count = len(links)  # behind them the memory of each rank, which is shared as they are
    links = np.concatenate([links, _memories(schedule.ranks, rules)])
    links[:, LAST] = -1
    own = np.arange(schedule.ranks)
    route_start = np.concatenate([moves.route_start, moves.route_start[-1] + 1 + own])
    route_link = np.concatenate([moves.route_link, count + own])
    pace, traffic = _work_per_byte(schedule, rules)
    queues = engines.queues(schedule.ranks, rules.engines, rules.engines_have_directions)
    state = State(moves, links, ready_at.ravel(), traced, queues)
    fixed = (
        moves.steps, moves.waits, moves.posts, moves.pulls, moves.pushes,
        pace[moves.instruction], traffic[moves.instruction], moves.class_of, class_bytes, tile_bytes,
        2.0 if schedule.packets else 1.0, moves.workers, times, moves.semaphores.copy(),
        moves.signal_seconds, route_start, route_link, moves.request_seconds, links, curves, count,
        len(moves.route_start) - 1, rules.fair, rules.store_and_forward, rules.step_seconds, rules.message_seconds,
        rules.engine_seconds, int(rules.engines_have_directions), ready_at.ravel(), state.needed, parcels, traced,
        most_events,
    )  # fmt: skip
    while (verdict := core.run(*fixed, *state.arrays)) == core.FULL:
        state.grow()
    if verdict == core.TOO_MANY:
        raise SimulationRefused(reason=f"{schedule.name} has more than {most_events} events")
    if len(state.blocked):
        rank = int(schedule.worker_rank[state.blocked[0]])
        raise SimulationRefused(reason=f"{schedule.name} ends with rank {rank} waiting for a post that never comes")
    log = state.log
    log[:, core.LOG_STEP] = moves.instruction[log[:, core.LOG_STEP].astype(np.int64)]
    hops = None if rules.fair or not traced else (log[:, core.LOG_LINK].astype(np.int64), *state.hops)
    if hops is not None:  # what bounded it is a hop: of the log it is the link
        log[:, core.LOG_LINK] = np.where(hops[0] >= 0, hops[1][hops[0], HOP_LINK] if len(hops[1]) else -1, -1)
    return Result(
        rules.call_seconds + state.seconds, state.events, state.flights, network, links[:count, BUSY].copy(),
        links[:count, MOVED].copy(), schedule,
        state.needed.reshape(schedule.ranks, parcels), log, state.nbytes, hops, rules.engines > 0,
    )  # fmt: skip


def _class_bytes(schedule: Schedule, nbytes: int | None, spans: Sequence[int] | None) -> Floats:
    contract = schedule.contract
    if (nbytes is None) == (spans is None):
        raise InvalidArgument(argument="nbytes", was="given with spans, or neither", must="one of the two")
    if spans is None:
        assert nbytes is not None
        if nbytes < 0:
            raise InvalidArgument(argument="nbytes", was=nbytes, must="at least 0")
        per_buffer = max(1, max(*contract.inputs, *contract.outputs) // contract.factor)
        # Fractions of a byte are fine here: what is simulated is cut exactly evenly.
        return np.full(contract.spans * contract.factor, nbytes / per_buffer / contract.factor)
    return contract.class_lengths(spans).astype(np.float64)


def iterations(schedule: Schedule, nbytes: int, tile: int | None) -> int:
    """How often every instruction runs in a call of `nbytes`."""
    return _tiles(_class_bytes(schedule, nbytes, None), tile)[1]


def _tiles(class_bytes: Floats, tile: int | None) -> tuple[float, int]:
    """Bytes of a chunk that an iteration moves, and how many iterations the longest chunk takes."""
    longest = float(class_bytes.max(initial=0.0))
    if tile is not None and tile < 1:
        raise InvalidArgument(argument="tile", was=tile, must="at least 1")
    tile_bytes = longest if tile is None else float(tile)
    return tile_bytes, max(1, math.ceil(longest / tile_bytes)) if tile_bytes else 1


def _work_per_byte(schedule: Schedule, rules: Rules) -> tuple[Floats, Floats]:
    """Of each byte of an instruction's chunks: seconds at the pace of its worker, bytes read and written in memory."""
    one = schedule.instructions
    stores = np.diff(one.store_start)
    if rules.copies_are_free:  # what a sum also stores elsewhere is a copy
        stores = np.minimum(stores, 1)
    counts = (one.kind == MOVE) & ((np.diff(one.source_start) > 1) | (not rules.copies_are_free))
    touched = np.where(counts, np.diff(one.source_start) + stores, 0).astype(np.float64)
    pace = touched / 2 / (schedule.instances * rules.worker_rate)
    return pace, touched if math.isfinite(rules.memory_rate) else np.zeros(len(touched))


def _memories(ranks: int, rules: Rules) -> Floats:
    """Rows of links, one for each rank."""
    found = np.zeros((ranks, LINK_COLUMNS))
    found[:, RATE] = rules.memory_rate
    return found
