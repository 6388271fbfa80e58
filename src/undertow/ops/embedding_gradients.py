"""Gradients of embedding_all_to_all: the mirror All-to-All, and what rows of tables get.

    G_r [B, columns of r's pieces]  =  the columns of r's pieces of every rank's dy, rank 0's samples first
    d table_t[v]                    =  sum over bags b, l in bag (t, b) with values[l] = v of  scale[l] * G_r[b, t]
    d weights[l]                    =  table_t[values[l]] . G_r[b, t]                     ("mean": / length of the bag)

with scale = weights (or 1), divided by the bag's length for "mean". Rows of a table that several ranks hold all get the
same columns of dy. `divide` divides gradients by the number of ranks, as TorchRec does, for data-parallel losses that
are means over a rank's own samples.

`RowOptimizer` steps in the backward pass instead of leaving gradients: only rows that were looked up are touched, each
once with its whole gradient g.

    sgd       row -= lr * g
    adagrad   state[row] += mean(g²);  row -= lr * g / (sqrt(state[row]) + eps)        one number of state for each row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..collective.carry import Carrier
from ..errors import InvalidArgument
from ..plan.bags import Layout
from .bags import Bags
from .overlap import half_way, one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..fabric.base import Fabric

KINDS = ("sgd", "adagrad")
_HALVES = (torch.float16, torch.bfloat16)


@dataclass
class RowOptimizer:
    """Steps that the backward pass takes itself, in place. One object for a rank's tables, kept between calls."""

    kind: str = "sgd"
    lr: float = 0.01
    eps: float = 1e-8
    state: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(argument="kind", was=repr(self.kind), must=f"one of {', '.join(KINDS)}")

    def step(self, tables: Sequence[torch.Tensor], gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """`gradients[i]`: rows of table i, any number of times each, and what each gets."""
        if self.kind == "adagrad" and not self.state:
            self.state.extend(torch.zeros(len(one), dtype=torch.float32, device=one.device) for one in tables)
        with torch.no_grad():
            for number, (table, (rows, parts)) in enumerate(zip(tables, gradients, strict=True)):
                if rows.numel():
                    self._step(number, table, *_together(rows, parts))

    def _step(self, number: int, table: torch.Tensor, rows: torch.Tensor, whole: torch.Tensor) -> None:
        if self.kind == "adagrad":
            state = self.state[number]
            state[rows] += whole.pow(2).mean(1).to(state.dtype)
            whole = whole / (state[rows].sqrt() + self.eps)[:, None].to(whole.dtype)
        table[rows] = (table[rows].to(whole.dtype) - self.lr * whole).to(table.dtype)


def _together(rows: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row once, with the sum of what it gets."""
    found, where = torch.unique(rows, return_inverse=True)
    total = torch.zeros(len(found), parts.shape[1], dtype=parts.dtype, device=parts.device)
    return found, total.index_add_(0, where, parts)


def gather_gradient(
    fabric: Fabric, lane_name: str, dy: torch.Tensor, layout: Layout, batches: Sequence[int]
) -> torch.Tensor:
    """G_r: this rank's columns of every rank's dy. Collective, over that lane; a call as the forward pass is."""
    same = f"{layout.width} columns, batches {list(batches)}, {layout.dtype}"
    with fabric.group.call("gradients of embedding_all_to_all", same, f"serial:{lane_name}"):
        return _gather(fabric, lane_name, dy, layout, batches)


def _gather(fabric: Fabric, lane_name: str, dy: torch.Tensor, layout: Layout, batches: Sequence[int]) -> torch.Tensor:
    if lane_name not in fabric.open_lanes():
        fabric.settle()  # opening one pins memory, which may wait for a kernel that waits for the proxy of the forward
    rank, lane = fabric.group.rank, fabric.lane(lane_name)
    columns = [_own_columns(layout, source) for source in range(len(layout.held))]
    width = layout.sent[rank]
    longest = max(batches) * max(layout.sent)
    carrier = Carrier(fabric, lane, dy, longest)
    gathered = dy.new_empty(sum(batches) * width)
    firsts = [sum(batches[:one]) * width for one in range(len(batches))]
    outs = [gathered[first : first + rows * width] for first, rows in zip(firsts, batches, strict=True)]
    leaving = dy.new_empty(dy.shape[0] * sum(layout.sent))  # one for all: a lane copies what lies evenly apart together
    pieces = list(torch.split(leaving, [dy.shape[0] * one for one in layout.sent]))
    with fabric.guarded_call((gathered,)), half_way(fabric.group), one_by_one(fabric, lane):
        for piece, runs in zip(pieces, columns, strict=True):
            if piece.numel():
                torch.cat([dy[:, first : first + dim] for first, dim in runs], 1, out=piece.view(dy.shape[0], -1))
        carrier.send(0, pieces)
        outs[rank].copy_(pieces[rank])
        carrier.receive(0, outs)
        lane.flush()
    return gathered.view(sum(batches), width)


def _own_columns(layout: Layout, rank: int) -> list[tuple[int, int]]:
    """Where the columns of a rank's pieces stand in an output row, whoever else holds rows of them."""
    firsts = [sum(layout.dims[:table]) for table in range(len(layout.dims))]
    return [(firsts[one.table] + one.first_column, one.dim) for one in layout.held[rank]]


def row_gradients(bags: Bags, gathered: torch.Tensor, divisor: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each piece: the rows that were looked up here, and what each lookup gives them. The host waits for offsets."""
    bounds = bags.offsets[:: max(1, bags.samples)].tolist() if bags.pieces else []
    lengths = bags.offsets[1:] - bags.offsets[:-1]
    wide = torch.float32 if gathered.dtype in _HALVES else gathered.dtype
    found, column = [], 0
    for number, piece in enumerate(bags.pieces):
        begin, end = (bounds[number], bounds[number + 1]) if bags.samples else (0, 0)
        bag, local, here = _lookups(bags, number, begin, end, lengths)
        parts = gathered[:, column : column + piece.dim].to(wide)[bag]
        if bags.weights is not None:
            parts = parts * bags.weights[begin:end].to(wide)[here, None]
        if bags.pooling == "mean":
            counts = lengths[number * bags.samples : (number + 1) * bags.samples]
            parts = parts / counts.to(wide)[bag, None]
        found.append((local, parts / divisor if divisor != 1 else parts))
        column += piece.dim
    return found


def weight_gradients(bags: Bags, gathered: torch.Tensor, divisor: int) -> torch.Tensor:
    """d weights; of lookups in rows that others hold, 0: theirs is the gradient."""
    assert bags.weights is not None
    bounds = bags.offsets[:: max(1, bags.samples)].tolist() if bags.pieces else []
    lengths = bags.offsets[1:] - bags.offsets[:-1]
    wide = torch.float32 if gathered.dtype in _HALVES else gathered.dtype
    found, column = torch.zeros(bags.weights.shape, dtype=wide, device=bags.weights.device), 0
    for number, (table, piece) in enumerate(zip(bags.tables, bags.pieces, strict=True)):
        begin, end = (bounds[number], bounds[number + 1]) if bags.samples else (0, 0)
        bag, local, here = _lookups(bags, number, begin, end, lengths)
        products = (gathered[:, column : column + piece.dim].to(wide)[bag] * table[local].to(wide)).sum(1)
        if bags.pooling == "mean":
            products = products / lengths[number * bags.samples : (number + 1) * bags.samples].to(wide)[bag]
        found[begin:end][here] = products / divisor
        column += piece.dim
    return found.to(bags.weights.dtype)


def _lookups(
    bags: Bags, number: int, begin: int, end: int, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of piece `number`: the sample and the row of each lookup that it holds, and which of its values those are."""
    piece = bags.pieces[number]
    samples = torch.arange(bags.samples, device=lengths.device)
    counts = lengths[number * bags.samples : (number + 1) * bags.samples]
    bag = torch.repeat_interleave(samples, counts, output_size=end - begin)
    local = bags.values[begin:end].long() - piece.first_row
    here = (local >= 0) & (local < piece.rows)
    return bag[here], local[here], here


def dense(table: torch.Tensor, rows: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(table.shape, dtype=parts.dtype, device=table.device)
    return total.index_add_(0, rows, parts).to(table.dtype)


def sparse(table: torch.Tensor, rows: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        rows[None], parts.to(table.dtype), table.shape, device=table.device, check_invariants=False
    )


@dataclass(frozen=True)
class Backward:
    """What the backward pass of one call needs beside the tensors that autograd keeps."""

    fabric: Fabric
    bags: Bags
    layout: Layout
    batches: tuple[int, ...]
    forward: Callable[[], tuple[torch.Tensor, str]]  # the result, and the lane that brought it
    sparse: bool
    divisor: int
    optimizer: RowOptimizer | None


class Lookup(torch.autograd.Function):
    """embedding_all_to_all under autograd. Every rank must take part in the backward pass: it exchanges gradients."""

    @staticmethod
    def forward(ctx: Any, call: Backward, anchor: torch.Tensor, weights: Any, *tables: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        bags = call.bags
        # Autograd sees whether they were changed in place. Of tables only weights' gradients need the numbers; those
        # that an optimizer steps are changed by another call's backward pass, and on purpose.
        held = bags.tables if ctx.needs_input_grad[2] and call.optimizer is None else ()
        ctx.save_for_backward(bags.values, bags.offsets, bags.weights, *held)
        y, ctx.lane = call.forward()
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        call: Backward = ctx.call
        gathered = gather_gradient(call.fabric, ctx.lane, gradients[0].contiguous(), call.layout, call.batches)
        # The host reads offsets next. That copy would wait for the stream with the driver's lock, which the proxy may
        # need to bring what a kernel of the forward pass is waiting for.
        call.fabric.settle()
        # After the exchange: what was changed in place ends this rank's backward pass, and others wait for nothing.
        values, offsets, weights, *held = ctx.saved_tensors
        tables = tuple(held) or call.bags.tables
        bags = replace(call.bags, values=values, offsets=offsets, weights=weights, tables=tables)
        for_weights = None
        if ctx.needs_input_grad[2]:
            for_weights = weight_gradients(bags, gathered, call.divisor)
        rows = row_gradients(bags, gathered, call.divisor)
        if call.optimizer is not None:
            call.fabric.group.check()  # the exchange is over: if it was aborted, tables must not take poison for a step
            call.optimizer.step(bags.tables, rows)
            return None, None, for_weights, *([None] * len(bags.tables))
        make = sparse if call.sparse else dense
        found = [
            make(table, *parts) if wanted else None
            for table, parts, wanted in zip(bags.tables, rows, ctx.needs_input_grad[3:], strict=True)
        ]
        return None, None, for_weights, *found
