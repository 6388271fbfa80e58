"""Calls that were made before, made again without looking everything up anew: one compiled call on the CPU.

Kept by what a call and its tensors tell at a glance. Whether the tensors fit is seen here, call by call; what does not
goes the long way, to the same executable, so that ranks may take different ways at one call.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..fabric import timeline
from .cpu_interpreter import DONE, perform

if TYPE_CHECKING:
    from ..fabric.group import Group
    from .cpu_runtime import Prepared
    from .language import Program

_MOST = 1024  # kinds of calls: sizes may differ from call to call


class Repeated:
    """A kind of call that has run before."""

    __slots__ = ("_complex", "_elements", "_group", "_prepared", "_shard", "ranks")

    def __init__(self, group: Group, prepared: Prepared, dtype: torch.dtype, elements: int, shard: int | None) -> None:
        """`elements`: of the result; `shard`: bytes from its beginning to where the input may lie in it, or None."""
        self._group, self._prepared, self._elements, self._shard = group, prepared, elements, shard
        self._complex = dtype.is_complex  # only such tensors can be conjugated views
        self.ranks = group.size

    def run(self, tensor: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether it could be done this way."""
        group = self._group
        if group.reserved or timeline.current() is not None or not (tensor.is_cpu and tensor.is_contiguous()):
            return False
        if tensor.requires_grad or tensor.is_neg() or (self._complex and tensor.is_conj()):
            return False
        source = target = tensor.data_ptr()
        if out is not tensor:
            if not (out.is_cpu and out.is_contiguous() and out.dim() == 1 and out.numel() == self._elements):
                return False
            if out.dtype != tensor.dtype or out.requires_grad or out.is_neg() or (self._complex and out.is_conj()):
                return False
            target = out.data_ptr()
            apart = target >= source + tensor.nbytes or source >= target + out.nbytes
            if not apart and source - target != self._shard:
                return False
        with group.lock:
            if group.closed or group.failed:  # a closed one has given its memory back
                return False
            group.calls += 1
            try:  # what the two brackets of the long way do, at no cost where nothing fails
                if perform(self._prepared.frame, source, target, group.calls) != DONE:
                    self._prepared.complete()
            except BaseException:
                with group.fabric.guarded_call((out,)), self._prepared.whole():
                    raise
        return True

    @property
    def over(self) -> bool:
        return self._group.closed or self._group.failed


_known: dict[tuple[object, ...], Repeated] = {}
_remembering = threading.Lock()  # calls of different groups may come from different threads


def find(collective: str, group: object, program: Program | None, op: str, tensor: torch.Tensor) -> Repeated | None:
    """The same call with as many elements, if one was remembered."""
    return _known.get((collective, group or dist.group.WORLD, program, op, tensor.dtype, tensor.numel()))


def remember(
    what: tuple[str, object, Program | None, str],
    tensor: torch.Tensor,
    on: Group,
    prepared: Prepared,
    spans: list[int],
) -> None:
    """`what`: the first arguments of `find`. All `spans` are equally long, so that a call's own tensors tell that they
    fit."""
    collective, group, program, op = what
    elements = spans[0] if collective == "reduce_scatter" else sum(spans)
    shard = on.rank * tensor.nbytes if collective == "all_gather" else None
    key = (collective, group or dist.group.WORLD, program, op, tensor.dtype, tensor.numel())
    with _remembering:
        for dead in [one for one, known in _known.items() if known.over]:
            del _known[dead]
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = Repeated(on, prepared, tensor.dtype, elements, shard)
