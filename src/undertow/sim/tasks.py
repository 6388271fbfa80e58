"""Tasks on engines: what a rank computes and moves, in which order, and how much the two slow each other.

A task occupies one engine of each of its ranks (a collective: the same engine of several) and starts when what it
waits for is over and the engines are free. Engines take tasks in the order in which they were added, as streams do;
those that are not `ordered` as they become ready, as a trace's nodes are issued. `seconds` are those it takes alone.
While a matmul and a transfer of one rank run at the same time, both progress at

    1 / slowdown        from `plan.interference`: one model for planner and simulator

and transfers of one rank over the same link share it equally. Rates are constant between two events, so the result is
exact for that model. A task that waits for itself, however far around, is refused.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import InvalidArgument, SimulationRefused
from ..fabric.events import Event, Timeline
from ..plan.interference import Interference

COMPUTE = "compute"
MOST_TASKS = 5_000_000
_DUST = 1e-15  # seconds of work that are none


@dataclass(frozen=True, slots=True)
class Task:
    """`lane` is None for computing. `delay`: seconds between the last of `after` and the earliest start.

    `link`: what transfers share with others over the same one; "" for the lane.
    """

    name: str
    ranks: tuple[int, ...]
    engine: str
    seconds: float
    after: tuple[int, ...] = ()
    delay: float = 0.0
    lane: str | None = None
    bytes_per_second: float = 0.0
    multiprocessors: int = 0
    resource: str = ""
    details: dict[str, object] = field(default_factory=dict)
    link: str = ""
    ordered: bool = True

    @property
    def shared(self) -> str | None:
        """What it has to share while it moves bytes."""
        return None if self.lane is None else self.link or self.lane


@dataclass(frozen=True, slots=True)
class Ran:
    """When a task ran, and the task that it waited for last (-1: for nothing)."""

    start: float
    end: float
    cause: int


@dataclass(frozen=True)
class Outcome:
    """What a list of tasks came to."""

    tasks: tuple[Task, ...]
    ran: tuple[Ran, ...]

    @property
    def seconds(self) -> float:
        return max((one.end for one in self.ran), default=0.0)

    def critical_path(self) -> list[int]:
        """Tasks that follow each other without a gap of their own making, from the first to the last that ended."""
        at = max(range(len(self.ran)), key=lambda one: self.ran[one].end, default=-1)
        found = []
        while at >= 0:
            found.append(at)
            at = self.ran[at].cause
        return found[::-1]

    def by_resource(self) -> dict[str, float]:
        """Seconds of the critical path, by what they were spent on; together they are all of it."""
        found: dict[str, float] = {}
        reached = 0.0
        for at in self.critical_path():
            task, ran = self.tasks[at], self.ran[at]
            if ran.start > reached:
                found["waiting"] = found.get("waiting", 0.0) + ran.start - reached
            name = task.resource or task.engine
            found[name] = found.get(name, 0.0) + ran.end - max(reached, ran.start)
            reached = ran.end
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def timeline(self) -> Timeline:
        """In the format of measured ones; rank, engine and name as they would be there."""
        events = [
            Event(
                task.name, rank, task.engine, round(ran.start * 1e9), round((ran.end - ran.start) * 1e9),
                "simulated", dict(task.details),
            )
            for task, ran in zip(self.tasks, self.ran, strict=True)
            for rank in task.ranks
        ]  # fmt: skip
        return Timeline(sorted(events, key=lambda event: event.start_ns), {"simulated": True})


class Tasks:
    """Collects tasks; `add` gives the number by which others wait for it."""

    def __init__(self, interference: Interference | None = None) -> None:
        self._tasks: list[Task] = []
        self._interference = interference

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: Task) -> int:
        if len(self._tasks) >= MOST_TASKS:
            raise InvalidArgument(argument="tasks", was=f"more than {MOST_TASKS}", must=f"at most {MOST_TASKS}")
        if not task.ranks or not 0 <= task.seconds < float("inf") or task.delay < 0:
            was = f"task {task.name!r} of {len(task.ranks)} ranks and {task.seconds} seconds"
            raise InvalidArgument(argument="task", was=was, must="one of at least one rank and 0 seconds or more")
        self._tasks.append(task)
        return len(self._tasks) - 1

    def run(self) -> Outcome:
        return _Run(self._tasks, self._interference).outcome()


class _Run:
    """One run: who is under way, how much is left of it, and how fast it goes."""

    def __init__(self, tasks: Sequence[Task], interference: Interference | None) -> None:
        self.tasks, self.interference = tasks, interference
        self.left = [task.seconds for task in tasks]
        self.speed, self.since = [1.0] * len(tasks), [0.0] * len(tasks)
        self.start, self.end = [-1.0] * len(tasks), [-1.0] * len(tasks)
        self.cause = [-1] * len(tasks)
        self.version = [0] * len(tasks)
        self.under_way: dict[int, list[int]] = {}  # of each rank
        self.taken: set[tuple[int, str]] = set()  # engines of tasks without an order
        self.queues: dict[tuple[int, str], list[tuple[float, int]]] = {}  # who waits for them: ready since, number
        self.events: list[tuple[float, int, int, int]] = []  # time, 0 for an end and 1 for a start, task, version
        self.now = 0.0

    def outcome(self) -> Outcome:
        tasks = self.tasks
        followers: list[list[int]] = [[] for _ in tasks]
        missing = [0] * len(tasks)
        last: dict[tuple[int, str], int] = {}
        for number, task in enumerate(tasks):
            before = set(task.after)
            if task.ordered:
                before.update(last[rank, task.engine] for rank in task.ranks if (rank, task.engine) in last)
                for rank in task.ranks:
                    last[rank, task.engine] = number
            for other in before:
                if not 0 <= other < len(tasks):
                    was = f"task {task.name!r} after task {other}"
                    raise InvalidArgument(argument="after", was=was, must=f"numbers below {len(tasks)}")
                followers[other].append(number)
            missing[number] = len(before)
        for number, count in enumerate(missing):
            if count == 0:
                heapq.heappush(self.events, (tasks[number].delay, 1, number, 0))
        done = 0
        while self.events:
            self.now, kind, number, version = heapq.heappop(self.events)
            if kind == 1:
                self._ready(number)
            elif version == self.version[number]:
                self._finish(number)
                done += 1
                for other in followers[number]:
                    missing[other] -= 1
                    if missing[other] == 0:
                        last_needed = max(tasks[other].after, key=lambda one: self.end[one], default=-1)
                        needed = self.end[last_needed] if last_needed >= 0 else 0.0
                        start = max(self.now, needed + tasks[other].delay)
                        # Where the delay is over after its engine is free, it is the delay that it waited for.
                        self.cause[other] = last_needed if start > self.now and last_needed >= 0 else number
                        heapq.heappush(self.events, (start, 1, other, 0))
        if done < len(tasks):
            stuck = next(task.name for task, end in zip(tasks, self.end, strict=True) if end < 0)
            raise SimulationRefused(reason=f"task {stuck!r} waits for itself, through others or its engine's order")
        ran = tuple(Ran(*one) for one in zip(self.start, self.end, self.cause, strict=True))
        return Outcome(tuple(tasks), ran)

    def _ready(self, number: int) -> None:
        """Start it, unless it must wait for an engine that others have."""
        task = self.tasks[number]
        if task.ordered:
            self._begin(number)
            return
        engines = [(rank, task.engine) for rank in task.ranks]
        if self.taken.isdisjoint(engines):
            self.taken.update(engines)
            self._begin(number)
            return
        for engine in engines:
            heapq.heappush(self.queues.setdefault(engine, []), (self.now, number))

    def _free(self, number: int) -> None:
        """Its engines go to those that wait: to who came first among those that find all of theirs free."""
        engines = [(rank, self.tasks[number].engine) for rank in self.tasks[number].ranks]
        self.taken.difference_update(engines)
        for engine in engines:
            queue, passed = self.queues.get(engine, []), []
            while queue and engine not in self.taken:
                first = heapq.heappop(queue)
                other = first[1]
                if self.start[other] >= 0:
                    continue
                wanted = [(rank, self.tasks[other].engine) for rank in self.tasks[other].ranks]
                if self.taken.isdisjoint(wanted):
                    self.taken.update(wanted)
                    self.cause[other] = number
                    self._begin(other)
                else:
                    passed.append(first)
            for one in passed:
                heapq.heappush(queue, one)

    def _begin(self, number: int) -> None:
        self.start[number] = self.since[number] = self.now
        for rank in self.tasks[number].ranks:
            self.under_way.setdefault(rank, []).append(number)
        self._change(self.tasks[number].ranks, number)

    def _finish(self, number: int) -> None:
        self.end[number] = self.now
        self.version[number] += 1
        for rank in self.tasks[number].ranks:
            self.under_way[rank].remove(number)
        self._change(self.tasks[number].ranks, -1)
        if not self.tasks[number].ordered:
            self._free(number)

    def _change(self, ranks: Iterable[int], fresh: int) -> None:
        """New speeds for all that runs on these ranks."""
        touched = {one for rank in ranks for one in self.under_way.get(rank, ())}
        for number in sorted(touched):
            speed = 1.0 / max(self._slowdown(number, rank) for rank in self.tasks[number].ranks)
            if number != fresh and speed == self.speed[number]:
                continue
            self.left[number] -= (self.now - self.since[number]) * self.speed[number]
            self.since[number], self.speed[number] = self.now, speed
            self.version[number] += 1
            left = self.left[number] / speed if self.left[number] > _DUST else 0.0
            heapq.heappush(self.events, (self.now + left, 0, number, self.version[number]))

    def _slowdown(self, number: int, rank: int) -> float:
        task = self.tasks[number]
        others = [self.tasks[one] for one in self.under_way[rank] if one != number]
        slow = 1.0
        if task.lane is not None:
            slow *= 1 + sum(one.shared == task.shared for one in others)
        if self.interference is None:
            return slow
        if task.lane is not None:
            busiest = max((one.multiprocessors for one in others if one.lane is None), default=0)
            return slow * (self.interference.lane_slowdown(task.lane, busiest) if busiest else 1.0)
        if not task.multiprocessors:
            return slow
        for one in others:
            if one.lane is not None:
                slow += -1 + self.interference.gemm_slowdown(
                    one.lane, one.bytes_per_second, task.multiprocessors, one.multiprocessors
                )
        return slow
