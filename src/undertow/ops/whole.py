"""Whole results that move by themselves, before or after a matmul: by one collective, without parcels.

`serial` over `peer` overlaps nothing, so nothing is gained by parcels that are handed from rank to rank. On a GPU one
kernel moves and sums all of it, several times as fast as one copy and one stop of a stream for every piece; a model
that calls the operators loses nothing, then, to one that calls a matmul and a collective.

Large results (`LARGE`) are multiplied into symmetric memory, or out of it, so that the collective reaches them where
they are, and only the smaller side is copied:

| operator | in symmetric memory | copied |
|---|---|---|
| matmul_all_reduce | product [M, N], summed in place | result [M, N], finished on the way |
| matmul_reduce_scatter | product [M, N], own rows | result [M_r, N], finished on the way |
| all_gather_matmul | own rows, gathered rows [M, K] | own rows [M_r, K] |

A weight's gradient is computed from gathered rows where they are, before the call is over. Where ranks share a GPU and
so its memory, nobody gathers rows for that alone: each rank stores its own ones into the memory of the first (HOME),
all meet, and all read them there.

The memory is a workspace of the fabric, the same for all calls, which therefore come one after the other whatever
streams they are on. Between ranks the kernel sees to it: others write to a rank's memory only when its own stream has
come to that call, and the kernel ends when nobody reads from it. Small results, of which starting is all that counts,
are staged by the collective, from and to where the caller has them. What it takes is made by the first call of a kind:
a captured one that would have to make it goes by parcels.

The collective keeps its deadline and poisons what it could not bring, and what follows passes that on: such a call ends
without a launch that looks whether it failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from ..collective.algorithms import LIBRARY
from ..collective.runtime import executable
from ..collective.selection import choose, most_ctas
from ..collective.topology import Topology
from ..errors import InvalidArgument, WorkspaceTooSmall
from ..fabric.base import WAITING

if TYPE_CHECKING:
    from ..collective.cuda_runtime import CudaExecutable
    from ..collective.runtime import Executable
    from ..fabric.base import Fabric, Lane
    from ..fabric.symmetric import SymmetricBuffer
    from ..plan.plan import Plan
    from .beside import Beside, Gathers

DEVICES = ("cuda",)
"""Where it is faster than parcels."""
LARGE = 512 << 10
"""Bytes."""
_AT_HOME = "rows at home"
HOME = 0
"""The rank in whose memory rows of all ranks lie, where they share it."""
_KEPT = object()  # name of what is kept with a fabric
_PACKED = 4  # bytes of the largest element that packets carry


@dataclass(frozen=True)
class Exchange:
    """One collective, ready: write this rank's part to `given`, call `move`, read from `taken`, both flat; then call
    `over`, when all that reads is enqueued.
    """

    given: torch.Tensor
    taken: torch.Tensor
    move: Callable[[], None]
    over: Callable[[], None]


def moves_whole(plan: Plan, fabric: Fabric, lane: Lane) -> bool:
    """Whether the plan's communication is one collective. Not where sums must be those of a parcel's owner."""
    return plan.grain == "serial" and not plan.deterministic and has_collectives(fabric, lane)


def has_collectives(fabric: Fabric, lane: Lane) -> bool:
    group = fabric.group
    return lane.name == "peer" and group.device.type in DEVICES and len(group.local_ranks) == group.size


def exchange(
    fabric: Fabric,
    collective: str,
    like: torch.Tensor,
    spans: Sequence[int],
    ctas: int | None = None,
    given: torch.Tensor | None = None,
    taken: torch.Tensor | None = None,
) -> Exchange | None:
    """`spans`: elements that belong to each rank (all_reduce: of all, which is summed in place). Collective at first.

    `like`: has the type and device of what moves. `given`, `taken`: contiguous tensors of the caller that small results
    are moved from and to, so that nothing is copied (all_reduce: `taken` alone). The collective poisons `taken` if it
    fails. None, on all ranks: it would have to be made, inside a capture.
    """
    dtype, size, in_place = like.dtype, like.element_size(), collective == "all_reduce"
    total, own = sum(spans), sum(spans) if in_place else spans[fabric.group.rank]
    counts = own if collective == "all_gather" else total, own if collective == "reduce_scatter" else total
    large = total * size >= LARGE
    source: torch.Tensor | SymmetricBuffer
    out: torch.Tensor | SymmetricBuffer
    if large:
        most = {"all_gather": (max(spans), total), "reduce_scatter": (total, max(spans))}  # all ranks ask for the same
        room = most.get(collective, (total, total))
        try:
            held = fabric.workspace(f"whole {collective}, given", room[0] * size).as_type(dtype)
            other = held
            if not in_place:
                other = fabric.workspace(f"whole {collective}, taken", room[1] * size).as_type(dtype)
        except WorkspaceTooSmall:
            return None
        source, out, given, taken = held, other, held.local[: counts[0]], other.local[: counts[1]]
    else:
        given = taken if in_place else given
        source = given = like.new_empty(counts[0]) if given is None else given.view(-1)
        if in_place:
            out = taken = given
        else:
            out = taken = like.new_empty(counts[1]) if taken is None else taken.view(-1)
    move = _mover(fabric, collective, source, out, spans, in_place, ctas, total * size)
    if move is None:
        return None
    fabric.follow(WAITING)
    return Exchange(given, taken, move, lambda: fabric.enqueued(WAITING))


def _mover(
    fabric: Fabric,
    collective: str,
    source: torch.Tensor | SymmetricBuffer,
    out: torch.Tensor | SymmetricBuffer,
    spans: Sequence[int],
    in_place: bool,
    ctas: int | None,
    nbytes: int,
) -> Callable[[], None] | None:
    """A call of the library's program for that size, all of it made ready; None as in `exchange`."""
    if not nbytes:
        return lambda: None
    staged = isinstance(source, torch.Tensor)
    run = _executable(fabric, collective, nbytes, in_place, ctas, "staged" if staged else "direct")
    if run is None:
        return None
    if fabric.group.device.type == "cuda" and (not run.schedule.packets or source.dtype.itemsize <= _PACKED):
        try:
            cast("CudaExecutable", run).load(source, out, spans, "sum")
        except InvalidArgument:
            if fabric.capturing():
                return None
            raise
    return lambda: run.run(source, out, list(spans), "sum")


