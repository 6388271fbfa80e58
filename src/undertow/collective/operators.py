"""Collectives as calls: what a user of torch.distributed expects, run by checked schedules.

| call | tensor | result |
|---|---|---|
| all_reduce | [...] on every rank | the sum over ranks, in place unless `out` is given |
| all_gather | [rows_r, ...] | [sum of rows_r, ...], shards in rank order |
| reduce_scatter | [rows, ...] | the rank's shard of the sum; shards by torch.tensor_split |
| all_to_all | [sum over d of rows for d, ...] | [sum over s of rows from s, ...] |
| broadcast | [...] | the root's, in place |
| reduce | [...] | the sum on the root, None elsewhere |
| gather | [rows_r, ...] | all shards on the root, None elsewhere |
| scatter | [rows, ...] on the root, None elsewhere | the rank's shard |

Every call is collective: all ranks of the group make it, in the same order, with matching shapes.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist

from .. import settings
from ..errors import InvalidArgument
from ..fabric import placement
from ..fabric.flight_writer import call_text
from ..fabric.group import Group
from ..fabric.placement import Placement
from ..fabric.registry import as_group
from ..plan.plan import split
from . import repeated, tables
from .algorithms import LIBRARY
from .copies import Copies
from .cpu_runtime import CpuExecutable
from .language import Program
from .runtime import Executable, executable
from .selection import Choice, choose
from .tables import Table
from .topology import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    AnyGroup = Group | dist.ProcessGroup | DeviceMesh | None

OPERATIONS = ("sum", "avg", "max", "min")
REDUCIBLE = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)  # fmt: skip


def all_reduce(
    tensor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    op: str = "sum",
    group: AnyGroup = None,
    program: Program | None = None,
) -> torch.Tensor:
    """out = the sum (or other `op`) of every rank's `tensor`; in place unless `out` is given."""
    if (out is None or out is tensor) and placement.current() is None:
        known = repeated.find("all_reduce", group, program, op, tensor)
        if known is not None and known.run(tensor, tensor):
            return tensor
    on = as_group(group)
    _check_tensor("tensor", tensor, on)
    _check_operation(op, tensor)
    result = tensor if out is None else _checked_out(out, tensor, tuple(tensor.shape))
    if op == "avg" and _is_narrow(tensor):
        wide = _wide(tensor)
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
    if out is not None and rows is None and tensor.dim() == 1 and placement.current() is None:
        known = repeated.find("all_gather", group, program, "sum", tensor)
        if known is not None and known.run(tensor, out):
            return out
    on = as_group(group)
    _check_tensor("tensor", tensor, on)
    shaped = tensor if tensor.dim() else tensor.reshape(1)
    counts = _rows("rows", rows, on.size, shaped.shape[0], on.rank)
    width = _width(shaped)
    result = _output(out, tensor, (sum(counts), *shaped.shape[1:]))
    spans = [count * width for count in counts]
    _run("all_gather", on, shaped, result, spans, "sum", program)
    if rows is None and tensor.dim() == 1:
        _remember("all_gather", group, program, "sum", tensor, on, spans)
    return result


def reduce_scatter(
    tensor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    op: str = "sum",
    group: AnyGroup = None,
    program: Program | None = None,
) -> torch.Tensor:
    """out = this rank's rows of the sum (or other `op`) of every rank's `tensor`; rows by torch.tensor_split."""
    if out is not None and tensor.dim() == 1 and placement.current() is None:
        known = repeated.find("reduce_scatter", group, program, op, tensor)
        if known is not None and known.run(tensor, out):
            return out.div_(known.ranks) if op == "avg" else out
    on = as_group(group)
    _check_tensor("tensor", tensor, on, matrix=True)
    _check_operation(op, tensor)
    shards = split(tensor.shape[0], on.size)
    start, stop = shards[on.rank]
    width = _width(tensor)
    result = _output(out, tensor, (stop - start, *tensor.shape[1:]))
    given, total = (_wide(tensor), _wide(result)) if op == "avg" and _is_narrow(tensor) else (tensor, result)
    spans = [(end - begin) * width for begin, end in shards]
    _run("reduce_scatter", on, given, total, spans, op, program)
    if op == "avg":
        total.div_(on.size)
    if total is not result:
        return result.copy_(total)
    if tensor.dim() == 1 and len(set(spans)) == 1:
        _remember("reduce_scatter", group, program, op, tensor, on, spans)
    return result


