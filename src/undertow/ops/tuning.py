"""strategy="auto": the plan that a problem is known to run best with, read from disk, or measured now.

    known to this group?            -> that plan; nobody is asked
    inside a capture or a trace?    -> serial: nothing can be measured there
    on disk, the same on all ranks? -> that plan, and all ranks remember it
    else                            -> the best few candidates and serial are measured on the caller's own tensors

All ranks take the same path: what decides is either known to all of them (the sizes that ranks must share), exchanged
first, or a maximum over ranks. What only this rank knows (its part of K; of all_gather_matmul, of N) is told to the
others once for each new problem, and the largest counts. So ranks must meet a new problem together: where one rank's
part changes, all change, or the call ends as a mismatch at the deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__, settings
from ..errors import AllocationFailed, InvalidArgument, MismatchedCall, StrategyUnavailable
from ..plan import cache, tuner, ways
from ..plan.defaults import default_plan
from ..plan.fused import stage_bytes
from ..plan.matmuls import matmul_seconds
from ..plan.plan import EMBEDDING, TOKENS
from ..plan.predict import predict
from ..plan.search import ranked
from ..plan.tuner import BUDGET_SECONDS, Decision, Trial
from .explain import Candidate, Choice
from .fused import unwanted
from .machine import HEAD_START, available, identity, machine_of, seconds_of

if TYPE_CHECKING:
    from ..fabric.group import Group
    from ..plan.machine import Machine
    from ..plan.plan import Plan
    from ..plan.predict import Prediction
    from ..plan.problem import Problem
    from .choose import Request

TUNING_SECONDS = 2.0
_KNOWN = object()  # name of what is kept with a fabric
_MOST = 4096  # problems of a group: rows may change from call to call
_SMALL = 256  # below this inner size (or width) the rest of the problem decides what is best
_OFFSET = 0.63  # bounds at 2^(n + 0.37): no number that people choose
_MATMULS = 3
_OVERHEAD_SECONDS = 0.07  # of the budget: searching for candidates, and what ranks tell each other
_FAR = 3  # times as long as serial
_PART = 2  # matmuls alone may take this part of the budget
_BUFFERS = 2  # of the size of the product: what a plan needs at most for itself
_NO_MEMORY = (torch.OutOfMemoryError, MemoryError)
# Raised before anything moves, on all ranks; for want of memory perhaps on one, which is why that is tried before.
_CANNOT_RUN = (StrategyUnavailable, AllocationFailed, InvalidArgument, *_NO_MEMORY)

Key = tuple[object, ...]


class Known:
    """The choices of a group, by what each rank can tell of the problem by itself. The oldest are forgotten."""

    def __init__(self) -> None:
        self.made = 0
        self._choices: dict[Key, Choice] = {}

    @staticmethod
    def of(group: Group) -> Known:
        known = group.fabric.kept.setdefault(id(_KNOWN), Known())
        assert isinstance(known, Known)
        return known

    def find(self, problem: Problem) -> Choice | None:
        return self._choices.get(_key(problem))

    def add(self, problem: Problem, choice: Choice) -> None:
        """All ranks add the same problems in the same order, so they forget the same ones."""
        self.made += 1
        if len(self._choices) >= _MOST:
            del self._choices[next(iter(self._choices))]
        self._choices[_key(problem)] = choice


def _key(problem: Problem) -> Key:
    """Counts of an all_to_all change from call to call: there the most rows of a rank count by their power of two, none
    for itself. All ranks know these of all.

    What may differ between ranks (K; of all_gather_matmul N) counts by a factor of two, with bounds that shares of one
    number never fall to both sides of but by rare chance: ranks must agree on what is known.
    """
    rows: Key = (problem.m, problem.shards)
    if problem.operator == TOKENS:
        rows = (max(0, problem.m - 1).bit_length(), problem.m == 0)
    n, k = problem.n, problem.k
    if problem.operator == EMBEDDING:
        k = 0  # how long bags are on this rank, in this call: no rank can tell it of the others
    elif problem.operator == "all_gather_matmul":
        n = _octave(n)
    else:
        k = _octave(k)
    further = _octave(problem.further) if problem.further else -1
    return problem.name, rows, n, k, problem.experts, further, problem.dtype


def _octave(size: int) -> int:
    return math.floor(math.log2(max(_SMALL, size)) + _OFFSET)


# -- the way to a choice -----------------------------------------------------------------------------------------------


def auto(request: Request) -> Choice:
    """The plan of this call, and why. Collective where the problem is new."""
    problem, group = request.problem, request.group
    session: _Session | None = getattr(_sessions, "current", None)
    if group.size == 1:
        return _noted(session, Choice(_serial(problem, group), "One rank has nothing to send."))
    if torch.are_deterministic_algorithms_enabled():
        return _noted(session, _deterministic(request))
    known = Known.of(group)
    found = known.find(problem) if session is None else None
    if found is not None:
        found.plan.check(problem)  # problems that count as one must not share a plan that fits only one of them
        return found
    where = _unmeasurable(group)
    if where:
        reason = f"Nothing is known of this problem and nothing can be measured {where}, so serial runs."
        return _noted(session, Choice(_serial(problem, group), reason))
    with group.call(problem.name, request.same_on_all, f"auto, choice {known.made + 1}"):
        choice = _decide(request, session)
        known.add(problem, choice)
    return _noted(session, choice)


def _deterministic(request: Request) -> Choice:
    lane = "peer" if "peer" in available(request.group) else "net"
    plan = dataclasses.replace(default_plan(request.problem, "serial", lane), deterministic=True)
    return Choice(plan, "Deterministic algorithms are asked for and measurements are not, so serial runs.")


def _serial(problem: Problem, group: Group) -> Plan:
    """Serial, where nothing was measured: over the backend's own collectives if they are there.

    Inside a capture over a lane that is open already, as opening one cannot be captured, and no host must wait.
    """
    lanes = available(group)
    if group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        lanes = [name for name in group.fabric.open_lanes() if name != "net"] or lanes
    return default_plan(problem, "serial", "net" if "net" in lanes else lanes[0])


def _unmeasurable(group: Group) -> str:
    if torch.compiler.is_compiling():
        return "while torch traces"
    if group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "inside a CUDA graph capture"
    return ""


def _decide(request: Request, session: _Session | None) -> Choice:
    group = request.group
    problem = _shared(request.problem, group)
    machine_name, versions = identity(group), _versions(group)
    no_fused = next((one for one in group.exchange(unwanted(group), "whether fused plans are wanted") if one), "")
    if session is None:
        entry = _on_disk(problem, machine_name, versions, group, no_fused)
        if entry is not None:
            return _from_entry(entry)
    choice = _measured(request, problem, no_fused, session.budget_seconds if session is not None else BUDGET_SECONDS)
    if group.rank == group.local_ranks[0] and choice.decision is not None:  # one writer on each node is enough
        trials = choice.decision.trials
        cache.store(problem, machine_name, versions, choice.plan, choice.reason, trials, choice.gemm_seconds)
    return choice


def _shared(problem: Problem, group: Group) -> Problem:
    """The problem that all ranks plan for: with the longest part of what may differ. Others must be equal."""
    mine = [problem.m, list(problem.shards), problem.n, problem.k, problem.multiprocessors, problem.further]
    sizes = group.exchange(mine, "the sizes of a problem")
    ours = [1, 1, 0, 1, 0, 0] if problem.operator == "all_gather_matmul" else [1, 1, 1, 0, 0, 0]
    for rank, theirs in enumerate(sizes):
        if any(must and one != other for must, one, other in zip(ours, sizes[0], theirs, strict=True)):
            raise MismatchedCall(
                group=group.name,
                call=group.calls,
                rank=0,
                mine=_sizes_text(problem, sizes[0]),
                other_rank=rank,
                theirs=_sizes_text(problem, theirs),
            )
    return dataclasses.replace(
        problem,
        n=max(one[2] for one in sizes),
        k=max(one[3] for one in sizes),
        multiprocessors=min(one[4] for one in sizes),
        further=max(one[5] for one in sizes),
    )


def _sizes_text(problem: Problem, sizes: list[Any]) -> str:
    m, shards, *both, _, _ = sizes
    n, k = reversed(both) if problem.mirrored else both
    return f"{problem.name}(M {m} in shards {shards}, N {n}, K {k}, {problem.dtype})"


def _versions(group: Group) -> dict[str, str]:
    found = {"undertow": __version__, "torch": torch.__version__}
    if group.device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    return found


# -- from disk ---------------------------------------------------------------------------------------------------------


def _on_disk(
    problem: Problem, machine: str, versions: dict[str, str], group: Group, no_fused: str
) -> cache.Entry | None:
    """What is on disk, if all ranks hold the same plan and it can run."""
    entry = cache.load(problem, machine, versions)
    if entry is not None and not (entry.plan.lane in available(group) and _may_be_tried(problem, entry.plan, no_fused)):
        entry = None
    digests = group.exchange("" if entry is None else entry.plan.digest, "a plan on disk")
    return entry if entry is not None and set(digests) == {entry.plan.digest} else None


def _from_entry(entry: cache.Entry) -> Choice:
    found = tuple(
        Candidate(name, parcels, predicted, measured, digest == entry.plan.digest)
        for digest, name, parcels, predicted, measured in entry.trials
    )
    return Choice(entry.plan, f"Known from {entry.made}: {entry.reason}", found, entry.gemm_seconds)


# -- by measuring ------------------------------------------------------------------------------------------------------


def _is_fused(problem: Problem, plan: Plan) -> bool:
    """Whether it is a matmul that waits for the other ranks' matmuls."""
    return plan.grain == "fused" and problem.operator != EMBEDDING


