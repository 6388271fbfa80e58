"""y_r = activation(rows r of (sum over ranks s of x_s @ w_s) + bias): a row-parallel layer with sharded rows.

| tensor | shape on each rank | sharded over |
|---|---|---|
| x_shard_k | [M, K_r] | K |
| w_shard_k | [K_r, N] | K |
| y_shard_m | [M_r, N] | M: rank r holds rows in the order of torch.tensor_split, which may be none |

Every parcel holds a share of every rank's rows, so that all ranks have something to send and to sum from the first
parcel on. Each rank sums what the others send for its own rows. `fused`: a finished tile goes straight into the memory
of the rank that owns its rows; the owner sums as the parts of a tile have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..collective.arguments import check_program
from ..collective.carry import Carrier
from ..errors import InvalidArgument
from ..fabric.group import Group
from ..fabric.registry import as_group
from ..plan import reorder
from ..plan.plan import Plan, split
from ..plan.problem import Problem
from ..plan.tiles import chunks
from . import gradients as _gradients  # noqa: F401 - registers them
from .beside import Beside
from .choose import Request, perform
from .differentiable import autocast, differentiable, finished, held, name_of, refuse_in_place
from .finish import Finish, check_finish, finish_text
from .fused import run as run_fused
from .given import check_before_dispatch, check_given, counts_of
from .library import matmul_reduce_scatter as operator
from .norm import After
from .operands import check_factors, dtype_name, output
from .overlap import multiply_and_move, overlap
from .produce import placed, product_of
from .product import NoProduct
from .program import ProgramCall
from .program import run as run_program
from .whole import bringer, exchange, moves_whole

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..collective.language import Program
    from ..fabric.base import Fabric, Lane

OPERATOR = "matmul_reduce_scatter"


def reference(x_shards_k: Sequence[torch.Tensor], w_shards_k: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The meaning, as a plain loop: what every rank gets (without bias and activation)."""
    y = x_shards_k[0].new_zeros(x_shards_k[0].shape[0], w_shards_k[0].shape[1])
    for x_shard_k, w_shard_k in zip(x_shards_k, w_shards_k, strict=True):
        y += x_shard_k @ w_shard_k
    return list(torch.tensor_split(y, len(x_shards_k)))


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    rows: Sequence[int] | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    norm: torch.nn.Module | None = None,
    group: Group | dist.ProcessGroup | DeviceMesh | str | None = None,
    strategy: str = "auto",
    plan: Plan | None = None,
    program: Program | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K_r] @ w [K_r, N], summed over the ranks of `group` -> this rank's rows [M_r, N], bias and activation.

    `rows[r]`: rows that rank r gets; None: as torch.tensor_split cuts M. `residual` [M_r, N] is added to that, and
    `norm` (a torch.nn.RMSNorm or LayerNorm over N) is taken of the sum, which is then left in `residual`. `program`:
    the collective program that moves the parcels.
    """
    check_given(x, w, strategy, plan, bias=bias, residual=residual, out=out)
    if program is not None:
        check_program(program)
    rows = None if rows is None else counts_of("rows", rows)
    x, w, bias = autocast(x, w, bias)
    if differentiable(x, w, bias, residual):
        refuse_in_place(out=out, norm=norm)
        check_before_dispatch(x, w, bias, activation, group)
        name = name_of(group)
        y = operator(x, w, bias, rows, name, strategy, held(plan), held(program))
        return finished(y, activation, residual)
    return call(x, w, rows, bias, activation, residual, norm, as_group(group), strategy, plan, program, out)


def call(
    x: torch.Tensor,
    w: torch.Tensor,
    rows: Sequence[int] | None,
    bias: torch.Tensor | None,
    activation: str,
    residual: torch.Tensor | None,
    norm: torch.nn.Module | None,
    on: Group,
    strategy: str,
    plan: Plan | None,
    program: Program | None = None,
    out: torch.Tensor | None = None,
    beside: Beside | None = None,
    alone: bool = True,
) -> torch.Tensor:
    """The operator without gradients. `beside`: what is computed and brought along; `alone`: no rank has anything of
    that."""
    check_factors(x, w, on)
    m, n = x.shape[0], w.shape[1]
    check_finish(bias, activation, n, x)
    counts = shares(rows, m, on.size)
    if rows is not None and (program is not None or (plan is not None and plan.program)):
        raise InvalidArgument(
            argument="rows", was=str(counts), must="None, as a program cuts rows by torch.tensor_split"
        )
    y = output(out, (counts[on.rank], n), x, w, bias)
    problem = Problem.of(
        OPERATOR, m, n, x.shape[1], dtype=dtype_name(x), ranks=on.size, device=x.device.type,
        multiprocessors=on.fabric.multiprocessors, shards=counts, bulk=on.fabric.bulk_copies,
        together=on.fabric.together,
    )  # fmt: skip
    shape = f"x {list(x.shape)}, w {list(w.shape)}, {dtype_name(x)}"
    after = After.of(residual, norm, y, x, w, bias)
    cut = "" if rows is None else f" in {counts}"
    same_on_all = f"M {m}{cut}, N {n}, {dtype_name(x)}{finish_text(bias, activation)}{after.text if after else ''}"
    if beside is not None and beside.gathers is not None:  # on a rank without it, others would wait, or use old rows
        same_on_all += ", rows gathered for a weight's gradient"

    def execute(chosen: Plan, lane: Lane) -> None:
        run(x, w, y, problem, chosen, Finish.of(bias, activation, chosen, after), on.fabric, lane, beside=beside)

    def execute_program(call: ProgramCall) -> None:
        run_program(x, w, y, problem, call, Finish.of(bias, activation, call.plan, after), on.fabric)

    changed = after.changed if after else ()
    by_program = alone and rows is None and Finish(bias, activation, after=after).follows(y)
    request = Request(
        problem, on, shape, same_on_all, y, execute, lambda: x @ w, execute_program, changed, by_program=by_program
    )  # fmt: skip
    perform(request, strategy, plan, program)
    return y


def shares(rows: Sequence[int] | None, m: int, ranks: int) -> list[int]:
    """Rows that each rank gets of m."""
    counts = [stop - start for start, stop in split(m, ranks)] if rows is None else [int(one) for one in rows]
    if len(counts) != ranks or min(counts) < 0 or sum(counts) != m:
        must = f"{ranks} counts of at least 0 that add up to {m}, the rows of x"
        raise InvalidArgument(argument="rows", was=str(counts), must=must)
    return counts


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    problem: Problem,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    lane: Lane,
    compute: bool = True,
    beside: Beside | None = None,
) -> None:
    """`compute` False: only what moves, for measurements."""
    if plan.grain == "fused":
        run_fused(x, w, y, problem, plan, finish, fabric, lane, beside)
        return
    rank, n = fabric.group.rank, problem.n
    sums, also = None, None
    if moves_whole(plan, fabric, lane) and finish.follows(y):
        spans = [rows * n for rows in problem.shards]
        also = bringer(fabric, beside) if beside is not None else None
        place = y if finish.nothing else None
        if beside is None or also is not None:
            sums = exchange(fabric, "reduce_scatter", y, spans, plan.share.communication_ctas, taken=place)
    if sums is not None:
        entire = product_of(fabric, problem, plan, x, w, sums.given, None) if compute else NoProduct()
        multiply_and_move(fabric, entire, sums, finish, y, also)
        return
    buffer = x.new_empty(problem.m * n)
    packed = plan.grain == "signaled" and plan.layout == "packed"
    finishes_parts = not packed and finish.after is None
    first = sum(problem.shards[:rank]) * n
    if plan.grain == "signaled":
        pieces = reorder.pieces(problem.grid(plan), plan)
    else:
        pieces = tuple(tuple((row * n, rows * n) for row, rows in parcel) for parcel in chunks(problem.shards, plan))
    places = [one[rank][0] - first for one in pieces]  # natural: rows stand in the shard as in the matrix
    if packed:
        places = [place for place, _ in reorder.received_pieces(problem.grid(plan), plan, rank)]
    result = y.new_empty(y.numel()) if packed else y.view(-1)
    longest = max((count for parcel in pieces for _, count in parcel), default=0)
    carrier = Carrier(fabric, lane, y, max(longest, beside.longest if beside is not None else 0))

    def parts(parcel: int) -> list[torch.Tensor]:
        return [buffer[offset : offset + count] for offset, count in pieces[parcel]]

    def carry(parcel: int) -> None:
        carrier.give(parcel, parts(parcel))

    def combine(parcel: int) -> None:
        here = parts(parcel)[rank]
        mine = result[places[parcel] : places[parcel] + here.numel()]
        carrier.reduce(parcel, here, lambda found: finish.sum(mine, found, pieces[parcel][rank][0], finishes_parts))

    finish.load(y, fabric.group.size, finishes_parts)
    product = product_of(fabric, problem, plan, x, w, buffer, None) if compute else NoProduct()
    overlap(fabric, lane, plan, product, carry, (combine,), len(pieces), beside, carrier)
    if packed:
        key = ("unpack", problem.key, plan.digest, rank)
        finish.unpack(
            y, result, placed(fabric, key, lambda: reorder.unpack_table(problem.grid(plan), plan, rank)), plan.tile
        )
    elif not finishes_parts:
        finish.apply(y)