def all_to_all(
    tensor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    group: AnyGroup = None,
    program: Program | None = None,
) -> torch.Tensor:
    """out = what every rank has for this one, in rank order. `rows[d]`: rows for rank d; None: equal parts."""
    on = as_group(group)
    _check_tensor("tensor", tensor, on, matrix=True)
    if rows is None and tensor.shape[0] % on.size:
        must = f"a multiple of the {on.size} ranks, or rows given"
        raise InvalidArgument(argument="tensor", was=f"of {tensor.shape[0]} rows", must=must)
    mine = [tensor.shape[0] // on.size] * on.size if rows is None else [int(one) for one in rows]
    if len(mine) != on.size or min(mine) < 0 or sum(mine) != tensor.shape[0]:
        must = f"{on.size} numbers that add up to the {tensor.shape[0]} rows of tensor"
        raise InvalidArgument(argument="rows", was=mine, must=must)
    table = [mine] * on.size
    if rows is not None:  # everybody's, as everybody must run the same number of iterations
        said = all_gather(torch.tensor(mine, dtype=torch.int64, device=on.device), group=on)
        table = [[int(one) for one in row] for row in said.view(on.size, on.size)]
    width = _width(tensor)
    result = _output(out, tensor, (sum(row[on.rank] for row in table), *tensor.shape[1:]))
    _run("all_to_all", on, tensor, result, [count * width for row in table for count in row], "sum", program)
    return result


def broadcast(
    tensor: torch.Tensor, *, root: int = 0, group: AnyGroup = None, program: Program | None = None
) -> torch.Tensor:
    """tensor = the root's, in place."""
    on = as_group(group)
    _check_tensor("tensor", tensor, on)
    _check_root(root, on)
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
    _check_tensor("tensor", tensor, on)
    _check_operation(op, tensor)
    _check_root(root, on)
    result = _output(out, tensor, tuple(tensor.shape)) if on.rank == root else tensor.new_empty(tensor.shape)
    given, total = (_wide(tensor), _wide(result)) if op == "avg" and _is_narrow(tensor) else (tensor, result)
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
    _check_tensor("tensor", tensor, on, matrix=True)
    _check_root(root, on)
    counts = _rows("rows", rows, on.size, tensor.shape[0], on.rank)
    width = _width(tensor)
    shape = (sum(counts), *tensor.shape[1:])
    result = _output(out, tensor, shape) if on.rank == root else tensor.new_empty(0)
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
    _check_tensor("out", out, on, matrix=True)
    _check_root(root, on)
    counts = _rows("rows", rows, on.size, out.shape[0], on.rank)
    width = _width(out)
    if on.rank == root:
        if tensor is None:
            raise InvalidArgument(argument="tensor", was="None", must="a tensor on the root")
        _check_tensor("tensor", tensor, on)
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
    given, in_place = out, source is out and collective in ("all_reduce", "broadcast")
    at_home = collective == "all_gather" and on.device.type == "cpu" and _is_its_shard(source, out, spans, on.rank)
    if not (in_place or at_home) and source.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
        source = source.clone()
    source = source.resolve_conj().resolve_neg().contiguous()
    if (
        in_place or not out.is_contiguous() or out.is_conj() or out.is_neg()
    ):  # the bytes of such a view are not its values
        out = source if in_place else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    nbytes = sum(spans) * source.element_size()
    table = tables.of(on) if program is None else None
    where = placement.current() or Placement()
    kind = _kind(
        collective, tuple(spans), source.dtype, in_place, op, program, root, on.device.type, on.nodes, table, where
    )
    with on.call(collective, kind.shape, kind.plan):
        if nbytes:
            run = _executable(on, kind)
            if on.device.type == "cuda" and placement.current() is not None:
                # Whoever made them may free them while this stream is still at work.
                for one in (source, out):
                    one.record_stream(torch.cuda.current_stream(on.device))
            with on.fabric.guarded_call((out,), itself=run.poisons):
                run.run(source, out, spans, op)
    if given is not out:
        given.copy_(out)


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
    known = repeated.find(collective, group, program, op, tensor)
    if known is not None and not known.over:
        return
    table = tables.of(on) if program is None else None
    kind = _kind(
        collective, tuple(spans), tensor.dtype, collective == "all_reduce", op, program, 0, on.device.type, on.nodes,
        table, Placement(),
    )  # fmt: skip
    run = on.fabric.kept.get(kind.number)
    if isinstance(run, CpuExecutable):
        words = call_text(on.name, kind.collective, kind.shape, kind.plan)
        repeated.remember(
            (collective, group, program, op), tensor, on, run.prepare(tensor.dtype, spans, op, words), spans
        )


class _Kind(NamedTuple):
    """Calls that are alike: the program they run, the words for their flight records, and their executable's number."""

    collective: str
    program: Program
    choice: Choice
    in_place: bool
    root: int
    shape: str
    plan: str
    number: int
    lane: str | None = None
    ctas: int | None = None
    copies: bool = False  # by `Copies`, without the program


_numbers: dict[tuple[object, ...], int] = {}
_numbers_lock = threading.Lock()


@functools.lru_cache(maxsize=1024)
def _kind(
    collective: str,
    spans: tuple[int, ...],
    dtype: torch.dtype,
    in_place: bool,
    op: str,
    program: Program | None,
    root: int,
    device: str,
    nodes: list[int] | tuple[int, ...],
    table: Table | None,
    where: Placement,
) -> _Kind:
    """The words say all that ranks must agree on: they compare them, and one that means something else is told so."""
    nbytes = sum(spans) * dtype.itemsize
    choice = choose(collective, nbytes, device, Topology(tuple(nodes)))
    chosen = LIBRARY[choice.program] if program is None else program
    measured = table.find(collective, nbytes) if table is not None else None
    if measured is not None:
        choice, chosen = measured
    copies = where.lane in ("dma", "net") and program is None
    if where.ctas is not None and not copies:
        choice = replace(choice, instances=max(1, min(choice.instances, where.ctas // choice.workers)))
    lane = where.lane if where.lane in ("dma", "net") else None
    key: tuple[object, ...] = (chosen, replace(choice, up_to=0), in_place, root)
    if lane is not None:
        key = (collective, root, lane, where.ctas) if copies else (*key, lane)
    with _numbers_lock:
        number = _numbers.setdefault(key, len(_numbers))
    cut = zlib.crc32(repr(spans).encode())
    shape = f"{nbytes} bytes cut {cut:08x}, {str(dtype).removeprefix('torch.')}, {'in place' if in_place else 'apart'}"
    # Gloo ends a process whose messages differ from what it expects, so there ranks compare more often.
    wire = ":net" if len(set(nodes)) > 1 or lane == "net" else ""
    plan = f"{'copies' if copies else f'{chosen.name} {chosen.signature}'} {op} to {root}{wire}"
    if where != Placement():
        plan += f" over {where.lane} by {where.ctas} CTAs"
    ctas = where.ctas if copies else None
    return _Kind(collective, chosen, choice, in_place, root, shape, plan, number, lane, ctas, copies)


def _executable(on: Group, kind: _Kind) -> Executable:
    fabric = on.fabric
    found = cast("Executable | None", fabric.kept.get(kind.number))
    if found is None and kind.copies:
        assert kind.lane is not None
        made = Copies(fabric, kind.lane, kind.collective, kind.root, kind.ctas)
        fabric.kept[kind.number] = found = cast("Executable", made)  # all but a schedule, which nobody asks it for
    if found is None:
        if kind.program.collective != kind.collective:
            was, must = f"{kind.program.name}, for {kind.program.collective}", f"a program for {kind.collective}"
            raise InvalidArgument(argument="program", was=was, must=must)
        choice = kind.choice
        instances = choice.instances
        if on.device.type == "cuda":  # every CTA must have a multiprocessor, on every rank
            seen = on.exchange(fabric.multiprocessors, "multiprocessors")
            instances = max(1, min(instances, min(seen) // choice.workers))
        schedule = kind.program.compile(
            topology=Topology.of(on.nodes), root=kind.root, in_place=kind.in_place, target="staged",
            slots=choice.slots, depth=choice.depth, workers=choice.workers, instances=instances,
            packets=choice.packets,
        )  # fmt: skip
        found = fabric.kept[kind.number] = executable(
            fabric, schedule, choice.stride if kind.lane is None else None, lane=kind.lane or "peer"
        )
    return found


def _width(tensor: torch.Tensor) -> int:
    """Elements of a row."""
    return tensor[0].numel() if tensor.shape[0] else int(torch.empty(tensor.shape[1:], device="meta").numel())


def _is_narrow(tensor: torch.Tensor) -> bool:
    """Whether a sum of many could overflow, or be rounded before it is divided, where its average is wanted."""
    return tensor.dtype.itemsize < torch.float32.itemsize


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in which it cannot."""
    return tensor.to(torch.float32, copy=True)


def _output(out: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return like.new_empty(shape) if out is None else _checked_out(out, like, shape)


def _checked_out(out: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(out.shape) != shape or out.dtype != like.dtype or out.device != like.device:
        was = f"{list(out.shape)} {out.dtype} on {out.device}"
        raise InvalidArgument(argument="out", was=was, must=f"{list(shape)} {like.dtype} on {like.device}")
    return out


def _rows(name: str, rows: Sequence[int] | None, size: int, own: int, rank: int) -> list[int]:
    counts = [own] * size if rows is None else [int(one) for one in rows]
    if len(counts) != size or min(counts) < 0 or counts[rank] != own:
        must = f"{size} numbers, the one of rank {rank} being {own}"
        raise InvalidArgument(argument=name, was=counts, must=must)
    return counts


def _check_root(root: int, on: Group) -> None:
    if not 0 <= root < on.size:
        raise InvalidArgument(argument="root", was=root, must=f"between 0 and {on.size - 1}")


def _check_operation(op: str, tensor: torch.Tensor) -> None:
    if op not in OPERATIONS:
        raise InvalidArgument(argument="op", was=repr(op), must=f"one of {', '.join(OPERATIONS)}")
    if op == "avg" and not tensor.is_floating_point():
        raise InvalidArgument(argument="op", was="'avg'", must=f"sum, max or min for {tensor.dtype}")
    if tensor.dtype not in REDUCIBLE:
        must = ", ".join(str(one).removeprefix("torch.") for one in REDUCIBLE)
        raise InvalidArgument(argument="tensor", was=f"of {tensor.dtype}", must=f"one of {must} to be reduced")


def _check_tensor(name: str, tensor: torch.Tensor, on: Group, matrix: bool = False) -> None:
    if tensor.device != on.device:
        raise InvalidArgument(argument=name, was=f"on {tensor.device}", must=f"on {on.device}")
    if tensor.requires_grad and torch.is_grad_enabled():
        must = "detached, or the call under torch.no_grad(): collectives have no backward yet"
        raise InvalidArgument(argument=name, was="a tensor that requires a gradient", must=must)
    if matrix and tensor.dim() == 0:
        raise InvalidArgument(argument=name, was="a single number", must="a tensor of rows")


CALLS: dict[str, Callable[..., object]] = {
    "all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_to_all": all_to_all,
    "broadcast": broadcast, "reduce": reduce, "gather": gather, "scatter": scatter,
}  # fmt: skip
