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

The memory is a workspace of the fabric, the same for all calls. A call that is enqueued later may use it: the kernel
lets others write to a rank's memory only when its own stream has come to that call, and ends when nobody reads from it.
Small results, of which starting is all that counts, stay where they are: the collective stages them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from ..collective.algorithms import LIBRARY
from ..collective.kinds import executable_of, kind_of
from ..collective.runtime import executable
from ..collective.selection import choose, most_ctas
from ..collective.topology import Topology
from ..fabric.placement import Placement

if TYPE_CHECKING:
    from ..collective.runtime import Executable
    from ..fabric.base import Fabric, Lane
    from ..plan.plan import Plan
    from .beside import Beside

DEVICES = ("cuda",)
"""Where it is faster than parcels."""
LARGE = 512 << 10
"""Bytes."""
_KEPT = object()  # name of what is kept with a fabric


@dataclass(frozen=True)
class Exchange:
    """One collective, ready: write this rank's part to `given`, call `move`, read from `taken`; both flat."""

    given: torch.Tensor
    taken: torch.Tensor
    move: Callable[[], None]


def moves_whole(plan: Plan, fabric: Fabric, lane: Lane) -> bool:
    """Whether the plan's communication is one collective. Not where sums must be those of a parcel's owner."""
    return plan.grain == "serial" and not plan.deterministic and has_collectives(fabric, lane)


def has_collectives(fabric: Fabric, lane: Lane) -> bool:
    group = fabric.group
    return lane.name == "peer" and group.device.type in DEVICES and len(group.local_ranks) == group.size


def exchange(fabric: Fabric, collective: str, like: torch.Tensor, spans: Sequence[int], ctas: int | None) -> Exchange:
    """`spans`: elements that belong to each rank (all_reduce: of all, which is summed in place). Collective at first.

    `like`: has the type and device of what moves.
    """
    dtype, size, in_place = like.dtype, like.element_size(), collective == "all_reduce"
    total, own = sum(spans), sum(spans) if in_place else spans[fabric.group.rank]
    given_count = own if collective == "all_gather" else total
    taken_count = own if collective == "reduce_scatter" else total
    if total * size < LARGE:
        given = like.new_empty(given_count)
        taken = given if in_place else like.new_empty(taken_count)
        move = _staged(fabric, collective, dtype, spans, in_place, ctas)
        return Exchange(given, taken, lambda: move(given, taken))
    most = {
        "all_gather": (max(spans), total),
        "reduce_scatter": (total, max(spans)),
    }  # on any rank: all ask for the same
    room = most.get(collective, (total, total))
    source = fabric.workspace(f"whole {collective}, given", room[0] * size).as_type(dtype)
    out = source if in_place else fabric.workspace(f"whole {collective}, taken", room[1] * size).as_type(dtype)
    run = _direct(fabric, collective, total * size, in_place, ctas)
    given, taken = source.local[:given_count], out.local[:taken_count]
    return Exchange(given, taken, lambda: run.run(source, out, list(spans), "sum"))


def _staged(
    fabric: Fabric, collective: str, dtype: torch.dtype, spans: Sequence[int], in_place: bool, ctas: int | None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """As a call of `undertow.collective` moves tensors that lie anywhere."""
    group = fabric.group
    if not sum(spans):
        return lambda given, taken: None
    where, nodes = Placement(ctas=ctas), group.nodes
    kind = kind_of(
        collective, tuple(spans), dtype, in_place, "sum", None, 0, group.device.type, nodes, None, where
    )  # fmt: skip
    found = executable_of(group, kind)
    return lambda given, taken: found.run(given, taken, list(spans), "sum")


def _direct(fabric: Fabric, collective: str, nbytes: int, in_place: bool, ctas: int | None) -> Executable:
    """The same program, reaching into symmetric memory. Collective at first."""
    group = fabric.group
    topology = Topology.of(group.nodes)
    choice = choose(collective, nbytes, group.device.type, topology)
    made = cast("dict[tuple[object, ...], Executable]", fabric.kept.setdefault(id(_KEPT), {}))
    key = (collective, choice.program, choice.instances, choice.warps, ctas)
    if key not in made:
        instances = choice.instances
        if group.device.type == "cuda":
            most = most_ctas(fabric.multiprocessors, fabric.shares_device)
            seen = group.exchange(min(most, ctas or most), "how many CTAs a rank may take")
            instances = max(1, min(instances, min(seen) // choice.workers))
        schedule = LIBRARY[choice.program].compile(
            topology=topology, in_place=in_place, target="direct", workers=choice.workers, instances=instances
        )
        made[key] = executable(fabric, schedule, warps=choice.warps)
    return made[key]


def bringer(fabric: Fabric, beside: Beside | None) -> Callable[[], None]:
    """What gathers the rows that `beside` needs, made ready. Collective at first."""
    wanted = beside.gathers if beside is not None else None
    if wanted is None:
        return lambda: None
    whole = wanted.whole.view(-1)
    found = exchange(fabric, "all_gather", whole, [rows * wanted.whole.shape[1] for rows in wanted.rows], None)

    def bring() -> None:
        found.given.view(wanted.shard.shape).copy_(wanted.shard)
        found.move()
        whole.copy_(found.taken)

    return bring
