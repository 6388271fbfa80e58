"""A plan: every decision for one call. Executors read it and decide nothing. No torch in here."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import asdict, dataclass

from ..errors import InvalidArgument, StrategyUnavailable

GRAINS = ("serial", "chunked", "signaled", "fused")
LANES = ("net", "peer", "dma")


@dataclass(frozen=True, slots=True)
class Share:
    """What each side may use while both run.

    `multiprocessors`: SMs (on a CPU: threads) for computing, None for all. `communication_ctas`: the grid of copies
    that run on SMs, None for the lane's own choice. `communication_priority`: of streams, lower is more urgent.
    """

    multiprocessors: int | None = None
    communication_ctas: int | None = None
    communication_priority: int = -1


@dataclass(frozen=True, slots=True)
class Plan:
    """`grain` over `lane` with `share`; `parcels` are the row ranges [start, stop) in the order in which they leave."""

    grain: str
    lane: str
    parcels: tuple[tuple[int, int], ...]
    share: Share = Share()

    @property
    def name(self) -> str:
        return f"{self.grain}:{self.lane}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read back what `to_json` wrote; anything else is refused with one sentence."""
        try:
            fields = json.loads(text)
            parcels = tuple((int(start), int(stop)) for start, stop in fields["parcels"])
            plan = Plan(str(fields["grain"]), str(fields["lane"]), parcels, Share(**fields.get("share", {})))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(argument="plan", was=repr(text[:80]), must=f"a plan in JSON ({error})") from error
        if plan.grain not in GRAINS or plan.lane not in LANES:
            must = f"a grain of {', '.join(GRAINS)} over a lane of {', '.join(LANES)}"
            raise InvalidArgument(argument="plan", was=plan.name, must=must)
        return plan

    @property
    def digest(self) -> str:
        """Short hash: equal on all ranks that run the same plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def check_rows(self, rows: int) -> None:
        """Refuse a plan made for another number of rows: its parcels must cover [0, rows) once, in any order."""
        reached = 0
        for start, stop in sorted(self.parcels):
            if start != reached or stop < start:
                break
            reached = stop
        else:
            if reached == rows:
                return
        raise InvalidArgument(
            argument="plan", was=f"made for parcels {list(self.parcels)}", must=f"made for {rows} rows"
        )


def split(count: int, parts: int) -> tuple[tuple[int, int], ...]:
    """`parts` ranges of [0, count) by torch.tensor_split's rule: the first `count % parts` are one longer."""
    size, longer = divmod(count, parts)
    bounds = [index * size + min(index, longer) for index in range(parts + 1)]
    return tuple(itertools.pairwise(bounds))


def parse_strategy(strategy: str, grains: tuple[str, ...], lanes: dict[str, str], default_lane: str) -> tuple[str, str]:
    """`"grain"` or `"grain:lane"` to a pair that can run here. `lanes` maps a lane to why it is missing, or ""."""
    grain, _, lane = strategy.partition(":")
    lane = lane or default_lane
    possible = ", ".join(f"{one}:{other}" for one in grains for other, missing in lanes.items() if not missing)
    if grain not in GRAINS or lane not in LANES:
        must = f'"auto", a grain ({", ".join(GRAINS)}) or "grain:lane" with lanes {", ".join(LANES)}'
        raise InvalidArgument(argument="strategy", was=repr(strategy), must=must)
    if grain not in grains:
        raise StrategyUnavailable(strategy=strategy, reason=f"this operator has no {grain} form", possible=possible)
    if lanes[lane]:
        raise StrategyUnavailable(strategy=strategy, reason=lanes[lane], possible=possible)
    return grain, lane
