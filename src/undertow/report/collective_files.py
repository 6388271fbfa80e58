"""Schedule files of other systems, judged for people."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from ..collective.checker import check as check_schedule
from ..collective.formats import Imported, msccl_import, read
from ..collective.formats.msccl import RECEIVES, Algorithm
from ..collective.schedule import Schedule
from ..errors import InvalidArgument, ProgramRefused
from .collective import Verdict, least_number


def check_file(
    path: str, in_place: bool | None = None, slots: int | None = None, search_slots: bool = True
) -> Iterator[Verdict]:
    """What the checker says of every form a file may be called in; raises where the file cannot be read."""
    began = time.perf_counter()
    try:
        imported = read(path, slots)
    except ProgramRefused as error:
        yield Verdict(str(error.facts["program"]), 0, "", False, None, 0.0, str(error))
        return
    reading = (time.perf_counter() - began) / len(imported.schedules)
    for schedule in chosen_forms(imported, in_place):
        began = time.perf_counter()
        refusal = _refusal(schedule)
        seconds = reading + time.perf_counter() - began
        least = None
        if search_slots and isinstance(imported.source, Algorithm):
            least = _least_slots(imported.source, path, schedule.in_place)
        target = "staged" if schedule.staged else "direct"
        yield Verdict(
            schedule.name, schedule.ranks, target, schedule.in_place, None if refusal else schedule,
            seconds, refusal, least, _note(imported, schedule, refusal),
        )  # fmt: skip


def chosen_forms(imported: Imported, in_place: bool | None) -> list[Schedule]:
    """The forms asked for, of those that the file says it may be called in."""
    found = [one for one in imported.schedules if in_place in (None, one.in_place)]
    if not found:
        option, only = ("--in-place", "out of place") if in_place else ("--out-of-place", "in place")
        raise InvalidArgument(argument=option, was="given", must=f"left out: {imported.path} is only for calls {only}")
    return found


def _least_slots(algorithm: Algorithm, path: str, in_place: bool) -> int | None:
    """Messages that a connection must hold at least for this form to be right; None if no number will do."""
    alone = replace(algorithm, facts=replace(algorithm.facts, forms=(in_place,)))

    def accepted(slots: int) -> bool:
        return not _refusal(msccl_import.schedules(alone, path, slots=slots)[0])

    return least_number(accepted, most_messages(algorithm))


def most_messages(algorithm: Algorithm) -> int:
    """Messages of the busiest connection: with as many slots none waits for another."""
    blocks = [block for gpu in algorithm.gpus for block in gpu.threadblocks]
    return max(1, max((sum(step.type in RECEIVES for step in block.steps) for block in blocks), default=1))


def _refusal(schedule: Schedule) -> str:
    try:
        check_schedule(schedule)
    except ProgramRefused as error:
        return str(error)
    return ""


def _note(imported: Imported, schedule: Schedule, refusal: str) -> str:
    """What a user of the file should know beyond the verdict."""
    said = [] if schedule.keeps_input else ["its input is overwritten"]
    if not refusal:
        split = [one for one in imported.with_split_messages() if one.in_place == schedule.in_place]
        if any(_refusal(one) for one in split):
            said.append("not with chunks longer than a message: then more of them fill the queues")
    return "; ".join(said)
