"""The loss of a classifier whose last layer is cut by columns, without the columns of other ranks.

    reference:  y = cross_entropy(concatenation over ranks r of logits_r [M, V_r], target)

| tensor | shape on rank r |
|---|---|
| logits_r | [M, V_r]: its classes, those from v_r on |
| target | [M], the same on all ranks |
| loss | [] (or [M]), in fp32 (fp64), the same on all ranks |

With m the largest logit of a row and s the sum of exp(logit - m) over all V classes:

    loss = log s + m - logit of the target            backward: dlogits_r = (exp(logits_r - m) / s - onehot) dloss

All logits side by side would be the largest tensor of a step ([M, V] of 8192 tokens and 128 K words is 2 GB in bf16),
and each rank would hold it and its gradient. Here a rank sends three numbers of a row (four with label smoothing): the
largest logit, and then sums. Nothing moves in the backward pass, which computes the shares again from the logits. Sums
and the loss are in fp32, or fp64 for fp64, of some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .. import settings
from ..collective.operators import all_reduce
from ..errors import InvalidArgument
from ..fabric.registry import named
from ..ops.differentiable import name_of
from ..ops.operands import check_dtype
from .sharded import Cut

if TYPE_CHECKING:
    from .sharded import AnyGroup

REDUCTIONS = ("mean", "sum", "none")
_AT_ONCE = 1 << 24  # numbers of a shard that are held in the wider type


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    classes: int,
    *,
    unit: int = 1,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    group: AnyGroup = None,
) -> torch.Tensor:
    """As torch.nn.functional.cross_entropy, of this rank's columns `logits` [M, V_r] of all `classes`.

    Columns are cut as `ColumnParallelLinear(..., classes, unit=unit)` cuts them. Rows whose `target` is `ignore_index`
    count nothing.
    """
    name = name_of(group)
    if reduction not in REDUCTIONS:
        raise InvalidArgument(argument="reduction", was=repr(reduction), must=f"one of {', '.join(REDUCTIONS)}")
    if not 0 <= label_smoothing <= 1:
        raise InvalidArgument(argument="label_smoothing", was=label_smoothing, must="between 0 and 1")
    check_dtype("logits", logits.dtype)
    rank, ranks, device = _place(name)
    if logits.device != device:
        raise InvalidArgument(argument="logits", was=f"on {logits.device}", must=f"on {device}")
    first, end = Cut.of("classes", 0, (classes,), (unit,), ranks).bounds(0, rank)
    if logits.dim() != 2 or logits.shape[1] != end - first:
        must = f"[M, {end - first}], this rank's columns; flatten(0, 1) joins dimensions of rows"
        raise InvalidArgument(argument="logits", was=f"of shape {list(logits.shape)}", must=must)
    if target.dtype != torch.int64 or target.shape != logits.shape[:1] or target.device != logits.device:
        was = f"{list(target.shape)} {target.dtype} on {target.device}"
        must = f"{list(logits.shape[:1])} torch.int64 on {logits.device}"
        raise InvalidArgument(argument="target", was=was, must=must)
    counts = target != ignore_index
    if not torch.compiler.is_compiling() and (target.device.type == "cpu" or settings.CHECK.is_on()):
        _check(target, counts, classes)
    # Rows that count nothing have the first class for a target, so that none is beyond all.
    losses, _, _ = _losses(logits, torch.where(counts, target, 0), first, classes, label_smoothing, name)
    losses = torch.where(counts, losses, 0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / counts.sum() if reduction == "mean" else total


def _place(group: str) -> tuple[int, int, torch.device]:
    """This rank's number, how many there are, and this one's device."""
    on = named(group)
    return on.rank, on.size, on.device


_place._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in `differentiable.py`


def _check(target: torch.Tensor, counts: torch.Tensor, classes: int) -> None:
    """What needs a look at the numbers. The same on all ranks, so all refuse or none."""
    wrong = torch.nonzero(counts & ((target < 0) | (target >= classes)))
    if len(wrong):
        where = int(wrong[0])
        must = f"between 0 and {classes - 1}, or the ignore_index"
        raise InvalidArgument(argument=f"target[{where}]", was=int(target[where]), must=must)


@torch.library.custom_op("undertow::cross_entropy", mutates_args=())
def _losses(
    logits: torch.Tensor, target: torch.Tensor, first: int, classes: int, smoothing: float, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every row: the loss, m and log s. These two stay apart, as their sum would be rounded to what m is like."""
    on, wide = named(group), _wide(logits)
    most = all_reduce(logits.amax(1).to(wide), op="max", group=on)
    sums = torch.empty(3 if smoothing else 2, logits.shape[0], dtype=wide, device=logits.device)
    for rows in _blocks(logits):
        above = logits[rows].to(wide) - most[rows, None]
        column, mine = _column(target[rows], first, logits.shape[1], classes)
        sums[1, rows] = above.gather(1, column[:, None])[:, 0].masked_fill(~mine, 0)
        if smoothing:
            sums[2, rows] = above.sum(1)
        sums[0, rows] = above.exp_().sum(1)
    all_reduce(sums, group=on)
    log = sums[0].log()
    losses = log - (1 - smoothing) * sums[1]
    if smoothing:
        losses -= smoothing / classes * sums[2]
    return losses, most, log


def _shares(
    dlosses: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, most: torch.Tensor, log: torch.Tensor,
    first: int, classes: int, smoothing: float,
) -> torch.Tensor:  # fmt: skip
    """dlogits_r = (shares - (1 - smoothing) onehot - smoothing / V) dloss."""
    made = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for rows in _blocks(logits):
        share = (logits[rows].to(log.dtype) - most[rows, None]).sub_(log[rows, None]).exp_()
        column, mine = _column(target[rows], first, logits.shape[1], classes)
        share.scatter_add_(1, column[:, None], (mine * (smoothing - 1.0)).to(share.dtype)[:, None])
        made[rows] = share.sub_(smoothing / classes).mul_(dlosses[rows, None])
    return made


_gradient = torch.library.custom_op("undertow::cross_entropy_backward", _shares, mutates_args=())


def _wide(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Rows that are worked on together."""
    step = max(1, _AT_ONCE // logits.shape[1])
    return (slice(begin, begin + step) for begin in range(0, logits.shape[0], step))


def _column(target: torch.Tensor, first: int, held: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in a shard each row's target is, and whether it is there at all.

    A class that no rank has is beyond every shard: where nobody looked at the numbers all ranks fail alike.
    """
    here = target - first
    mine = (here >= 0) & (here < held)
    known = (target >= 0) & (target < classes)
    return torch.where(mine, here, torch.where(known, 0, held)), mine


def _like_losses(
    logits: torch.Tensor, target: torch.Tensor, first: int, classes: int, smoothing: float, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    one = logits.new_empty(logits.shape[0], dtype=_wide(logits))
    return one, torch.empty_like(one), torch.empty_like(one)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    logits, target, ctx.first, ctx.classes, ctx.smoothing, _ = inputs
    ctx.save_for_backward(logits, target, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dlosses: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    logits, target, most, log = ctx.saved_tensors
    return _gradient(dlosses, logits, target, most, log, ctx.first, ctx.classes, ctx.smoothing), *(None,) * 5


_losses.register_fake(_like_losses)
_losses.register_autograd(_backward, setup_context=_setup)
_gradient.register_fake(lambda dlosses, logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format))