def _may_be_tried(problem: Problem, plan: Plan, no_fused: str) -> bool:
    if plan.posts(problem.device) and not settings.POSTS.is_on():
        return False
    return not (no_fused and _is_fused(problem, plan))


def _measured(request: Request, problem: Problem, no_fused: str, budget_seconds: float) -> Choice:
    group = request.group
    machine = machine_of(group)
    plans = [_serial(problem, group)]  # the first rank's list counts, so only that one searches
    if group.rank == 0:
        found = ranked(problem, machine, available(group))
        plans = _worth_measuring([one for one in found if _may_be_tried(problem, one[0], no_fused)])
    with _unchanged(request):
        return _tried(request, problem, machine, plans, budget_seconds)


@contextlib.contextmanager
def _unchanged(request: Request) -> Iterator[None]:
    """What calls change is afterwards as it was: the call that is being decided about comes after its trials."""
    before = [one.clone() for one in request.changed]
    try:
        yield
    finally:
        for one, was in zip(request.changed, before, strict=True):
            one.copy_(was)


def _tried(request: Request, problem: Problem, machine: Machine, plans: list[Plan], budget_seconds: float) -> Choice:
    group = request.group
    timer = _Timer(request)
    gemm, spent = None, 0.0
    if _PART * (1 + _MATMULS) * matmul_seconds(problem, machine, problem.multiprocessors, problem.m) <= budget_seconds:
        gemm, spent = timer.matmul()
    decision = tuner.tune(
        problem,
        plans,
        timer.measure,
        lambda text: str(group.exchange(text if group.rank == 0 else "", "what the first rank decides")[0]),
        predicted=lambda plan: _predicted(problem, plan, machine),
        budget_seconds=max(0.0, budget_seconds - spent - _OVERHEAD_SECONDS),
        warm=timer.warm,
        beside=HEAD_START if group.device.type == "cuda" else 0.0,
    )
    found = tuple(_candidate(problem, trial, trial.plan == decision.plan) for trial in decision.trials)
    return Choice(decision.plan, " ".join([decision.reason, *timer.left_out()]), found, gemm, decision)


