"""y = activation(sum over ranks r of x_r @ w_r + bias): the row-parallel linear layer.

| tensor | shape on each rank | sharded over |
|---|---|---|
| x_shard_k | [M, K_r] | K |
| w_shard_k | [K_r, N] | K |
| y | [M, N] | nothing: every rank holds the sum |

K_r may differ between ranks, and may be zero. `serial` multiplies, then reduces. `chunked` splits the rows on the host.
`signaled` is one matmul whose finished parcels of tiles are reduced while it goes on:

    compute         | x w, parcel after parcel ................ |
    communication          | sum 0 | sum 1 | sum 2 | ...        | sum last |

A parcel is reduced by its ranks in equal parts (each sums one part and hands the sum to all), if signaled by both of
two CPU ranks as a whole (`Problem.both_sum`), or else by the backend's own collective on lane `net`. `fused`: whole
bands of tiles belong to ranks; a finished tile goes straight into its owner's memory, and the owner's sum to all. Few
rows are a case of their own: every rank's product goes to all, and all sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..collective.arguments import check_program
from ..collective.carry import Carrier
from ..fabric.group import Group
from ..fabric.net import NetLane
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
from .given import check_before_dispatch, check_given
from .library import matmul_all_reduce as operator
from .norm import After
from .operands import check_factors, dtype_name, output
from .overlap import multiply_and_move, overlap
from .produce import placed, product_of
from .product import NoProduct, Product
from .program import ProgramCall
from .program import run as run_program
from .whole import bringer, exchange, moves_whole

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..collective.language import Program
    from ..fabric.base import Fabric, Lane

OPERATOR = "matmul_all_reduce"


def reference(x_shards_k: Sequence[torch.Tensor], w_shards_k: Sequence[torch.Tensor]) -> torch.Tensor:
    """The meaning, as a plain loop over the shards of all ranks (without bias and activation)."""
    y = x_shards_k[0].new_zeros(x_shards_k[0].shape[0], w_shards_k[0].shape[1])
    for x_shard_k, w_shard_k in zip(x_shards_k, w_shards_k, strict=True):
        y += x_shard_k @ w_shard_k
    return y


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
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
    """x [M, K_r] @ w [K_r, N], summed over the ranks of `group` -> [M, N] on every rank, then bias and activation.

    `residual` [M, N] is added to that, and `norm` (a torch.nn.RMSNorm or LayerNorm over N) is taken of the sum, which
    is then left in `residual`. `program`: the collective program that moves the parcels.
    """
    check_given(x, w, strategy, plan, bias=bias, residual=residual, out=out)
    if program is not None:
        check_program(program)
    x, w, bias = autocast(x, w, bias)
    if differentiable(x, w, bias, residual):
        refuse_in_place(out=out, norm=norm)
        check_before_dispatch(x, w, bias, activation, group)
        y = operator(x, w, bias, name_of(group), strategy, held(plan), held(program))
        return finished(y, activation, residual)
    return call(x, w, bias, activation, residual, norm, as_group(group), strategy, plan, program, out)


def call(
    x: torch.Tensor,
    w: torch.Tensor,
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
    """The operator without gradients. `beside`: what is computed while the last parcels move; `alone`: no rank has
    anything of that."""
    check_factors(x, w, on)
    m, n = x.shape[0], w.shape[1]
    check_finish(bias, activation, n, x)
    y = output(out, (m, n), x, w, bias)
    problem = Problem.of(
        OPERATOR, m, n, x.shape[1], dtype=dtype_name(x), ranks=on.size, device=x.device.type,
        multiprocessors=on.fabric.multiprocessors, bulk=on.fabric.bulk_copies,
    )  # fmt: skip
    shape = f"x {list(x.shape)}, w {list(w.shape)}, {dtype_name(x)}"
    after = After.of(residual, norm, y, x, w, bias)
    same_on_all = f"M {m}, N {n}, {dtype_name(x)}{finish_text(bias, activation)}{after.text if after else ''}"

    def execute(chosen: Plan, lane: Lane) -> None:
        run(x, w, y, problem, chosen, Finish.of(bias, activation, chosen, after), on.fabric, lane, beside=beside)

    def execute_program(call: ProgramCall) -> None:
        run_program(x, w, y, problem, call, Finish.of(bias, activation, call.plan, after), on.fabric)

    changed = after.changed if after else ()
    by_program = alone and Finish(bias, activation, after=after).follows(y)
    request = Request(
        problem, on, shape, same_on_all, y, execute, lambda: x @ w, execute_program, changed, by_program=by_program
    )  # fmt: skip
    perform(request, strategy, plan, program)
    return y


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

    def product(buffer: torch.Tensor) -> Product:
        return product_of(fabric, problem, plan, x, w, buffer, None)

    run_product(product if compute else None, y, problem, plan, finish, fabric, lane, beside)


def run_product(
    product: Callable[[torch.Tensor], Product] | None,
    y: torch.Tensor,
    problem: Problem,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    lane: Lane,
    beside: Beside | None = None,
) -> None:
    """y [M, N] = the sum over ranks of what `product` makes in the flat buffer that it is given; None: of what y is."""
    sums = None
    if moves_whole(plan, fabric, lane) and finish.follows(y):
        place = y if finish.nothing else None
        sums = exchange(fabric, "all_reduce", y, [y.numel()], plan.share.communication_ctas, taken=place)
    if sums is not None:
        if product is None:
            sums.given.copy_(y.view(-1))
        entire = NoProduct() if product is None else product(sums.given)
        also = bringer(fabric, beside) if beside is not None else None
        assert (also is None) == (beside is None), "nothing is gathered for a sum that all ranks get"
        multiply_and_move(fabric, entire, sums, finish, y, also)
        return
    rank, size = fabric.group.rank, fabric.group.size
    packed = plan.grain == "signaled" and plan.layout == "packed"
    buffer = y.new_empty(y.numel()) if packed else y.view(-1)
    both = problem.both_sum and plan.grain == "signaled"
    # The backend sums in an order of its own, and may change it with the size of a call.
    whole = isinstance(lane, NetLane) and not plan.deterministic and not both
    if plan.grain == "signaled":
        parcels = [one[0] for one in reorder.pieces(problem.grid(plan), plan)]
    else:
        parcels = [(first * problem.n, rows * problem.n) for ((first, rows),) in chunks(problem.shards, plan)]
    longest = 0 if whole else max((count if both else -(-count // size) for _, count in parcels), default=0)
    carrier = Carrier(fabric, lane, y, longest)
    sent: dict[int, Callable[[], None]] = {}
    # Where an element's column is known before everything has arrived, and nothing needs whole rows.
    finishes_parts = not whole and not packed and finish.after is None

    def parts(parcel: int) -> list[torch.Tensor]:
        offset, count = parcels[parcel]
        return [buffer[offset + start : offset + stop] for start, stop in split(count, size)]

    def carry(parcel: int) -> None:
        offset, count = parcels[parcel]
        if whole:
            assert isinstance(lane, NetLane)
            if count:
                lane.all_reduce(buffer[offset : offset + count])
            return
        if both:
            carrier.give(parcel, [buffer[offset : offset + count]] * size)
            sent[parcel] = lane.mark()
        else:
            carrier.give(parcel, parts(parcel))

    def combine(parcel: int) -> None:
        """My part of the parcel: summed here, and handed to all."""
        offset, count = parcels[parcel]
        start, stop = split(count, size)[rank]
        mine = buffer[offset + start : offset + stop]
        carrier.reduce(parcel, mine, lambda found: finish.sum(mine, found, offset + start, finishes_parts))
        carrier.share(parcel, mine)

    def combine_all(parcel: int) -> None:
        """All of the parcel, as the other rank does, in place of what was sent there."""
        offset, count = parcels[parcel]
        mine = buffer[offset : offset + count]

        def total(found: list[torch.Tensor]) -> None:
            sent[parcel]()
            finish.sum(mine, found, offset, finishes_parts)

        carrier.reduce(parcel, mine, total)

    def collect(parcel: int) -> None:
        carrier.receive(parcel, parts(parcel), shared=True)

    if not whole:
        finish.load(y, size, finishes_parts)
    made = NoProduct() if product is None else product(buffer)
    followers = () if whole else (combine_all,) if both else (combine, collect)
    overlap(fabric, lane, plan, made, carry, followers, len(parcels), beside)
    if packed:
        key = ("unpack", problem.key, plan.digest)
        finish.unpack(y, buffer, placed(fabric, key, lambda: reorder.unpack_table(problem.grid(plan), plan)), plan.tile)
    elif not finishes_parts:
        finish.apply(y)