def _executable(
    fabric: Fabric, collective: str, nbytes: int, in_place: bool, ctas: int | None, target: str
) -> Executable | None:
    """Of the operators alone: calls of `undertow.collective`, which may be under way on other streams, have theirs."""
    group = fabric.group
    topology = Topology.of(group.nodes)
    choice = choose(collective, nbytes, group.device.type, topology)
    made = cast("dict[tuple[object, ...], Executable]", fabric.kept.setdefault(id(_KEPT), {}))
    key = (collective, replace(choice, up_to=0), ctas, target)
    if key not in made:
        if fabric.capturing():
            return None
        instances = choice.instances
        if group.device.type == "cuda":
            most = most_ctas(fabric.multiprocessors)
            seen = group.exchange(min(most, ctas or most), "how many CTAs a rank may take")
            instances = max(1, min(instances, min(seen) // choice.workers))
        compiled = partial(
            LIBRARY[choice.program].compile, topology=topology, in_place=in_place, target=target,
            workers=choice.workers, instances=instances,
        )  # fmt: skip
        if target == "staged":
            schedule = compiled(slots=choice.slots, depth=choice.depth, packets=choice.packets)
        else:
            schedule = compiled()
        stride = choice.stride if target == "staged" else None
        made[key] = executable(fabric, schedule, stride, warps=choice.warps)
    return made[key]


@dataclass(frozen=True)
class Bringing:
    """What is to be done beside a matmul: `bring`, then `compute` with what came, where it lies.

    `meet`: what all ranks must do before `bring`, which overwrites what others may still read, and before `compute`,
    unless something comes between that makes every rank wait for all others. None: `bring` sees to both.
    """

    bring: Callable[[], None]
    compute: Callable[[], None]
    meet: Callable[[], None] | None = None

    def at_once(self) -> None:
        if self.meet is not None:
            self.meet()
        self.bring()
        if self.meet is not None:
            self.meet()
        self.compute()


def bringer(fabric: Fabric, beside: Beside) -> Bringing | None:
    """What gathers the rows that `beside` needs, made ready. Collective at first; None as in `exchange`."""
    wanted = beside.gathers
    if wanted is None:
        return Bringing(lambda: None, beside.compute)
    total, columns = sum(wanted.rows), wanted.shard.shape[1]
    if fabric.group.size == 1:
        return Bringing(lambda: None, lambda: wanted.use(wanted.shard))
    if fabric.together and total * columns * wanted.shard.element_size() >= LARGE:
        return _at_home(fabric, wanted)
    found = exchange(fabric, "all_gather", wanted.shard, [rows * columns for rows in wanted.rows])
    if found is None:
        return None

    def bring() -> None:
        found.given.view(wanted.shard.shape).copy_(wanted.shard)
        found.move()

    def compute() -> None:
        wanted.use(found.taken.view(total, columns))
        found.over()

    return Bringing(bring, compute)


def _at_home(fabric: Fabric, wanted: Gathers) -> Bringing | None:
    """Rows of all ranks in the memory of one of them, which all share.

    Nobody sees in the rows that a rank did not come to a meeting: what is computed from them is poisoned then.
    """
    shard, total = wanted.shard, sum(wanted.rows) * wanted.shard.shape[1]
    try:
        held = fabric.workspace(_AT_HOME, total * shard.element_size()).as_type(shard.dtype)
    except WorkspaceTooSmall:
        return None
    meet, whole = fabric.meeting(_AT_HOME), held.peer(HOME)[:total].view(-1, shard.shape[1])
    fabric.follow(WAITING)

    def bring() -> None:
        first = sum(wanted.rows[: fabric.group.rank])
        whole[first : first + len(shard)] = shard

    def compute() -> None:
        wanted.use(whole)
        fabric.poison_if_aborted(wanted.made)
        fabric.enqueued(WAITING)

    return Bringing(bring, compute, meet)
