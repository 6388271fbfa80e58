"""What each side may use while both run: six strategies by name, each a lane, a share and an order of launching.

| name | lane | streams | SMs | launched first |
|---|---|---|---|---|
| serial | as asked | one | all for each | compute |
| base | as asked | two, equal | both want all | compute |
| priority | as asked | communication urgent | both want all | communication |
| partition | as asked | two, equal | k for communication, the others for computing | compute |
| both | as asked | communication urgent | as partition | communication |
| dma | dma | communication urgent | all for computing, but for sums | communication |
| dma+fewer | dma | communication urgent | all but a few for computing: for what memory bounds | communication |

A partition is a pair of green contexts on a whole card, grids of a bounded size where ranks share one, threads on a
CPU. There "launched first" has no choice: a collective runs on a thread of its own, which must be started before the
caller computes. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import InvalidArgument, StrategyUnavailable
from ..plan.plan import LANES, Share

STRATEGIES = ("serial", "base", "priority", "partition", "both", "dma", "dma+fewer")
_FOR_COMMUNICATION = 4  # of so many SMs one is for communication, unless somebody knows better
_SPARED = 16  # of so many SMs one is taken from a computation that memory bounds, beside copy engines
_LEAST_GREEN = 8  # SMs that the driver divides a whole card by


@dataclass(frozen=True, slots=True)
class Strategy:
    """`share` as in a plan: SMs (threads) for computing, CTAs and stream priority for communication."""

    name: str
    lane: str
    share: Share
    compute_first: bool = True

    @property
    def title(self) -> str:
        parts = [f"{self.name} over {self.lane}"]
        if self.share.multiprocessors is not None:
            parts.append(f"{self.share.multiprocessors} SMs or threads for computing")
        if self.share.communication_ctas is not None:
            parts.append(f"{self.share.communication_ctas} CTAs for communication")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a strategy has to fit: the device of a rank, its SMs (threads), and lanes with why they are missing.

    `divides`: whether the driver cuts the card in parts (green contexts), in steps of 8 SMs.
    """

    device: str
    multiprocessors: int
    lanes: Mapping[str, str]
    divides: bool = False

    @property
    def possible(self) -> list[str]:
        """The strategies that can run here, `serial` first."""
        return [name for name in STRATEGIES if not self._missing(name)]

    def _missing(self, name: str) -> str:
        if name.startswith("dma") and self.lanes.get("dma", "it has no such lane"):
            return self.lanes.get("dma", "") or "there is no lane dma"
        if name in ("partition", "both", "dma+fewer") and self.multiprocessors < 2:
            return "a rank has one thread or SM here, which cannot be divided"
        if name in ("partition", "both", "dma+fewer") and self.divides and self.multiprocessors <= _LEAST_GREEN:
            return f"the driver divides a card by {_LEAST_GREEN} SMs, and this one has {self.multiprocessors}"
        return ""


def strategy(name: str, place: Place, lane: str = "auto", ctas: int | None = None) -> Strategy:
    """The strategy of that name at that place. `ctas`: for communication, where it is partitioned."""
    if name not in STRATEGIES:
        raise InvalidArgument(
            argument="share", was=repr(name), must=f"'auto', a Share, or one of {', '.join(STRATEGIES)}"
        )
    missing = place._missing(name)
    if missing:
        raise StrategyUnavailable(strategy=name, reason=missing, possible=", ".join(place.possible))
    if name.startswith("dma"):
        if lane not in ("auto", "dma"):
            raise InvalidArgument(argument="lane", was=repr(lane), must=f"'dma' for share {name!r}, or 'auto'")
        lane = "dma"
    lane = default_lane(place, lane)
    every = place.multiprocessors
    reserved = None
    if name in ("partition", "both"):
        reserved = max(1, every // _FOR_COMMUNICATION) if ctas is None else ctas
        if place.divides:
            reserved = max(_LEAST_GREEN, reserved // _LEAST_GREEN * _LEAST_GREEN)
        if (ctas is not None and not 1 <= ctas < every) or reserved >= every:
            must = f"between 1 and {every - 1}, so that SMs are left for computing"
            raise InvalidArgument(argument="ctas", was=reserved if ctas is None else ctas, must=must)
    elif name == "dma+fewer":
        reserved = max(1, every // _SPARED)
        if place.divides:
            reserved = max(_LEAST_GREEN, reserved // _LEAST_GREEN * _LEAST_GREEN)
    share = Share(
        multiprocessors=None if reserved is None else every - reserved,
        communication_ctas=reserved if name in ("partition", "both") else ctas,
        communication_priority=0 if name in ("base", "partition", "serial") else -1,
    )
    made = Strategy(name, lane, share, compute_first=name in ("serial", "base", "partition"))
    check(made, place)
    return made


def given(share: Share, place: Place, lane: str = "auto") -> Strategy:
    """A share that the caller has made; where the driver divides the card, with the SMs that it really gives."""
    every, wanted = place.multiprocessors, share.multiprocessors
    if place.divides and wanted is not None and 1 <= wanted < every:
        beside = -(-(every - wanted) // _LEAST_GREEN) * _LEAST_GREEN  # split off, and rounded up by the driver
        if beside >= every:
            must = f"at least {every % _LEAST_GREEN or _LEAST_GREEN}, as the driver divides by {_LEAST_GREEN}"
            raise InvalidArgument(argument="share.multiprocessors", was=wanted, must=must)
        share = replace(share, multiprocessors=every - beside)
    made = Strategy("given", default_lane(place, lane), share, compute_first=share.communication_priority >= 0)
    check(made, place)
    return made


def default_lane(place: Place, lane: str) -> str:
    """The lane asked for, or the first of peer, dma and net that is here."""
    if lane == "auto":
        lane = next((one for one in ("peer", "dma", "net") if place.lanes.get(one) == ""), "net")
    if lane not in LANES:
        raise InvalidArgument(argument="lane", was=repr(lane), must=f"'auto' or one of {', '.join(LANES)}")
    missing = place.lanes.get(lane, "there is no such lane here")
    if missing:
        possible = ", ".join(one for one, reason in place.lanes.items() if not reason) or "none"
        raise StrategyUnavailable(strategy=lane, reason=missing, possible=possible)
    return lane


def check(strategy: Strategy, place: Place) -> None:
    """Refuse a share that is larger than the device, or nothing."""
    every, share = place.multiprocessors, strategy.share
    unit = "SMs" if place.device == "cuda" else "threads"
    limits = (
        ("share.multiprocessors", share.multiprocessors, every),
        ("share.communication_ctas", share.communication_ctas, every if place.device == "cuda" else 1 << 16),
    )
    for argument, count, most in limits:
        if count is not None and not 1 <= count <= most:
            must = f"between 1 and the {most} {unit} that a rank has here, or None for all"
            raise InvalidArgument(argument=argument, was=count, must=must)
    if place.device == "cuda" and share.multiprocessors is not None and share.communication_ctas is not None:
        together = share.multiprocessors + share.communication_ctas
        if together > every and strategy.lane == "peer":
            was = f"{share.multiprocessors} SMs for computing beside {share.communication_ctas} CTAs"
            raise InvalidArgument(argument="share", was=was, must=f"at most the {every} SMs of a rank together")
