"""What the commands of `undertow collective` are about: programs, compiled as asked, or schedule files as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from ..collective.schedule import Schedule
    from ..report.collective import Request, Verdict


@dataclass(frozen=True, slots=True)
class Form:
    """The options that say how a program is compiled. A file knows most of it, and leaves the rest alone."""

    ranks: int | None
    nodes: int = 1
    root: int = 0
    targets: tuple[str, ...] = ("staged",)
    in_place: bool | None = False
    slots: int | None = None
    depth: int = 2
    workers: int | None = None
    instances: int = 1

    def request(self) -> Request:
        """For a program."""
        from ..collective.compiler import SLOTS
        from ..report.collective import Request

        if self.ranks is None:
            raise typer.BadParameter("a program needs to know how many ranks.", param_hint="--ranks")
        return Request(
            self.ranks, self.nodes, self.root, self.targets, self.in_place, self.slots or SLOTS, self.depth,
            self.workers, self.instances,
        )  # fmt: skip


def check_ranks(asked: int | None, held: int) -> None:
    """Refuse another number than a file's own."""
    if asked is not None and asked != held:
        raise InvalidArgument(argument="--ranks", was=asked, must=f"{held} or left out, as the file is for {held}")


def verdicts(target: str, form: Form, search_slots: bool = True) -> Iterator[tuple[int, Verdict]]:
    """On every form of what `target` names, be it a program or a file; with the width of the longest name."""
    from ..collective.loading import is_schedule_file, load
    from ..report.collective import check
    from ..report.collective_files import check_file

    if is_schedule_file(target):
        for verdict in check_file(target, form.in_place, form.slots, search_slots):
            if verdict.ranks:
                check_ranks(form.ranks, verdict.ranks)
            yield len(verdict.program), verdict
        return
    request = form.request()
    programs = load(target)
    width = max(len(one.name) for one in programs)
    for verdict in check(programs, request, search_slots):
        yield width, verdict


def compiled(target: str, form: Form) -> list[Schedule]:
    """What `target` names as schedules, checked; of a file, the first form asked for."""
    from ..collective.checker import check
    from ..collective.formats import read
    from ..collective.loading import is_schedule_file, load
    from ..report.collective_files import chosen_forms

    if is_schedule_file(target):
        imported = read(target, form.slots)
        check_ranks(form.ranks, imported.ranks)
        forms = chosen_forms(imported, form.in_place)
        for schedule in forms:
            check(schedule)
        return forms[:1]
    request = form.request()
    return [request.compile(request.trace(one), form.targets[0], bool(form.in_place)) for one in load(target)]


def foreign_text(
    schedules: list[Schedule], target: str, suffix: str, protocol: str | None, in_place: bool | None
) -> str:
    """The one schedule in the format of `suffix`; what a file says of itself is said again, for the forms asked for."""
    from ..collective.formats import read, text
    from ..collective.formats.msccl import Algorithm, Facts
    from ..collective.loading import is_schedule_file

    if len(schedules) != 1:
        must = f"one program: {target} makes {len(schedules)}, and such a file holds one schedule"
        raise InvalidArgument(argument="target", was=target, must=must)
    like = read(target) if is_schedule_file(target) else None
    facts = like.source.facts if like is not None and isinstance(like.source, Algorithm) else None
    if protocol is not None:
        facts = replace(facts or Facts(), protocol=protocol)
    if facts is not None and in_place is not None:
        facts = replace(facts, forms=(in_place,))
    return text(schedules[0], suffix, like, facts)
