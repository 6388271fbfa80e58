"""Schedules of other systems: read, judged and run like our own, and written for them.

imported = read("allreduce.xml")             # MSCCL's XML in all its dialects, or an MSCCL++ plan in JSON
check(imported.schedules[0])                 # result, deadlocks with the file's queues, races
write(imported.schedules[0], "again.xml", imported)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import InvalidArgument
from ..schedule import Schedule
from . import (
    msccl_export,
    msccl_import,
    msccl_read,
    msccl_write,
    mscclpp_export,
    mscclpp_import,
    mscclpp_read,
    mscclpp_write,
)
from .msccl import Algorithm, Facts
from .mscclpp import Plan

XML, JSON = ".xml", ".json"
SUFFIXES = (XML, JSON)


@dataclass(frozen=True)
class Imported:
    """What a file holds: a schedule for each form (in place or not) it may be called in, none of them checked yet."""

    path: str
    schedules: tuple[Schedule, ...]
    source: Algorithm | Plan

    @property
    def name(self) -> str:
        return self.schedules[0].name

    @property
    def ranks(self) -> int:
        return self.schedules[0].ranks

    def with_split_messages(self) -> list[Schedule]:
        """The same where every chunk is a message of its own, as MSCCL sends long ones; none if nothing is queued."""
        if not isinstance(self.source, Algorithm):
            return []
        return msccl_import.schedules(self.source, self.path, split=True)


def read(path: str | Path, slots: int | None = None) -> Imported:
    """The schedules of a file. `slots`: messages that a connection holds, instead of what its protocol says."""
    source: Algorithm | Plan
    if _suffix(path) == XML:
        source = msccl_read.read(path)
        return Imported(str(path), tuple(msccl_import.schedules(source, str(path), slots=slots)), source)
    source = mscclpp_read.read(path)
    return Imported(str(path), (mscclpp_import.schedule_of(source, str(path)),), source)


def write(schedule: Schedule, path: str | Path, like: Imported | None = None, facts: Facts | None = None) -> None:
    """Write a schedule in the format of the file's name. `like`: where it was read from, for what that file says."""
    Path(path).write_text(text(schedule, _suffix(path), like, facts), encoding="utf-8")


def text(schedule: Schedule, suffix: str = XML, like: Imported | None = None, facts: Facts | None = None) -> str:
    """What `write` writes. XML takes staged schedules, JSON direct ones; `facts` are for XML."""
    source = None if like is None else like.source
    if suffix == XML:
        known = source if isinstance(source, Algorithm) else None
        given = facts or (None if known is None else known.facts)
        return msccl_write.text_of(msccl_export.algorithm_of(schedule, given, known))
    if isinstance(source, Plan) and mscclpp_import.schedule_of(source).digest == schedule.digest:
        return mscclpp_write.text_of(source)  # as it was read: packets and pipelines are known there only
    return mscclpp_write.text_of(mscclpp_export.plan_of(schedule))


def _suffix(path: str | Path) -> str:
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise InvalidArgument(argument="path", was=str(path), must=f"a file that ends in {' or '.join(SUFFIXES)}")
    return suffix
