"""Collectives as calls: what a user of torch.distributed expects, run by checked schedules.

| call | tensor | result |
|---|---|---|
| all_reduce | [...] on every rank | the sum over ranks, in place unless `out` is given |
| all_gather | [rows_r, ...] | [sum of rows_r, ...], shards in rank order |
| reduce_scatter | [rows, ...] | the rank's shard of the sum; shards by `rows`, or by torch.tensor_split |
| all_to_all | [sum over d of rows for d, ...] | [sum over s of rows from s, ...] |
| broadcast | [...] | the root's, in place |
| reduce | [...] | the sum on the root, None elsewhere |
| gather | [rows_r, ...] | all shards on the root, None elsewhere |
| scatter | [rows, ...] on the root, None elsewhere | the rank's shard |

Every call is collective: all ranks of the group make it, in the same order, with matching shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .. import settings
from ..errors import InvalidArgument
from ..fabric import placement
from ..fabric.base import poison
from ..fabric.flight_writer import call_text
from ..fabric.group import Group
from ..fabric.placement import Placement
from ..fabric.registry import as_group
from . import repeated, tables
from .arguments import (
    agreed_rows,
    check_operation,
    check_program,
    check_root,
    check_tensor,
    checked_out,
    is_narrow,
    output,
    row_width,
    rows_of,
    shares_of,
    widened,
)
from .cpu_runtime import CpuExecutable
from .kinds import executable_of, kind_of
from .language import Program

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    AnyGroup = Group | dist.ProcessGroup | DeviceMesh | None


def all_reduce(
    tensor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    op: str = "sum",
    group: AnyGroup = None,
    program: Program | None = None,
) -> torch.Tensor:
    """out = the sum (or other `op`) of every rank's `tensor`; in place unless `out` is given."""
    if (out is None or out is tensor) and repeated.again("all_reduce", group, program, op, tensor, tensor):
        return tensor
    on = as_group(group)
    check_tensor("tensor", tensor, on)
    check_operation(op, tensor)
    result = tensor if out is None else checked_out(out, tensor, tuple(tensor.shape))
    if op == "avg" and is_narrow(tensor):
        wide = widened(tensor)
        _run("all_reduce", on, wide, wide, [tensor.numel()], op, program)
        result.copy_(wide.div_(on.size))
        return result
    _run("all_reduce", on, tensor, result, [tensor.numel()], op, program)
    if op == "avg":
        return result.div_(on.size)
    if result is tensor:
        _remember("all_reduce", group, program, op, tensor, on, [tensor.numel()])
    return result


def all_gather(
    tensor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    group: AnyGroup = None,
    program: Program | None = None,
) -> torch.Tensor:
    """out = every rank's `tensor`, one after the other. `rows[r]`: rows of rank r where they differ."""
    plain = rows is None and tensor.dim() == 1
    if out is not None and plain and repeated.again("all_gather", group, program, "sum", tensor, out):
        return out
    on = as_group(group)
    check_tensor("tensor", tensor, on)
    shaped = tensor if tensor.dim() else tensor.reshape(1)
    counts = rows_of("rows", rows, on.size, shaped.shape[0], on.rank)
    width = row_width(shaped)
    result = output(out, tensor, (sum(counts), *shaped.shape[1:]))
    spans = [count * width for count in counts]
    _run("all_gather", on, shaped, result, spans, "sum", program)
    if plain:
        _remember("all_gather", group, program, "sum", tensor, on, spans)
    return result


def reduce_scatter(
    tensor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    op: str = "sum",
    group: AnyGroup = None,
    program: Program | None = None,
) -> torch.Tensor:
    """out = this rank's rows of the sum (or other `op`) of every rank's `tensor`; `rows[r]` for rank r, or by
    torch.tensor_split."""
    plain = rows is None and tensor.dim() == 1
    if out is not None and plain and repeated.again("reduce_scatter", group, program, op, tensor, out):
        return out.div_(as_group(group).size) if op == "avg" else out
    on = as_group(group)
    check_tensor("tensor", tensor, on, matrix=True)
    check_operation(op, tensor)
    counts = shares_of("rows", rows, on.size, tensor.shape[0])
    width = row_width(tensor)
    result = output(out, tensor, (counts[on.rank], *tensor.shape[1:]))
    given, total = (widened(tensor), widened(result)) if op == "avg" and is_narrow(tensor) else (tensor, result)
    spans = [count * width for count in counts]
    _run("reduce_scatter", on, given, total, spans, op, program)
    if op == "avg":
        total.div_(on.size)
    if total is not result:
        return result.copy_(total)
    if plain and len(set(spans)) == 1:
        _remember("reduce_scatter", group, program, op, tensor, on, spans)
    return result