def _worth_measuring(found: Sequence[tuple[Plan, Prediction]]) -> list[Plan]:
    """Without plans that are predicted to be far slower than serial: a call over a slow lane would cost the budget."""
    serial = min(prediction.total for plan, prediction in found if plan.grain == "serial")
    best = next((plan for plan, _ in found if plan.grain != "serial"), None)
    return [plan for plan, prediction in found if prediction.total <= _FAR * serial or plan == best]


def _predicted(problem: Problem, plan: Plan, machine: Machine) -> float:
    try:
        return predict(problem, plan, machine).total
    except InvalidArgument:  # a lane that this machine file does not tell of
        return math.nan


def _candidate(problem: Problem, trial: Trial, chosen: bool) -> Candidate:
    predicted, measured = (
        None if one is None or not math.isfinite(one) else one for one in (trial.predicted, trial.median)
    )
    way = ways.way(problem.operator, trial.plan)
    return Candidate(trial.plan.name, len(trial.plan.parcels), predicted, measured, chosen, way)


class _Timer:
    """Seconds of the caller's own call; of several ranks the slowest counts."""

    def __init__(self, request: Request) -> None:
        self._request, self._group = request, request.group
        self._refused: dict[Plan, str] = {}

    def warm(self, plan: Plan) -> None:
        """Once untimed: lanes are opened, kernels compiled, workspaces allocated. One rank that cannot stops all."""
        said = self._group.exchange(self._without_room(plan), "whether there is room for a plan")
        if not any(said):
            said = self._group.exchange(self._attempt(plan), "whether a plan can run")
        reason = next((f"rank {rank}: {one}" for rank, one in enumerate(said) if one), "")
        if reason:
            self._refused[plan] = reason

    def _without_room(self, plan: Plan) -> str:
        """Why this rank has no memory for a plan's buffers; empty if it has. Tried apart: nobody waits for it yet."""
        problem = self._request.problem
        wanted = _BUFFERS * problem.result_bytes
        if _is_fused(problem, plan):
            wanted = stage_bytes(problem, plan, self._request.stays)
        try:
            torch.empty(wanted, dtype=torch.uint8, device=self._group.device)
        except (*_NO_MEMORY, RuntimeError) as error:  # torch's CPU allocator has no class of its own for it
            return str(error).splitlines()[0]
        return ""

    def _attempt(self, plan: Plan) -> str:
        try:
            self._request.execute(plan)
            self._group.fabric.settle()
        except _CANNOT_RUN as error:
            return str(error).splitlines()[0]
        return ""

    def left_out(self) -> list[str]:
        """A sentence for each plan that could not run."""
        return [f"{plan.name} could not run ({reason.rstrip('.')})." for plan, reason in self._refused.items()]

    def measure(self, plan: Plan) -> float:
        seconds = math.inf
        if plan not in self._refused:
            self._request.forget()
            seconds = seconds_of(lambda: self._request.execute(plan), self._group.device)
        return self._group.reduce_max([seconds])[0]

    def matmul(self) -> tuple[float, float]:
        """The median of a few matmuls without communication after one that is not counted, and what all took."""
        times = []
        for _ in range(1 + _MATMULS):
            self._group.barrier()
            times.append(seconds_of(self._request.matmul, self._group.device))
        times = self._group.reduce_max(times)
        return statistics.median(times[1:]), 2 * times[1] + sum(times[2:])


