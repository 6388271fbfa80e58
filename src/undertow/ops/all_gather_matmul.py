"""y = activation(concatenation of all ranks' x @ w + bias): the column-parallel linear layer on sharded rows.

| tensor | shape on each rank | sharded over |
|---|---|---|
| x_shard_m | [M_r, K] | M: rank r holds rows r of the gathered x |
| w_shard_n | [K, N_r] | N |
| y_shard_n | [M, N_r] | N |

`serial` gathers all rows, then multiplies. `chunked` multiplies rows as they arrive, parcel by parcel, on the host's
word. `signaled` is one matmul whose tiles wait for the rows that a lane outside it brings: own rows first, then those
of the following ranks, in the order of their arrival.

`fused` is the matmul that brings its rows itself: part of it pushes this rank's rows to the others.

    communication   | rows 0 | rows 1 | rows 2 | ...
    compute         | own    | tiles of rows 0 | tiles of rows 1 | ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch

from ..collective.carry import Carrier
from ..errors import InvalidArgument
from ..fabric.base import WAITING
from ..fabric.group import Group
from ..fabric.registry import as_group
from ..plan import reorder
from ..plan.plan import Plan
from ..plan.problem import Problem
from ..plan.tiles import chunks
from . import gradients as _gradients  # noqa: F401 - registers them
from .beside import Taking
from .choose import Request, perform
from .differentiable import autocast, differentiable, finished, held, name_of, refuse_in_place
from .finish import Finish, check_finish
from .further import Biases, Outputs, Weights, several
from .fused import run as run_fused
from .given import check_before_dispatch, check_given, counts_of
from .library import all_gather_matmul as operator
from .operands import check_factors, dtype_name, output
from .overlap import give_up, half_way, join
from .produce import product_of
from .product import Product
from .whole import exchange, moves_whole

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.base import Fabric, Lane

    AnyGroup = Group | dist.ProcessGroup | DeviceMesh | str | None

OPERATOR = "all_gather_matmul"
Rows = tuple[int, int]
"""First row of the gathered x, and how many."""


def reference(x_shards_m: Sequence[torch.Tensor], w_shards_n: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The meaning, as a plain loop: what every rank gets (without bias and activation)."""
    x = torch.cat(list(x_shards_m))
    return [x @ w_shard_n for w_shard_n in w_shards_n]


@overload
def all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, *, gathered: Literal[False] = ..., rows: Sequence[int] | None = ...,
    bias: torch.Tensor | None = ..., activation: str = ..., group: AnyGroup = ..., strategy: str = ...,
    plan: Plan | None = ..., out: torch.Tensor | None = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, *, gathered: Literal[True], rows: Sequence[int] | None = ...,
    bias: torch.Tensor | None = ..., activation: str = ..., group: AnyGroup = ..., strategy: str = ...,
    plan: Plan | None = ..., out: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def all_gather_matmul(
    x: torch.Tensor, w: Sequence[torch.Tensor], *, gathered: Literal[False] = ..., rows: Sequence[int] | None = ...,
    bias: Sequence[torch.Tensor | None] | None = ..., activation: str | Sequence[str] = ..., group: AnyGroup = ...,
    strategy: str = ..., plan: Plan | None = ..., out: Sequence[torch.Tensor] | None = ...,
) -> list[torch.Tensor]: ...  # fmt: skip
@overload
def all_gather_matmul(
    x: torch.Tensor, w: Sequence[torch.Tensor], *, gathered: Literal[True], rows: Sequence[int] | None = ...,
    bias: Sequence[torch.Tensor | None] | None = ..., activation: str | Sequence[str] = ..., group: AnyGroup = ...,
    strategy: str = ..., plan: Plan | None = ..., out: Sequence[torch.Tensor] | None = ...,
) -> tuple[list[torch.Tensor], torch.Tensor]: ...  # fmt: skip


