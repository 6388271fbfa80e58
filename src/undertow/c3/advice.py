"""Which strategy for this computation beside this collective: from the model, in well under a millisecond.

    ut.c3.advise(Side(seconds=2e-3, memory=0.1), Side(seconds={"peer": 6e-4, "dma": 5e-3}, nbytes=64 << 20))

Every strategy that can run is predicted by the interference model from the times of the two sides alone, and the
shortest is taken; but a gain over `base` that is smaller than what the model is usually off about the two is no reason
to leave it. Beside it stand what the papers would choose, as baselines:

| baseline | rule |
|---|---|
| launch order | `priority` where the collective has fewer CTAs than the computation, else `base` |
| two tables | `partition` with the k that makes max(T_g slow_g(k), T_c slow_c(k)) least |
| size threshold | `dma` from 32 MiB on (`dma+fewer` if memory bounds the computation), else as launch order |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument
from .knowledge import Knowledge, assumed, load
from .strategies import Place, Strategy, strategy

if TYPE_CHECKING:
    from .together import AnyGroup

DMA_THRESHOLD = 32 << 20
MEMORY_BOUND = 0.5
_WORTH = 0.01  # a gain below this is no reason to do anything but the usual, however right the model is
_UNITS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # that the two tables look at


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two, alone. `seconds`: of a collective, by lane or on every lane. `memory`: how much a computation
    lives on memory's bandwidth, 0 to 1. `nbytes`: that each rank sends. `ctas`: of its kernels, where known.
    """

    seconds: float | Mapping[str, float]
    memory: float = 0.3
    nbytes: int = 0
    ctas: int | None = None

    def on(self, lane: str) -> float | None:
        """Seconds on that lane; None where they are not known."""
        return self.seconds.get(lane) if isinstance(self.seconds, Mapping) else float(self.seconds)


@dataclass(frozen=True)
class Advice:
    """The strategy, what each was predicted to take, and what the papers' rules would have chosen."""

    strategy: Strategy
    predicted: dict[str, float]
    baselines: dict[str, str]
    reason: str
    serial_seconds: float
    source: str = ""

    @property
    def speedup(self) -> float:
        """Over one after the other, as predicted."""
        return self.serial_seconds / self.predicted[key(self.strategy)]

    def explain(self) -> str:
        """For people."""
        rows = [
            f"  {'>' if name == key(self.strategy) else ' '} {name:<16} predicted {seconds * 1e3:8.3f} ms"
            f"   {self.serial_seconds / seconds:.2f}x"
            for name, seconds in sorted(self.predicted.items(), key=lambda pair: pair[1])
        ]
        rules = [f"  {rule}: {name}" for rule, name in self.baselines.items()]
        return "\n".join([self.reason, *rows, "By the papers' rules:", *rules])

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.name, "lane": self.strategy.lane, "predicted_seconds": self.predicted,
            "baselines": self.baselines, "reason": self.reason, "source": self.source,
        }  # fmt: skip

    def __str__(self) -> str:
        return self.explain()


@dataclass(frozen=True)
class Question:
    """What advice is asked about; the same numbers on all ranks give the same advice."""

    compute: Side
    collective: Side
    place: Place
    knowledge: Knowledge
    lanes: tuple[str, ...] = field(default=())


def key(chosen: Strategy) -> str:
    """As plans are named: strategy and lane."""
    return f"{chosen.name}:{chosen.lane}"


def advise(
    compute: Side | float,
    collective: Side | float,
    *,
    place: Place | None = None,
    group: AnyGroup = None,
    knowledge: Knowledge | None = None,
    lane: str = "auto",
) -> Advice:
    """The strategy for `compute` beside `collective`; numbers are seconds. `place` and `knowledge`: the group's."""
    compute = compute if isinstance(compute, Side) else Side(float(compute))
    collective = collective if isinstance(collective, Side) else Side(float(collective))
    _check(compute, collective)
    if place is None:
        from ..fabric.registry import as_group
        from .together import place_of

        on = as_group(group)
        place = place_of(on)
        knowledge = knowledge or load(place.device, on.size, place.multiprocessors)
    knowledge = knowledge or assumed(place.device, place.multiprocessors)
    lanes = tuple(one for one, missing in place.lanes.items() if not missing) if lane == "auto" else (lane,)
    return answer(Question(compute, collective, place, knowledge, lanes))


