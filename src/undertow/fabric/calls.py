"""One operator call as text: what the flight record keeps and what ranks compare when they disagree."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """Call `number` on a group: operator, shapes with dtypes, and the plan's name."""

    group: str
    number: int
    operator: str
    shape: str
    plan: str

    @property
    def text(self) -> str:
        return f"{self.operator}({self.shape}) as {self.plan}"

    def encode(self) -> bytes:
        fields = {
            "group": self.group,
            "call": self.number,
            "operator": self.operator,
            "shape": self.shape,
            "plan": self.plan,
        }
        return json.dumps(fields).encode()

    def matches(self, other: Call) -> bool:
        """Whether two ranks mean the same call."""
        return (self.operator, self.shape, self.plan) == (other.operator, other.shape, other.plan)

    @staticmethod
    def latest(records: list[dict[str, Any]], group: str) -> Call | None:
        """The newest call on `group` among flight records."""
        for record in reversed(records):
            if record.get("group") == group:
                return Call(
                    group,
                    int(record.get("call", 0)),
                    str(record.get("operator", "")),
                    str(record.get("shape", "")),
                    str(record.get("plan", "")),
                )
        return None
