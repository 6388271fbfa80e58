"""A collective program as the communication of a matmul: its chunks move as soon as the parcels they come with exist.

    compute         | parcel 0 | parcel 1 | parcel 2 | ...       |
    the program                | chunks of 0 | chunks of 1 | ...        | chunks of the last |

The program is one schedule, run once for the whole call (`collective/tied.py` says how it is tied to parcels). On a
CPU a thread interprets it, and waits for words that the caller adds to; on a GPU over lane `peer` it is one kernel, on
as many SMs as the plan leaves free, that waits for the matmul's counters; over the other lanes the host walks it, and a
stream memory operation waits for each parcel. What only needs the matmul leaves on a stream of its own, and what all
ranks get arrives on another, so that neither stands behind the sums of an earlier parcel.

The product stands apart from the result, so that any program is right, those too that write their output before others
have read the input. Bias and activation come after the program, to the whole result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ..collective.algorithms import LIBRARY
from ..collective.lane_runtime import MOST_BYTES, LaneExecutable
from ..collective.runtime import Executable, executable
from ..collective.tied import Tied, tie
from ..collective.topology import Topology
from ..errors import InvalidArgument
from ..fabric.base import WAITING
from ..plan import reorder
from ..plan.defaults import program_plan
from ..plan.plan import Plan, parse_strategy
from .overlap import give_up, half_way, join
from .product import CountedTileProduct

if TYPE_CHECKING:
    from ..collective.cpu_runtime import CpuExecutable
    from ..collective.cuda_runtime import CudaExecutable
    from ..collective.language import Program
    from ..fabric.base import Fabric
    from ..fabric.group import Group
    from ..plan.problem import Problem
    from .cuda_product import CudaTileProduct
    from .finish import Finish

COLLECTIVES = {"matmul_all_reduce": "all_reduce", "matmul_reduce_scatter": "reduce_scatter"}
GRAINS = ("signaled",)
_LEAST_STRIDE, _SHARE_ALIGNMENT = 64 << 10, 16
_LANE_SLOTS = 4  # messages between two ranks whose places are not free again
_MOST_TIED = 64  # programs of a group
_EXECUTABLES, _TIED = object(), object()  # names of what is kept with a fabric


@dataclass(frozen=True, eq=False)
class ProgramCall:
    """A plan whose parcels a program moves."""

    plan: Plan
    tied: Tied


def planned(problem: Problem, group: Group, program: Program | None, strategy: str, plan: Plan | None) -> ProgramCall:
    """The plan of a call with a program, given or named in the plan; refused with one sentence where it cannot be."""
    collective = COLLECTIVES.get(problem.operator)
    if collective is None:
        was = repr(plan.program if plan is not None else "")
        raise InvalidArgument(argument="plan.program", was=was, must=f"'', as {problem.operator} takes none")
    if plan is None:
        assert program is not None
        lanes = group.fabric.lanes()
        lane = "net" if lanes["peer"] else "peer"
        if strategy != "auto":
            _, lane = parse_strategy(strategy, GRAINS, lanes, lane)
        parcels = len(program_plan(problem, lane, "").parcels)
        tied = _tied(group, program, collective, parcels)
        return ProgramCall(program_plan(problem, lane, program.name, len(tied.runs)), tied)
    if program is None:
        if plan.program not in LIBRARY:
            must = "a program of the library, or the one given as program="
            raise InvalidArgument(argument="plan.program", was=repr(plan.program), must=must)
        program = LIBRARY[plan.program]
    tied = _tied(group, program, collective, len(plan.parcels))
    fields: tuple[tuple[str, object, object], ...] = (
        ("program", plan.program, program.name),
        ("grain", plan.grain, "signaled"),
        ("layout", plan.layout, "natural"),
        ("parcels", len(plan.parcels), len(tied.runs)),
    )
    for field, found, wanted in fields:
        if found != wanted:
            needed = f"{wanted!r}, as program {program.name} needs"
            raise InvalidArgument(argument=f"plan.{field}", was=repr(found), must=needed)
    return ProgramCall(plan, tied)


def _tied(group: Group, program: Program, collective: str, parcels: int) -> Tied:
    """Kept with the group: tracing runs the user's function, and must not cost every call."""
    kept = cast("dict[object, Tied]", group.fabric.kept.setdefault(id(_TIED), {}))
    key = (program, collective, parcels)
    found = kept.get(key)
    if found is None:
        if len(kept) >= _MOST_TIED:
            del kept[next(iter(kept))]
        found = kept[key] = tie(program, collective, Topology.of(group.nodes), parcels)
    return found


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    problem: Problem,
    call: ProgramCall,
    finish: Finish,
    fabric: Fabric,
) -> None:
    """The whole call; on return (CUDA: in the order of the current stream) everything has arrived in `y`."""
    plan, tied = call.plan, call.tied
    if problem.m * problem.n == 0:  # the same on all ranks
        return
    pieces = reorder.pieces(problem.grid(plan), plan)
    lengths = tied.lengths(pieces, problem.item_size)
    runs = _executable(fabric, call, max(lengths) * problem.item_size)
    buffer = x.new_empty(problem.m * problem.n)
    product = _product(fabric, problem, call, x, w, buffer)
    waits = y.device.type == "cuda" and not isinstance(runs, LaneExecutable)
    if waits:
        cast("CudaExecutable", runs).load(buffer, y, lengths)
        fabric.follow(WAITING)

    beside = None
    if y.device.type == "cuda" and isinstance(runs, LaneExecutable):  # made before anything waits
        priority = plan.share.communication_priority
        beside = fabric.stream("following 1", priority), fabric.stream("following 2", priority)

    def carry() -> None:
        if isinstance(runs, LaneExecutable):
            runs.run(buffer, y, lengths, ready=product.await_parcel, beside=beside)
        else:
            cast("CpuExecutable | CudaExecutable", runs).run(buffer, y, lengths, parcels=(product.words, 1))

    with half_way(fabric.group):
        _overlap(fabric, plan, product, tied.parcels, carry)
    if waits:
        fabric.enqueued(WAITING)
    finish.apply(y)