def answer(asked: Question) -> Advice:
    """By the model."""
    place, compute = asked.place, asked.compute
    seconds = compute.on("")
    assert seconds is not None
    predicted: dict[str, float] = {}
    found: dict[str, Strategy] = {}
    shortest = float("inf")
    effects = dict(asked.knowledge.model.effects)
    for lane in asked.lanes:
        alone = asked.collective.on(lane)
        if alone is None:
            continue
        shortest = min(shortest, alone)
        for name in place.possible:
            if name.startswith("dma") and lane != "dma":
                continue
            if name != "serial" and f"{lane}:{name}" not in effects:
                continue  # of what nobody has seen nothing can be promised
            chosen = strategy(name, place, lane)  # as it was measured: of other parts of the device nothing is known
            found[key(chosen)], predicted[key(chosen)] = chosen, _predict(chosen, seconds, alone, asked)
    if not found:
        must = f"known for one of the lanes {', '.join(asked.lanes)}"
        raise InvalidArgument(argument="collective.seconds", was=f"{asked.collective.seconds}", must=must)
    best = preferred(predicted, asked.knowledge)
    serial = seconds + shortest
    reason = (
        f"{best} is predicted to take {predicted[best] * 1e3:.3g} ms where one after the other takes "
        f"{serial * 1e3:.3g} ms ({asked.knowledge.source})."
    )
    return Advice(found[best], predicted, baselines(asked), reason, serial, asked.knowledge.source)


def preferred(predicted: Mapping[str, float], knowledge: Knowledge) -> str:
    """Of strategies by key: the shortest of those that gain more over `base` than the model is off, or `base`."""
    usual = min((name for name in predicted if name.startswith("base:")), key=predicted.__getitem__, default=None)
    if usual is None:
        return min(predicted, key=predicted.__getitem__)
    doubt = knowledge.error(*usual.split(":"))
    better = [
        name
        for name, took in predicted.items()
        if predicted[usual] > took * (1 + max(_WORTH, math.hypot(doubt, knowledge.error(*name.split(":")))))
    ]
    return min(better, key=predicted.__getitem__, default=usual)


def _predict(chosen: Strategy, compute: float, alone: float, asked: Question) -> float:
    if chosen.name == "serial":
        return compute + alone
    every, share = asked.place.multiprocessors, chosen.share
    run = asked.knowledge.run(
        chosen.name, chosen.lane, compute, alone, asked.compute.memory, max(asked.collective.nbytes, 1),
        share.multiprocessors or every, share.communication_ctas, every,
    )  # fmt: skip
    return asked.knowledge.model.seconds(run)


# -- the papers' rules -------------------------------------------------------------------------------------------------


def baselines(asked: Question) -> dict[str, str]:
    """What each rule chooses here, by the key of a strategy."""
    lane = next((one for one in ("peer", *asked.lanes) if one in asked.lanes), "peer")
    ordered = launch_order(asked.compute, asked.collective)
    found = {"launch order": f"{ordered}:{lane}"}
    if "partition" in asked.place.possible and asked.place.device == "cuda":
        found["two tables"] = f"partition:{lane} with {_two_tables(asked, lane)} CTAs"
    by_size = size_threshold(asked.compute, asked.collective)
    if by_size is None or "dma" not in asked.lanes or "dma" not in asked.place.possible:
        found["size threshold"] = f"{ordered}:{lane}"
    else:
        found["size threshold"] = f"{by_size if by_size in asked.place.possible else 'dma'}:dma"
    return found


def launch_order(compute: Side, collective: Side) -> str:
    """Kernels in ascending order of their CTAs. Unknown: a computation has more, as they mostly do."""
    if compute.ctas is not None and collective.ctas is not None and collective.ctas >= compute.ctas:
        return "base"
    return "priority"


def size_threshold(compute: Side, collective: Side) -> str | None:
    """Copy engines where a transfer is long enough to pay for starting them."""
    if collective.nbytes < DMA_THRESHOLD:
        return None
    return "dma+fewer" if compute.memory >= MEMORY_BOUND else "dma"


def _two_tables(asked: Question, lane: str) -> int:
    """The k with the shortest longer side; both tables from what is known of each side alone."""
    every, compute = asked.place.multiprocessors, asked.compute.on("") or 0.0
    alone = asked.collective.on(lane) or 0.0

    def longer(count: int) -> float:
        return max(
            compute * asked.knowledge.computing(every - count, asked.compute.memory),
            alone * asked.knowledge.communicating(count),
        )

    return min((count for count in _UNITS if count < every), key=longer, default=1)


def _check(compute: Side, collective: Side) -> None:
    for argument, side in (("compute", compute), ("collective", collective)):
        times = list(side.seconds.values()) if isinstance(side.seconds, Mapping) else [side.seconds]
        if not times or not all(0 < one < float("inf") for one in times):
            raise InvalidArgument(argument=f"{argument}.seconds", was=side.seconds, must="above 0, and finite")
    if isinstance(compute.seconds, Mapping):
        raise InvalidArgument(argument="compute.seconds", was=dict(compute.seconds), must="one number")
    if not 0 <= compute.memory <= 1:
        raise InvalidArgument(argument="compute.memory", was=compute.memory, must="between 0 and 1")