def all_gather_matmul(
    x: torch.Tensor,
    w: Weights,
    *,
    gathered: bool = False,
    rows: Sequence[int] | None = None,
    bias: Biases = None,
    activation: str | Sequence[str] = "none",
    group: AnyGroup = None,
    strategy: str = "auto",
    plan: Plan | None = None,
    out: Outputs = None,
) -> torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor | list[torch.Tensor], torch.Tensor]:
    """x [M_r, K] of all ranks, gathered by rows, @ w [K, N_r] -> [M, N_r], then bias and activation.

    `rows[r]`: rows of rank r where they differ; None: all ranks have as many. Several weights give a list, one gather
    for all; `bias`, `activation` and `out` are then one for each. `gathered`: the rows of all ranks [M, K] as well.
    Both must be the same on all ranks.
    """
    rows = None if rows is None else counts_of("rows", rows)
    if isinstance(w, torch.Tensor) and not gathered:
        for name, one in (("bias", bias), ("out", out)):
            if not (one is None or isinstance(one, torch.Tensor)):
                raise InvalidArgument(argument=name, was="several", must="one, as w is one weight")
        if not isinstance(activation, str):
            was = "None" if activation is None else "several"
            raise InvalidArgument(argument="activation", was=was, must="the name of one, as w is one weight")
        assert bias is None or isinstance(bias, torch.Tensor)
        assert out is None or isinstance(out, torch.Tensor)
        check_given(x, w, strategy, plan, bias=bias, out=out)
        x, w, bias = autocast(x, w, bias)
        if differentiable(x, w, bias):
            refuse_in_place(out=out)
            check_before_dispatch(x, w, bias, activation, group)
            y = operator(x, w, bias, rows, name_of(group), strategy, held(plan))
            return finished(y, activation)
        return call(x, w, rows, bias, activation, as_group(group), strategy, plan, out)
    found, whole = several(x, w, gathered, rows, bias, activation, group, strategy, plan, out)
    result = found[0] if isinstance(w, torch.Tensor) else found
    return result if whole is None else (result, whole)


def call(
    x: torch.Tensor,
    w: torch.Tensor,
    rows: Sequence[int] | None,
    bias: torch.Tensor | None,
    activation: str,
    on: Group,
    strategy: str,
    plan: Plan | None,
    out: torch.Tensor | None = None,
    arriving: Taking | None = None,
) -> torch.Tensor:
    """The operator without gradients. `arriving` takes part of every parcel of rows that has come."""
    check_factors(x, w, on)
    counts = row_counts(rows, x.shape[0], on)
    m, n, k = sum(counts), w.shape[1], x.shape[1]
    check_finish(bias, activation, n, x)
    y = output(out, (m, n), x, w, bias)
    problem = Problem.of(
        OPERATOR, m, n, k, dtype=dtype_name(x), ranks=on.size, device=x.device.type,
        multiprocessors=on.fabric.multiprocessors, shards=counts, bulk=on.fabric.bulk_copies,
        together=on.fabric.together, further=0 if arriving is None else arriving.columns,
    )  # fmt: skip
    shape = f"x {list(x.shape)}, w {list(w.shape)}, {dtype_name(x)}"
    same_on_all = f"M {m} in {counts}, K {k}, {dtype_name(x)}{'' if arriving is None else arriving.text}"

    def execute(chosen: Plan, lane: Lane) -> None:
        run(x, w, y, problem, chosen, Finish(bias, activation), on.fabric, lane, arriving)

    others = () if arriving is None else arriving.outputs
    request = Request(
        problem, on, shape, same_on_all, y, execute, lambda: x.new_zeros(m, k) @ w, stays=arriving is not None,
        others=others,
    )  # fmt: skip
    perform(request, strategy, plan)
    return y


def row_counts(rows: Sequence[int] | None, mine: int, group: Group) -> list[int]:
    """Rows of each rank, of which this one has `mine`."""
    if rows is None:
        return [mine] * group.size
    counts = [int(one) for one in rows]
    if len(counts) != group.size or min(counts) < 0 or counts[group.rank] != mine:
        must = f"{group.size} counts of at least 0, of which the one of rank {group.rank} is {mine}, the rows of x"
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
    arriving: Taking | None = None,
) -> None:
    if plan.grain == "fused":
        run_fused(x, w, y, problem, plan, finish, fabric, lane, arriving=arriving)
        return
    rank, size, k = fabric.group.rank, fabric.group.size, problem.k
    whole = None
    if moves_whole(plan, fabric, lane):
        spans = [rows * k for rows in problem.shards]
        own = x if x.is_contiguous() else None
        whole = exchange(fabric, "all_gather", x, spans, plan.share.communication_ctas, given=own)
    if whole is not None:
        gathered = whole.taken.view(problem.m, k)
        product = product_of(fabric, problem, plan, gathered, w, y.view(-1), None if finish.nothing else finish)
        with half_way(fabric.group):
            if whole.given.data_ptr() != x.data_ptr():
                whole.given.view(x.shape).copy_(x)
            whole.move()
            product.start()
            if arriving is not None:
                arriving.all_at_once(gathered)
            whole.over()
        fabric.poisons_itself()
        return
    firsts = [sum(problem.shards[:source]) for source in range(size)]
    wanted = None if arriving is None else arriving.whole
    gathered = x.new_empty(problem.m, k) if wanted is None else wanted
    gathered[firsts[rank] : firsts[rank] + x.shape[0]] = x
    shard = gathered[firsts[rank] : firsts[rank] + x.shape[0]]
    comes, goes, longest = _movements(problem, plan, rank, size)
    product = product_of(fabric, problem, plan, gathered, w, y.view(-1), None if finish.nothing else finish)
    carrier = Carrier(fabric, lane, x, k * longest, beside_waiting=product.waits_for_rows)

    def bring(parcel: int) -> None:
        """My rows leave for those who need them in this parcel, theirs come."""
        carrier.send(parcel, [shard[first - firsts[rank] :][:rows].view(-1) for first, rows in goes[parcel]])
        carrier.receive(parcel, [gathered[first : first + rows].view(-1) for first, rows in comes[parcel]])
        product.rows_are_here(parcel)

    def also(parcel: int | None) -> None:
        """What else is computed from a parcel's rows, or from all of them."""
        if arriving is not None:
            arriving.add([(0, problem.m)] if parcel is None else _rows_of(problem, plan, rank, parcel))

    if arriving is not None:
        arriving.begin(gathered)
    gate = None
    if product.waits_for_rows:
        fabric.follow(WAITING)
        gate = fabric.gate()
    with half_way(fabric.group):
        bring_and_multiply(fabric, lane, plan, product, bring, len(comes), also, gate)
    if arriving is not None:
        fabric.poison_if_aborted(*arriving.made)
    if product.waits_for_rows:
        fabric.enqueued(WAITING)


