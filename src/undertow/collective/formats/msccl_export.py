"""One of our schedules as an MSCCL schedule.

Staging becomes MSCCL's queues, waits between workers of one rank become dependences between threadblocks. Waits for an
earlier iteration are left out: they guard the places that our scratch and staging use again, and MSCCL has whole chunks
there. A schedule that was read from such a file keeps its threadblocks and its steps. Any other one is cut into MSCCL's
steps and given threadblocks (`msccl_lower`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...errors import NotExpressible, ProgramRefused, UnreadableFile
from ..checker import check
from ..schedule import MOVE, Schedule
from . import msccl_import
from .msccl import WRITTEN, Algorithm, Facts, Threadblock
from .msccl_lower import lowered
from .msccl_places import LETTERS, Places
from .msccl_steps import Draft, DraftBlock, gpus
from .msccl_write import FORMAT
from .order import waits_of


def algorithm_of(schedule: Schedule, facts: Facts | None = None, like: Algorithm | None = None) -> Algorithm:
    """`facts`: what the file is to say beyond what the schedule does; unset: any size, the Simple protocol.

    `like`: the file that the schedule was read from. Where both still do the same, all is spelled as there: places that
    only inform, input or output where a call in place makes them one, peers that a threadblock never talks to.
    """
    if not schedule.staged or schedule.packets or schedule.publishes:
        reason = "only a staged schedule without packets or publish can be: MSCCL sends messages through queues"
        raise _refused(schedule, reason)
    if not set(np.unique(schedule.instructions.kind).tolist()) <= {MOVE}:
        raise _refused(schedule, "it waits for a kernel's tiles, which MSCCL knows nothing of")
    facts = facts or Facts()
    if schedule.in_place not in facts.forms:
        facts = replace(facts, forms=(schedule.in_place,))
    if schedule.worker_channel is not None:
        made = _algorithm(schedule, facts, _kept(schedule), 1)
        if like is not None:
            made = _respelled(made, like, schedule)
        if like is None or (facts.protocol, facts.forms) != (like.facts.protocol, like.facts.forms):
            refusal = _refusal(made)  # it was read with other queues, or for other calls
            if refusal:
                raise _refused(schedule, refusal)
        return made
    refusal = ""
    for fuse in (True, False):
        blocks, scratch = lowered(schedule, fuse)
        made = _algorithm(schedule, facts, blocks, schedule.instances, scratch)
        refusal = _refusal(made)
        if not refusal:
            return made
    raise _refused(schedule, refusal)


def _refusal(made: Algorithm) -> str:
    """Why what is to be written would be wrong, read again; empty if it is right."""
    try:
        for one in msccl_import.schedules(made, f"<{made.name}>"):
            check(one)
    except ProgramRefused as error:
        return f"with {made.facts.protocol}'s queues, {error.facts['reason']}"
    except UnreadableFile as error:  # what we could not judge, we do not write
        return str(error.facts["reason"])
    return ""


def _algorithm(
    schedule: Schedule,
    facts: Facts,
    blocks: list[list[DraftBlock]],
    instances: int,
    scratch: list[int] | None = None,
) -> Algorithm:
    contract = schedule.contract
    mixed = [Places(schedule).scratch_chunks(rank) for rank in range(contract.ranks)] if scratch is None else scratch
    used = [
        {
            place[0]
            for block in of_rank
            for step in block.steps
            for place in (step.source, step.destination)
            if place is not None
        }
        for of_rank in blocks
    ]

    def sizes(rank: int) -> tuple[int, int, int]:
        chunks = [contract.inputs[rank] * instances, contract.outputs[rank] * instances]
        if schedule.in_place:  # one memory: the file names it as the buffer that its steps use
            chunks = [size if letter in used[rank] else 0 for size, letter in zip(chunks, LETTERS, strict=True)]
        return chunks[0], chunks[1], mixed[rank]

    longest = max(*contract.inputs, *contract.outputs) * instances
    name = WRITTEN.get(contract.name, "custom")
    return Algorithm(schedule.name, name, max(1, longest), gpus(blocks, sizes), facts)


def _kept(schedule: Schedule) -> list[list[DraftBlock]]:
    """Workers as threadblocks, instruction by instruction."""
    one, places = schedule.instructions, Places(schedule)
    assert schedule.worker_channel is not None
    position: dict[int, tuple[int, int]] = {}
    blocks: list[list[DraftBlock]] = [[] for _ in range(schedule.ranks)]
    arrived: dict[int, list[int]] = {}  # staging atom -> ranks of senders and message numbers, in order
    messages = 0
    senders: dict[int, int] = {}
    for worker, rank in enumerate(schedule.worker_rank.tolist()):
        for at in range(schedule.worker_start[worker], schedule.worker_start[worker + 1]):
            for atom in one.store_atom[one.store_start[at] : one.store_start[at + 1]].tolist():
                if places.is_staging(atom):
                    senders[atom] = rank
                    arrived.setdefault(atom, []).append(messages)
                    messages += 1
    taken: dict[int, int] = {}
    sent_so_far: dict[int, int] = {}
    for worker, rank in enumerate(schedule.worker_rank.tolist()):
        block = DraftBlock(-1, -1, int(schedule.worker_channel[worker]))
        for at in range(schedule.worker_start[worker], schedule.worker_start[worker + 1]):
            position[at] = (len(blocks[rank]), len(block.steps))
            sources = one.source_atom[one.source_start[at] : one.source_start[at + 1]].tolist()
            stores = one.store_atom[one.store_start[at] : one.store_start[at + 1]].tolist()
            step = _step(places, sources, stores, int(one.count[at]))
            for atom in sources:
                if places.is_staging(atom):
                    block.receive = senders[atom]
                    step.received = arrived[atom][taken.get(atom, 0)]
                    taken[atom] = taken.get(atom, 0) + 1
            for atom in stores:
                if places.is_staging(atom):
                    block.send = places.rank(atom)
                    step.sent = arrived[atom][sent_so_far.get(atom, 0)]
                    sent_so_far[atom] = sent_so_far.get(atom, 0) + 1
            block.steps.append(step)
        blocks[rank].append(block)
    blocks = [[] if len(mine) == 1 and not mine[0].steps else mine for mine in blocks]  # idle ranks have a worker, too
    ranks = np.repeat(schedule.worker_rank, np.diff(schedule.worker_start))
    for waiter, waited, back in waits_of(schedule).tolist():
        if back == 0 and ranks[waiter] == ranks[waited]:
            number, at = position[waiter]
            blocks[ranks[waiter]][number].steps[at].after.append(position[waited])
    return blocks


def _respelled(made: Algorithm, like: Algorithm, schedule: Schedule) -> Algorithm:
    if all(one.digest != schedule.digest for one in msccl_import.schedules(like)):
        return made
    gpus = []
    for gpu, model in zip(made.gpus, like.gpus, strict=True):
        blocks = []
        idle = [] if gpu.threadblocks else [Threadblock(-1, -1, 0, ())] * len(model.threadblocks)
        for block, other in zip([*gpu.threadblocks, *idle], model.threadblocks, strict=True):
            spelled = iter([step for step in other.steps if step.type != "nop" and step.count])
            steps = []
            for step in block.steps:
                twin = step if step.type == "nop" else next(spelled)
                steps.append(replace(step, source=twin.source, destination=twin.destination))
            blocks.append(replace(other, steps=tuple(steps)))
        sizes = model.input_chunks, model.output_chunks
        gpus.append(replace(gpu, input_chunks=sizes[0], output_chunks=sizes[1], threadblocks=tuple(blocks)))
    return replace(made, gpus=tuple(gpus), collective=like.collective)


def _step(places: Places, sources: list[int], stores: list[int], count: int) -> Draft:
    """The type of an instruction that came from a step: it is told by what it reads and writes where."""
    own = [atom for atom in sources if not places.is_staging(atom)]
    kept = [atom for atom in stores if not places.is_staging(atom)]
    receives, sends = len(own) < len(sources), len(kept) < len(stores)
    if not sources:
        return Draft("nop", None, None, 0)
    if receives:
        kind = {
            (0, 1, False): "r",
            (0, 1, True): "rcs",
            (1, 0, True): "rrs",
            (1, 1, False): "rrc",
            (1, 1, True): "rrcs",
        }
        name = kind[len(own), len(kept), sends]
    else:
        name = "s" if sends else "re" if len(own) > 1 else "cpy"
    source = places.of(own[-1]) if own else None
    itself = source if name == "cpy" else None  # in place, a copy of a chunk to itself stores nothing
    return Draft(name, source, places.of(kept[0]) if kept else itself, count)


def _refused(schedule: Schedule, reason: str) -> NotExpressible:
    return NotExpressible(name=schedule.name, format=FORMAT, reason=reason)