# -- ut.tune -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Session:
    """Inside `tune`: measure, whatever is known, with this budget for each problem."""

    budget_seconds: float
    decisions: list[Decision] = dataclasses.field(default_factory=list)


_sessions = threading.local()


@contextlib.contextmanager
def _session(budget_seconds: float) -> Iterator[_Session]:
    before = getattr(_sessions, "current", None)
    _sessions.current = _Session(budget_seconds)
    try:
        yield _sessions.current
    finally:
        _sessions.current = before


def _noted(session: _Session | None, choice: Choice) -> Choice:
    if session is not None:
        session.decisions.append(choice.decision or Decision(choice.plan, (), choice.reason))
    return choice


def tune(
    function: Callable[..., object], *arguments: Any, budget_seconds: float = TUNING_SECONDS, **options: Any
) -> Decision:
    """Call `function` (an operator, or anything that calls one with strategy "auto") and measure with patience.

        decision = ut.tune(ut.matmul_all_reduce, x, w, group=group)

    Plans known from before are measured anew, and what is found is kept for later calls, here and on disk. Collective:
    all ranks of the group must come. Returns the decision about the last problem that was met.
    """
    if not isinstance(budget_seconds, (int, float)) or not budget_seconds > 0:
        raise InvalidArgument(argument="budget_seconds", was=repr(budget_seconds), must="a positive number of seconds")
    if not callable(function):
        must = "an operator, or a function that calls one"
        raise InvalidArgument(argument="function", was=f"of type {type(function).__name__}", must=must)
    with _session(budget_seconds) as session:
        function(*arguments, **options)
    if not session.decisions:
        was = f"{getattr(function, '__name__', function)!s}, which called no operator with strategy 'auto'"
        raise InvalidArgument(argument="function", was=was, must="an operator, or a function that calls one")
    return session.decisions[-1]
