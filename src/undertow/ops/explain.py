"""What a call did and why, for people: the plan that ran, what else was considered, and how much was hidden.

With T the call's time, T_gemm the matmul's alone and T_serial that of the fastest serial plan:

    effective communication time (ECT)   T - T_gemm                                 what of the communication shows
    overlap efficiency                   E = 1 - (T - T_gemm) / (T_serial - T_gemm)
    share of ideal                       (S - 1) / (S_ideal - 1), with T_serial - T_gemm as the communication's time

The times are those of the measurement that chose the plan, not of the call that is explained: nobody times that one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..plan import ways
from ..plan.metrics import overlap_efficiency, share_of_ideal
from ..plan.plan import EMBEDDING, Plan

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.group import Group
    from ..plan.tuner import Decision

KEPT = 256
"""Calls that a thread remembers."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was considered: seconds predicted and measured (the median), None where nobody asked.

    `way`: which of several that have the same name, where it is known (`plan.ways`).
    """

    name: str
    parcels: int
    predicted: float | None
    measured: float | None
    chosen: bool = False
    way: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, the reason in one sentence, and what is known about it and its rivals."""

    plan: Plan
    reason: str
    candidates: tuple[Candidate, ...] = ()
    gemm_seconds: float | None = None
    decision: Decision | None = None

    @property
    def seconds(self) -> float | None:
        """What the chosen plan took when it was measured."""
        return next((one.measured for one in self.candidates if one.chosen), None)

    @property
    def serial_seconds(self) -> float | None:
        """What the fastest serial plan took."""
        times = (one.measured for one in self.candidates if one.name.startswith("serial:"))
        return min((seconds for seconds in times if seconds is not None), default=None)

    @property
    def effective_communication_seconds(self) -> float | None:
        if self.seconds is None or self.gemm_seconds is None:
            return None
        return max(0.0, self.seconds - self.gemm_seconds)

    @property
    def overlap_efficiency(self) -> float | None:
        if self.seconds is None or self.gemm_seconds is None or self.serial_seconds is None:
            return None
        return overlap_efficiency(self.seconds, self.gemm_seconds, self.serial_seconds)

    @property
    def share_of_ideal(self) -> float | None:
        if self.seconds is None or self.gemm_seconds is None or self.serial_seconds is None:
            return None
        communication = self.serial_seconds - self.gemm_seconds
        return share_of_ideal(self.seconds, self.gemm_seconds, communication) if communication > 0 else None

    def __str__(self) -> str:
        """The reason, and how much is hidden where that is known."""
        return "\n".join(filter(None, (self.reason, _hidden(self))))


@dataclass(frozen=True, slots=True)
class Explanation:
    """One call: what was asked, which plan ran, and all that is known about the choice."""

    operator: str
    shape: str
    group: str
    call: int
    asked: str
    choice: Choice

    @property
    def plan(self) -> Plan:
        return self.choice.plan

    @property
    def way(self) -> str:
        """How rows are brought or sums made, or which program moves the parcels, where the name leaves that open."""
        if self.plan.program:
            return f"moved by program {self.plan.program}"
        return ways.way(self.operator, self.plan)

    @property
    def reason(self) -> str:
        return self.choice.reason

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.choice.candidates

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain values that JSON can hold."""
        choice = self.choice
        return {
            "operator": self.operator,
            "shape": self.shape,
            "group": self.group,
            "call": self.call,
            "asked": self.asked,
            "strategy": self.plan.name,
            "way": self.way,
            "parcels": len(self.plan.parcels),
            "plan": self.plan.digest,
            "reason": self.reason,
            "candidates": [
                {
                    "strategy": one.name,
                    "way": one.way,
                    "parcels": one.parcels,
                    "predicted_seconds": one.predicted,
                    "measured_seconds": one.measured,
                    "chosen": one.chosen,
                }
                for one in self.candidates
            ],
            "seconds": choice.seconds,
            "serial_seconds": choice.serial_seconds,
            "gemm_seconds": choice.gemm_seconds,
            "effective_communication_seconds": choice.effective_communication_seconds,
            "overlap_efficiency": choice.overlap_efficiency,
            "share_of_ideal": choice.share_of_ideal,
        }

    def __str__(self) -> str:
        work = "lookup" if self.operator == EMBEDDING else "matmul"
        why = "\n".join(filter(None, (self.reason, _hidden(self.choice, work))))
        ran = (
            f"{self.operator}({self.shape}) on group {self.group}, call {self.call}: asked for {self.asked!r}, "
            f"ran {self.plan.name} in {_parcels(len(self.plan.parcels))}{_added(self.way)} (plan {self.plan.digest}). "
            f"{why}"
        )
        return "\n".join([ran, *_rows(self.candidates)])


def _hidden(choice: Choice, work: str = "matmul") -> str:
    """How much of the communication shows, in one sentence; empty where it is not known. `work`: what hides it."""
    exposed, serial, gemm = choice.effective_communication_seconds, choice.serial_seconds, choice.gemm_seconds
    if exposed is None or serial is None or gemm is None:
        return ""
    said = f"The {work} alone takes {milliseconds(gemm)}, serial {milliseconds(serial)}, this plan "
    said += f"{milliseconds(choice.seconds)}: effective communication time {milliseconds(exposed)}"
    if choice.overlap_efficiency is not None:
        said += f", overlap efficiency E {choice.overlap_efficiency:.0%}"
    if choice.share_of_ideal is not None:
        said += f", {choice.share_of_ideal:.0%} of the ideal speed-up"
    return f"{said}."


def _rows(candidates: Iterable[Candidate]) -> list[str]:
    return [
        f"  {'>' if one.chosen else ' '} {one.name:<15} {_parcels(one.parcels):>12}"
        f"   predicted {milliseconds(one.predicted):>9}   measured {milliseconds(one.measured):>9}{_added(one.way)}"
        for one in candidates
    ]


def _added(way: str) -> str:
    return f", {way}" if way else ""


def _parcels(count: int) -> str:
    return f"{count} parcel{'s' if count != 1 else ''}"


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3g} ms"


# -- what this thread remembers ----------------------------------------------------------------------------------------

_history = threading.local()


def remember(explanation: Explanation) -> None:
    calls: deque[Explanation] | None = getattr(_history, "calls", None)
    if calls is None:
        calls = _history.calls = deque(maxlen=KEPT)
    calls.append(explanation)


def explain(
    group: Group | dist.ProcessGroup | DeviceMesh | str | None = None, call: int | None = None
) -> Explanation | None:
    """About this thread's last operator call, or its last on that `group` (or group of that name), or that `call`.

    None where this thread remembers no such call; it remembers the last 256.
    """
    name = group if group is None or isinstance(group, str) else _name_of(group)
    for one in reversed(getattr(_history, "calls", ())):
        if (name is None or one.group == name) and (call is None or one.call == call):
            return one  # type: ignore[no-any-return]
    return None


def _name_of(group: Group | dist.ProcessGroup | DeviceMesh) -> str:
    from ..fabric.registry import as_group

    return as_group(group).name
