"""Steps of threadblocks on their way into an MSCCL schedule: dependences become step numbers, nops and flags.

Shared by both ways out: a schedule that was read from such a file keeps its threadblocks, any other one gets new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .msccl import Gpu, Step, Threadblock

Position = tuple[int, int]  # threadblock and step of one rank, nops not counted
NOWHERE = ("i", -1), ("o", -1)


@dataclass(slots=True)
class Draft:
    """A step without its number. Places are those of its own rank; messages are numbers, which both ends share."""

    type: str
    source: tuple[str, int] | None
    destination: tuple[str, int] | None
    count: int
    after: list[Position] = field(default_factory=list)
    received: int | None = None
    sent: int | None = None


@dataclass(slots=True)
class DraftBlock:
    send: int
    receive: int
    channel: int
    steps: list[Draft] = field(default_factory=list)


def gpus(blocks: list[list[DraftBlock]], sizes: Callable[[int], tuple[int, int, int]]) -> tuple[Gpu, ...]:
    """The threadblocks of each rank with all numbers; `sizes`: chunks of a rank's three buffers."""
    senders: dict[int, Draft] = {}
    receivers: dict[int, Draft] = {}
    for of_rank in blocks:
        for block in of_rank:
            for step in block.steps:
                if step.sent is not None:
                    senders[step.sent] = step
                if step.received is not None:
                    receivers[step.received] = step
    return tuple(
        Gpu(*sizes(rank), _numbered(of_rank, senders, receivers)) for rank, of_rank in enumerate(blocks)
    )  # fmt: skip


def _numbered(
    blocks: list[DraftBlock], senders: dict[int, Draft], receivers: dict[int, Draft]
) -> tuple[Threadblock, ...]:
    awaited = {position for block in blocks for step in block.steps for position in step.after}
    number: dict[Position, int] = {}
    for block_number, block in enumerate(blocks):
        at = 0
        for position, step in enumerate(block.steps):
            at += max(0, len(step.after) - 1)
            number[block_number, position] = at
            at += 1
    made = []
    for block_number, block in enumerate(blocks):
        steps: list[Step] = []
        for position, step in enumerate(block.steps):
            waits = [(other, number[other, at]) for other, at in step.after]
            steps += [Step("nop", *NOWHERE, 0, one, False) for one in waits[:-1]]
            source, destination = _told(step, senders, receivers)
            flag = (block_number, position) in awaited
            steps.append(Step(step.type, source, destination, step.count, waits[-1] if waits else None, flag))
        made.append(Threadblock(block.send, block.receive, block.channel, tuple(steps)))
    return tuple(made)


def _told(
    step: Draft, senders: dict[int, Draft], receivers: dict[int, Draft]
) -> tuple[tuple[str, int], tuple[str, int]]:
    """Both places of a step; the one that is not its own tells where the data lies at the other end."""
    source, destination = step.source, step.destination
    if source is None and step.received is not None:
        origin = senders[step.received]
        source = origin.destination if origin.source is None else origin.source
    if destination is None and step.sent is not None:
        other = receivers[step.sent]
        while other.destination is None and other.sent is not None:  # passed on unstored: to where it is stored
            other = receivers[other.sent]
        destination = other.destination
    return source or NOWHERE[0], destination or NOWHERE[1]