def _rows_of(problem: Problem, plan: Plan, rank: int, parcel: int) -> list[Rows]:
    """The rows that are there with parcel `parcel` and were not before, own ones included."""
    if plan.grain == "signaled":
        one = reorder.arrivals(problem.grid(plan), plan, rank)[parcel]
        return [(one.row, one.rows)]
    return list(chunks(problem.shards, plan)[parcel])


def bring_and_multiply(
    fabric: Fabric,
    lane: Lane,
    plan: Plan,
    product: Product,
    bring: Callable[[int], None],
    parcels: int,
    also: Callable[[int | None], None],
    gate: Callable[[], None] | None = None,
) -> None:
    """`bring(k)` has the rows that parcel k needs arrive, in the order of the stream it runs on.

    `also(k)` follows the product of parcel k, or `also(None)` the whole product where nothing tells parcels apart.
    `gate` comes before a product whose tiles wait.
    """
    lane.limit(plan.share.communication_ctas)
    if plan.grain == "serial":
        for parcel in range(parcels):
            bring(parcel)
        lane.flush()
        product.start()
        also(None)
        return
    communication = fabric.stream("communication", priority=plan.share.communication_priority)
    try:
        product.prepare()
        communication.fork()
        if gate is not None:
            gate()
        product.start()
        if product.waits_for_rows:
            for parcel in range(parcels):
                communication.run(lambda parcel=parcel: bring(parcel))  # type: ignore[misc]
        else:
            communication.run(lambda: bring(0))
            for parcel in range(parcels):
                communication.join()  # what comes next stands after the arrival of this parcel, and of no other
                if parcel + 1 < parcels:
                    communication.run(lambda parcel=parcel: bring(parcel + 1))  # type: ignore[misc]
                product.reach(parcel)
                also(parcel)
    except Exception as error:  # an interrupt does not wait for anybody
        give_up(fabric.group, error)
        join(fabric.group, communication)
        raise
    join(fabric.group, communication)
    if product.waits_for_rows:
        also(None)
    lane.flush()


def _movements(problem: Problem, plan: Plan, rank: int, size: int) -> tuple[list[list[Rows]], list[list[Rows]], int]:
    """Of each parcel: the rows that come from each rank, and those that leave for each rank; none for this rank.

    And the most rows that any rank sends to another in a parcel.
    """
    if plan.grain == "signaled":
        grid = problem.grid(plan)
        all_arrivals = [reorder.arrivals(grid, plan, one) for one in range(size)]
        comes = [
            [(one.row, one.rows if one.source == source and source != rank else 0) for source in range(size)]
            for one in all_arrivals[rank]
        ]
        goes = [
            [
                (one.row, one.rows) if one.source == rank and peer != rank else (grid.shard_rows[rank], 0)
                for peer, one in enumerate(all_arrivals[peer][parcel] for peer in range(size))
            ]
            for parcel in range(len(plan.parcels))
        ]
        return comes, goes, max((one.rows for arrivals in all_arrivals for one in arrivals), default=0)
    pieces = [list(parcel) for parcel in chunks(problem.shards, plan)]
    comes = [[(first, rows if source != rank else 0) for source, (first, rows) in enumerate(one)] for one in pieces]
    goes = [[(one[rank][0], one[rank][1] if peer != rank else 0) for peer in range(size)] for one in pieces]
    return comes, goes, max((rows for parcel in pieces for _, rows in parcel), default=0)