def _overlap(
    fabric: Fabric,
    plan: Plan,
    product: CountedTileProduct | CudaTileProduct,
    parcels: int,
    carry: Callable[[], None],
) -> None:
    """The kernel before the program: what waits must not take the SMs of what it waits for."""
    communication = fabric.stream("communication", priority=plan.share.communication_priority)
    try:
        product.prepare()
        communication.fork()
        product.start()
        communication.run(carry)
        for parcel in range(parcels):
            product.reach(parcel)
    except Exception as error:  # an interrupt does not wait for anybody
        give_up(fabric.group, error)
        join(fabric.group, communication)
        raise
    join(fabric.group, communication)


def _product(
    fabric: Fabric, problem: Problem, call: ProgramCall, x: torch.Tensor, w: torch.Tensor, buffer: torch.Tensor
) -> CountedTileProduct | CudaTileProduct:
    rank, plan = fabric.group.rank, call.plan
    numbers = call.tied.numbers[rank]
    if x.device.type == "cuda":
        from .cuda_product import CudaTileProduct

        return CudaTileProduct(fabric, problem, plan, x, w, buffer, None, numbers)
    grid = problem.grid(plan)
    table = reorder.renumbered(grid, reorder.tile_table(grid, plan, rank), numbers)
    return CountedTileProduct(fabric.group, x, w, buffer, table, call.tied.parcels)


def _executable(fabric: Fabric, call: ProgramCall, longest: int) -> Executable:
    """One for all calls of this program whose longest chunk needs as much room; made at the first, by all ranks.

    A chunk travels whole: with a program that goes through its chunks more than once, piece by piece, the first pieces
    would wait for the last parcel.
    """
    plan, tied = call.plan, call.tied
    ctas = plan.share.communication_ctas or 1
    room = longest + _SHARE_ALIGNMENT * ctas  # each CTA's part of a chunk begins on so many bytes
    stride = max(_LEAST_STRIDE, 1 << (room - 1).bit_length())
    by_lanes = plan.lane != "peer" or len(fabric.group.local_ranks) != fabric.group.size
    options = {}
    if by_lanes:  # two parcels are under way; iterations follow each other only where a chunk does not fit
        stride = min(stride, MOST_BYTES)
        options = {"slots": _LANE_SLOTS, "depth": 1 if longest <= stride else 2}
    kept = cast("dict[tuple[str, str, int], Executable]", fabric.kept.setdefault(id(_EXECUTABLES), {}))
    schedule = tied.schedule(**options)
    workers = int(np.bincount(schedule.worker_rank).max())
    if fabric.group.device.type == "cuda" and plan.lane == "peer" and ctas // workers > 1:
        schedule = tied.schedule(instances=ctas // workers)
    # Not by the program: one that is decorated anew in every step is the same. One with more room will do.
    kind = (schedule.digest, plan.lane)
    roomy = [one for one in kept if one[:2] == kind and one[2] >= stride]
    if roomy:
        return kept[min(roomy)]
    found = kept[(*kind, stride)] = executable(fabric, schedule, stride, plan.lane)
    return found
