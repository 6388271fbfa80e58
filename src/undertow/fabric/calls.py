"""One operator call as text: what the flight record keeps and what ranks compare when they disagree."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import errors
from . import placement
from .flight import FlightRing
from .flight_writer import call_text

if TYPE_CHECKING:
    from .group import Group


@dataclass(frozen=True, slots=True)
class Call:
    """Call `number` on a group: operator, shapes with dtypes, and the plan's name."""

    group: str
    number: int
    operator: str
    shape: str
    plan: str

    @property
    def kind(self) -> tuple[str, str, str]:
        return self.operator, self.shape, self.plan

    @property
    def text(self) -> str:
        return f"{self.operator}({self.shape}) as {self.plan}"

    def matches(self, other: Call) -> bool:
        """Whether two ranks mean the same call."""
        return self.kind == other.kind

    @staticmethod
    def under_way(records: list[dict[str, Any]], group: str) -> Call | None:
        """The newest call on `group` among this process's flight records, if it is not over."""
        of_group = [record for record in records if record.get("group") == group]
        return Call.latest(of_group[-1:], group) if of_group and of_group[-1]["state"] == "running" else None

    @staticmethod
    def latest(records: list[dict[str, Any]], group: str) -> Call | None:
        """The newest call on `group` among flight records."""
        return Call.numbered(None, records, group)

    @staticmethod
    def numbered(number: int | None, records: list[dict[str, Any]], group: str) -> Call | None:
        """The call of that number on `group` among flight records; None: the newest."""
        for record in reversed(records):
            if record.get("group") == group and number in (None, record.get("call")):
                return Call(
                    group,
                    int(record.get("call", 0)),
                    str(record.get("operator", "")),
                    str(record.get("shape", "")),
                    str(record.get("plan", "")),
                )
        return None


class Bracket:
    """Around one operator call: its flight record, and the check that all ranks mean the same. Yields its number."""

    __slots__ = ("_group", "_kind", "_number", "_ring", "_ticket")

    def __init__(self, group: Group, operator: str, shape: str, plan: str) -> None:
        self._group = group
        self._kind = (operator, shape, plan)

    def __enter__(self) -> int:
        group = self._group
        group.check()
        if group.reserved and placement.current() is None:
            was = f"{group.name}, a collective of which runs beside this call"
            raise errors.InvalidArgument(argument="group", was=was, must="another group, or the call after it")
        group.lock.acquire()
        try:
            group.check_call(group.calls)  # the last one: a rank that was behind may have come to it since
            group.calls += 1
            self._ring = FlightRing.mine()
            text = call_text(group.name, *self._kind)
            self._ticket = self._ring.begin(text, group.calls)
        except BaseException:
            group.lock.release()
            raise
        try:
            if group.is_news(self._kind):
                group.compare(Call(group.name, group.calls, *self._kind))
            group.begin_call(text.checksum)
        except BaseException:
            self._leave(failed=True)
            raise
        self._number = group.calls
        return self._number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed, group = True, self._group
        try:
            if kind is not None and not issubclass(kind, Exception) and not group.failed:
                # Bytes may have begun to move: what this rank would call next, others would take for the rest of them.
                reason = f"its {self._kind[0]} was interrupted by {kind.__name__}"
                group.fail(errors.RankLost(rank=group.rank, group=group.name, reason=reason))
            if kind is None:
                group.check_call(self._number)
                failed = False
        finally:
            self._leave(failed)

    def _leave(self, failed: bool) -> None:
        try:
            self._ring.end(self._ticket, failed=failed)
        finally:
            self._group.lock.release()
