"""share="auto": the first calls of a kind run one after the other and are timed, then the model chooses.

A kind is what the callables are (their code), or the `name` given. Of each lane that could be taken two calls are
timed, and the second counts: the first one loads kernels and makes places. Both sides run once in each, as they would
anyway. Then the ranks put their times together, the slowest counts, the first rank decides and all do the same. The
choice is timed in its turn, in the next two calls: where it took longer than one after the other, that is what stays.

Until then ranks compare kinds in every call. Inside a CUDA graph capture nothing is timed and no call counts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgument, MismatchedCall
from ..ops.explain import Candidate, Choice, Explanation, remember
from ..plan.plan import Plan, Share
from .advice import Advice, Question, Side, answer, key
from .knowledge import load
from .spans import Spans, spans_of
from .strategies import Place, Strategy, default_lane, strategy
from .together import Concurrent, Outcome, place_of, run

if TYPE_CHECKING:
    from ..fabric.group import Group

_KINDS = object()  # name of what is kept with a fabric
_TIMED = 2  # calls on each lane, of which the last counts


@dataclass
class _Kind:
    """What is known about calls that are alike: times by lane, then a choice on trial, then the choice.

    `turn`: which call of the first ones the next is. `tried`: calls of the choice on trial.
    """

    turn: int = 0
    timed: dict[str, Spans] = field(default_factory=dict)
    on_trial: Strategy | None = None
    tried: int = 0
    trial: Spans | None = None
    chosen: Strategy | None = None
    advice: Advice | None = None


def learning(
    compute: Callable[[], Any] | None,
    collective: Callable[[], Any] | None,
    on: Group,
    lane: str,
    ctas: int | None,
    name: str,
) -> Outcome[Any, Any] | Concurrent:
    """As `c3.concurrent`, without a share."""
    place = place_of(on)
    default_lane(place, lane)  # refuses a name that is none
    text = name or f"{_code('compute', compute)} beside {_code('collective', collective)}"
    kinds: dict[tuple[str, str], _Kind] = on.fabric.kept.setdefault(id(_KINDS), {})  # type: ignore[assignment]
    kind = kinds.setdefault((text, lane), _Kind())
    chosen, spans = _next(kind, on, place, lane, ctas, text)
    if compute is None:
        made = _Explained(on, chosen, spans, kind, text)
        if collective is not None:
            made.post(collective)
        return made
    assert collective is not None
    done = run(on, chosen, compute, collective, spans)
    _explain(on, kind, chosen, text)
    return done


class _Explained(Concurrent):
    """A block whose choice is explained once it is left."""

    def __init__(self, group: Group, chosen: Strategy, spans: Spans | None, kind: _Kind, text: str) -> None:
        super().__init__(group, chosen, spans)
        self._kind, self._text = kind, text

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        _explain(self._group, self._kind, self.strategy, self._text)


def _next(
    kind: _Kind, on: Group, place: Place, lane: str, ctas: int | None, text: str
) -> tuple[Strategy, Spans | None]:
    """How the next call of a kind runs. What decides is told by all ranks, so it is the same on all."""
    if on.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _captured(kind, place, lane), None
    if kind.chosen is not None:
        return kind.chosen, None
    _same_kind(on, text, kind)
    if kind.on_trial is None:
        lanes = _lanes(place, lane)
        if kind.turn == _TIMED * len(lanes):
            _put_on_trial(kind, on, place, lanes, ctas, text)
        if kind.on_trial is None:  # not yet, or a time has to be taken again
            where = lanes[kind.turn // _TIMED]
            kind.turn += 1
            kind.timed[where] = spans_of(on.device)
            return strategy("serial", place, where), kind.timed[where]
    if kind.tried == _TIMED:
        _conclude(kind, on, place, text)
        if kind.chosen is not None:
            return kind.chosen, None
    assert kind.on_trial is not None
    kind.tried, kind.trial = kind.tried + 1, spans_of(on.device)
    return kind.on_trial, kind.trial


def _captured(kind: _Kind, place: Place, lane: str) -> Strategy:
    """The choice, where a graph can hold it, else serial: nothing can be timed in a capture."""
    chosen = kind.chosen
    if chosen is None or chosen.lane == "net" or (place.divides and chosen.share.multiprocessors is not None):
        return strategy("serial", place, lane)
    return chosen


def _same_kind(on: Group, text: str, kind: _Kind) -> None:
    """Ranks that are about to time different things hear of it, instead of waiting for each other."""
    mine = f"{text}, call {kind.turn + kind.tried} of its kind"
    told = on.exchange(mine, "which computation is beside which collective")
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise MismatchedCall(
                group=on.name, call=on.calls, rank=0, mine=f"concurrent({told[0]})", other_rank=rank,
                theirs=f"concurrent({theirs})",
            )  # fmt: skip


def _put_on_trial(
    kind: _Kind, on: Group, place: Place, lanes: list[str], ctas: int | None, text: str
) -> None:  # fmt: skip
    """By the model, from what all ranks have timed; or back to the first lane of which some rank has no time."""
    said = on.exchange({where: _seconds(spans) for where, spans in kind.timed.items()}, f"times of {text}")
    again = next((where for where in lanes if any(one[where] is None for one in said)), None)
    if again is not None:
        kind.turn = _TIMED * lanes.index(again) + _TIMED - 1
        return
    slowest = {where: [max(one[where][side] for one in said) for side in (0, 1)] for where in lanes}
    asked = Question(
        Side(min(times[0] for times in slowest.values())),
        Side({where: times[1] for where, times in slowest.items()}, ctas=ctas),
        place,
        load(place.device, on.size, place.multiprocessors),
        tuple(lanes),
    )
    kind.advice = answer(asked)
    first = on.exchange(_packed(kind.advice.strategy), f"the choice for {text}")[0]  # all do what the first rank says
    kind.on_trial = Strategy(first["name"], first["lane"], Share(**first["share"]), bool(first["compute_first"]))
    if kind.on_trial.name == "serial":
        kind.chosen = kind.on_trial


def _conclude(kind: _Kind, on: Group, place: Place, text: str) -> None:
    """The choice stays if it was no slower than one after the other; without a time of all ranks it is tried again."""
    assert kind.trial is not None and kind.on_trial is not None and kind.advice is not None  # noqa: PT018
    times = [_seconds(spans) for spans in kind.timed.values()]
    alone = min((sum(one) for one in times if one is not None), default=0.0)
    said = on.exchange([kind.trial.ends().both if kind.trial.whole else None, alone], f"the trial for {text}")
    if any(both is None for both, _ in said):
        kind.tried -= 1
        return
    both, alone = max(one for one, _ in said), max(one for _, one in said)
    kind.chosen = kind.on_trial
    if both > alone:
        lane = min(kind.timed, key=lambda one: sum(_seconds(kind.timed[one]) or (float("inf"),)))
        lane = on.exchange(lane, f"the lane for {text}")[0]
        kind.chosen = strategy("serial", place, lane)
        reason = f"{key(kind.on_trial)} took {both * 1e3:.3g} ms, one after the other {alone * 1e3:.3g} ms."
        kind.advice = replace(kind.advice, reason=reason)


def _lanes(place: Place, lane: str) -> list[str]:
    """Those to be timed: the one asked for, or those that the strategies could take."""
    if lane != "auto":
        return [lane]
    first = default_lane(place, "auto")
    return [first, *(["dma"] if first != "dma" and not place.lanes.get("dma", "none") else [])]


def _seconds(spans: Spans) -> list[float] | None:
    """Of the computation and of the collective after it; None of a call that failed."""
    if not spans.whole:
        return None
    ends = spans.ends()
    return [max(ends.compute, 1e-9), max(ends.collective - ends.compute, 1e-9)]


def _packed(chosen: Strategy) -> dict[str, Any]:
    share = chosen.share
    return {
        "name": chosen.name, "lane": chosen.lane, "compute_first": chosen.compute_first,
        "share": {
            "multiprocessors": share.multiprocessors, "communication_ctas": share.communication_ctas,
            "communication_priority": share.communication_priority,
        },
    }  # fmt: skip


def _code(argument: str, work: Callable[[], Any] | None) -> str:
    """What a callable is, the same on every rank and at every call."""
    if work is None:
        return "the caller's block"
    while isinstance(work, functools.partial):
        work = work.func
    work = inspect.unwrap(work)
    code = getattr(work, "__code__", None)
    if code is not None:
        file = "/".join(PurePath(code.co_filename).parts[-3:])  # nodes may keep their copies in different places
        return f"{code.co_name} ({file}:{code.co_firstlineno})"
    if inspect.isbuiltin(work):
        return f"{work.__module__}.{work.__qualname__}"
    must = "given, or a function: objects of one class are told apart by a name only"
    raise InvalidArgument(argument="name", was=f"missing, and {argument} of class {type(work).__name__}", must=must)


@dataclass(frozen=True, slots=True)
class ConcurrentExplanation(Explanation):
    """As of every call; the strategy stands for grain and lane."""

    strategy: str = ""

    def __str__(self) -> str:
        rows = [
            f"  {'>' if one.chosen else ' '} {one.name:<16} predicted {(one.predicted or 0) * 1e3:8.3f} ms"
            for one in self.candidates
        ]
        said = f"concurrent({self.shape}) on group {self.group}: asked for {self.asked!r}, ran {self.strategy}."
        return "\n".join([f"{said} {self.reason}", *rows])

    def to_dict(self) -> dict[str, Any]:
        return {**Explanation.to_dict(self), "strategy": self.strategy}


def _explain(on: Group, kind: _Kind, chosen: Strategy, text: str) -> None:
    """For `ut.explain()`."""
    plan = Plan("serial", chosen.lane, ((0, 1),), chosen.share)
    if kind.advice is None:
        choice = Choice(plan, "The first calls of a kind run one after the other, to be timed.")
    else:
        found = sorted(kind.advice.predicted.items(), key=lambda pair: pair[1])
        candidates = tuple(Candidate(name, 1, seconds, None, name == key(chosen)) for name, seconds in found)
        choice = Choice(plan, kind.advice.reason, candidates)
    remember(ConcurrentExplanation("concurrent", text, on.name, on.calls, "auto", choice, key(chosen)))
