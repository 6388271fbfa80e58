"""share="auto": the first calls of a kind run one after the other and are timed, then the model chooses.

A kind is what the callables are (their code), or the `name` given. Of each lane that could be taken two calls are
timed, and the second counts: the first one loads kernels and makes places. Both sides run once in each, as they would
anyway. Then the ranks put their times together, the slowest counts, the first rank decides and all do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..ops.explain import Candidate, Choice, Explanation, remember
from ..plan.plan import Plan, Share
from .advise import Advice, Question, Side, answer, key
from .concurrent import Concurrent, Outcome, place_of, run
from .knowledge import load
from .spans import Spans, spans_of
from .strategies import Place, Strategy, default_lane, strategy

if TYPE_CHECKING:
    from ..fabric.group import Group

_KINDS = object()  # name of what is kept with a fabric
_TIMED = 2  # calls on each lane, of which the last counts


@dataclass
class _Kind:
    """What is known about calls that are alike: seconds (compute, collective) by lane, then the choice."""

    calls: int = 0
    timed: dict[str, Spans] = field(default_factory=dict)
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
    text = name or f"{_code(compute)} beside {_code(collective)}"
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
    """How the next call of a kind runs. What decides is the number of calls, which is the same on all ranks."""
    if kind.chosen is not None:
        return kind.chosen, None
    lanes = _lanes(place, lane)
    turn, kind.calls = kind.calls, kind.calls + 1
    if turn < _TIMED * len(lanes):
        where = lanes[turn // _TIMED]
        kind.timed[where] = spans_of(on.device)
        return strategy("serial", place, where), kind.timed[where]
    mine = {where: _seconds(spans) for where, spans in kind.timed.items()}
    said = on.exchange(mine, f"times of {text}")
    slowest = {where: [max(one[where][side] for one in said) for side in (0, 1)] for where in lanes}
    asked = Question(
        Side(min(times[0] for times in slowest.values())),
        Side({where: times[1] for where, times in slowest.items()}, ctas=ctas),
        place,
        load(place.device, on.size, place.multiprocessors),
        tuple(lanes),
    )
    advice = answer(asked)
    first = on.exchange(_packed(advice.strategy), f"the choice for {text}")[0]  # all do what the first rank says
    kind.chosen = Strategy(first["name"], first["lane"], Share(**first["share"]), bool(first["compute_first"]))
    kind.advice = advice
    return kind.chosen, None


def _lanes(place: Place, lane: str) -> list[str]:
    """Those to be timed: the one asked for, or those that the strategies could take."""
    if lane != "auto":
        return [lane]
    first = default_lane(place, "auto")
    return [first, *(["dma"] if first != "dma" and not place.lanes.get("dma", "none") else [])]


def _seconds(spans: Spans) -> list[float]:
    """Of the computation and of the collective after it; a call that failed took for ever."""
    try:
        ends = spans.ends()
    except (AttributeError, RuntimeError):
        return [1e9, 1e9]
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


def _code(work: Callable[[], Any] | None) -> str:
    """What a callable is, the same on every rank and at every call."""
    if work is None:
        return "the caller's block"
    code = getattr(work, "__code__", None)
    if code is not None:
        return f"{code.co_name} (line {code.co_firstlineno})"
    return getattr(work, "__qualname__", type(work).__qualname__)


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
