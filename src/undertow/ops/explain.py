"""What the last call did and why, for people."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ..plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Explanation:
    """One call: what was asked, which plan ran, and the reason in one sentence."""

    operator: str
    shape: str
    group: str
    call: int
    asked: str
    plan: Plan
    reason: str

    def __str__(self) -> str:
        parcels = f"{len(self.plan.parcels)} parcel{'s' if len(self.plan.parcels) != 1 else ''}"
        return (
            f"{self.operator}({self.shape}) on group {self.group}, call {self.call}: asked for {self.asked!r}, "
            f"ran {self.plan.name} in {parcels} (plan {self.plan.digest}). {self.reason}"
        )


_last = threading.local()


def remember(explanation: Explanation) -> None:
    _last.explanation = explanation


def explain() -> Explanation | None:
    """About this thread's last operator call; None before the first."""
    return getattr(_last, "explanation", None)