def all_to_all(
    tensor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    arriving: Sequence[int] | None = None,
    group: AnyGroup = None,
    program: Program | None = None,
) -> torch.Tensor:
    """out = what every rank has for this one, in rank order. `rows[d]`: rows for rank d; None: equal parts.

    `arriving[s]`, beside `rows` and on all ranks or none: rows that rank s must have for this one, or all ranks are
    told who disagrees.
    """
    on = as_group(group)
    check_tensor("tensor", tensor, on, matrix=True)
    if rows is None and tensor.shape[0] % on.size:
        must = f"a multiple of the {on.size} ranks, or rows given"
        raise InvalidArgument(argument="tensor", was=f"of {tensor.shape[0]} rows", must=must)
    mine = [tensor.shape[0] // on.size] * on.size if rows is None else [int(one) for one in rows]
    if len(mine) != on.size or min(mine) < 0 or sum(mine) != tensor.shape[0]:
        must = f"{on.size} numbers that add up to the {tensor.shape[0]} rows of tensor"
        raise InvalidArgument(argument="rows", was=mine, must=must)
    table = [mine] * on.size
    if rows is not None:  # everybody's, as everybody must run the same number of iterations
        told = [*mine, *(int(one) for one in arriving or ())]
        said = all_gather(torch.tensor(told, dtype=torch.int64, device=on.device), group=on)
        table = [[int(one) for one in row] for row in said.view(on.size, -1)]
        if arriving is not None:
            table = agreed_rows(table)
    width = row_width(tensor)
    result = output(out, tensor, (sum(row[on.rank] for row in table), *tensor.shape[1:]))
    _run("all_to_all", on, tensor, result, [count * width for row in table for count in row], "sum", program)
    return result


def broadcast(
    tensor: torch.Tensor, *, root: int = 0, group: AnyGroup = None, program: Program | None = None
) -> torch.Tensor:
    """tensor = the root's, in place."""
    on = as_group(group)
    check_tensor("tensor", tensor, on)
    check_root(root, on)
    _run("broadcast", on, tensor, tensor, [tensor.numel()], "sum", program, root)
    return tensor


def reduce(
    tensor: torch.Tensor,
    *,
    root: int = 0,
    out: torch.Tensor | None = None,
    op: str = "sum",
    group: AnyGroup = None,
    program: Program | None = None,
) -> torch.Tensor | None:
    """On the root: the sum (or other `op`) of every rank's `tensor`, in a new tensor or `out`. None elsewhere."""
    on = as_group(group)
    check_tensor("tensor", tensor, on)
    check_operation(op, tensor)
    check_root(root, on)
    result = output(out, tensor, tuple(tensor.shape)) if on.rank == root else tensor.new_empty(tensor.shape)
    given, total = (widened(tensor), widened(result)) if op == "avg" and is_narrow(tensor) else (tensor, result)
    _run("reduce", on, given, total, [tensor.numel()], op, program, root)
    if on.rank != root:
        return None
    if op == "avg":
        total.div_(on.size)
    return result if total is result else result.copy_(total)


def gather(
    tensor: torch.Tensor,
    *,
    root: int = 0,
    out: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    group: AnyGroup = None,
    program: Program | None = None,
) -> torch.Tensor | None:
    """On the root: every rank's `tensor`, one after the other. None elsewhere. `rows` as in all_gather."""
    on = as_group(group)
    check_tensor("tensor", tensor, on, matrix=True)
    check_root(root, on)
    counts = rows_of("rows", rows, on.size, tensor.shape[0], on.rank)
    width = row_width(tensor)
    shape = (sum(counts), *tensor.shape[1:])
    result = output(out, tensor, shape) if on.rank == root else tensor.new_empty(0)
    _run("gather", on, tensor, result, [count * width for count in counts], "sum", program, root)
    return result if on.rank == root else None


def scatter(
    tensor: torch.Tensor | None,
    *,
    out: torch.Tensor,
    root: int = 0,
    rows: Sequence[int] | None = None,
    group: AnyGroup = None,
    program: Program | None = None,
) -> torch.Tensor:
    """out = this rank's rows of the root's `tensor`. `rows[r]`: rows of rank r; None: as many as `out` has."""
    on = as_group(group)
    check_tensor("out", out, on, matrix=True)
    check_root(root, on)
    counts = rows_of("rows", rows, on.size, out.shape[0], on.rank)
    width = row_width(out)
    if on.rank == root:
        if tensor is None:
            raise InvalidArgument(argument="tensor", was="None", must="a tensor on the root")
        check_tensor("tensor", tensor, on)
        shape = (sum(counts), *out.shape[1:])
        if tuple(tensor.shape) != shape or tensor.dtype != out.dtype:
            was = f"{list(tensor.shape)} {tensor.dtype}"
            raise InvalidArgument(argument="tensor", was=was, must=f"{list(shape)} {out.dtype}")
    source = tensor if tensor is not None and on.rank == root else out.new_empty(0)
    _run("scatter", on, source, out, [count * width for count in counts], "sum", program, root)
    return out


def _run(
    collective: str,
    on: Group,
    source: torch.Tensor,
    out: torch.Tensor,
    spans: list[int],
    op: str,
    program: Program | None,
    root: int = 0,
) -> None:
    """One checked schedule, on contiguous memory.

    In place only where every rank has a result and all of them see alike whether it is the input: a rank that ran
    another program than the others would never meet them.
    """
    if program is not None:
        check_program(program)
    given, in_place = out, source is out and collective in ("all_reduce", "broadcast")
    at_home = collective == "all_gather" and on.device.type == "cpu" and _is_its_shard(source, out, spans, on.rank)
    source = source.resolve_conj().resolve_neg().contiguous()
    if (
        in_place or not out.is_contiguous() or out.is_conj() or out.is_neg()
    ):  # the bytes of such a view are not its values
        out = source if in_place else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    elif not at_home and _overlap(source, out):
        source = source.clone()
    nbytes = sum(spans) * source.element_size()
    table = tables.of(on) if program is None else None
    where = placement.current() or Placement()
    kind = kind_of(
        collective, tuple(spans), source.dtype, in_place, op, program, root, on.device.type, on.nodes, table, where
    )
    with on.call(collective, kind.shape, kind.plan):
        if nbytes:
            run = executable_of(on, kind)
            if on.device.type == "cuda" and placement.current() is not None:
                # Whoever made them may free them while this stream is still at work.
                for one in (source, out):
                    one.record_stream(torch.cuda.current_stream(on.device))
            try:
                with on.fabric.guarded_call((out,), itself=run.poisons):
                    run.run(source, out, spans, op)
            except BaseException:
                if given is not out:  # nothing will be copied there
                    poison(given)
                raise
    if given is not out:
        given.copy_(out)


def _overlap(source: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory, which they may do without sharing a storage (`from_numpy`)."""
    source_begin, out_begin = source.data_ptr(), out.data_ptr()
    return source_begin < out_begin + out.nbytes and out_begin < source_begin + source.nbytes


def _is_its_shard(source: torch.Tensor, out: torch.Tensor, spans: list[int], rank: int) -> bool:
    """Whether a rank's shard lies in the result where it belongs, as FSDP gives it.

    Then the program for buffers apart is right as it is, whatever form others call it in: it copies the shard to
    itself, and nobody writes there.
    """
    begin = out.data_ptr() + sum(spans[:rank]) * out.element_size()
    return source.is_contiguous() and out.is_contiguous() and source.data_ptr() == begin


def _remember(
    collective: str,
    group: AnyGroup,
    program: Program | None,
    op: str,
    tensor: torch.Tensor,
    on: Group,
    spans: list[int],
) -> None:
    """Next time shorter, where the interpreter of this process runs it and nobody asked for checks at every call."""
    if settings.CHECK.is_on() or tensor.numel() == 0 or on.device.type != "cpu" or placement.current() is not None:
        return
    if not (group is None or isinstance(group, (Group, dist.ProcessGroup))):  # a mesh may equal another one
        return
    what = (collective, group, program, op)
    if repeated.is_known(what, tensor):
        return
    table = tables.of(on) if program is None else None
    kind = kind_of(
        collective, tuple(spans), tensor.dtype, collective == "all_reduce", op, program, 0, on.device.type, on.nodes,
        table, Placement(),
    )  # fmt: skip
    run = on.fabric.kept.get(kind.number)
    if isinstance(run, CpuExecutable):
        words = call_text(on.name, kind.collective, kind.shape, kind.plan)
        repeated.remember(what, tensor, on, run.prepare(tensor.dtype, spans, op, words), spans)


CALLS: dict[str, Callable[..., object]] = {
    "all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_to_all": all_to_all,
    "broadcast": broadcast, "reduce": reduce, "gather": gather, "scatter": scatter,
}  # fmt: skip
