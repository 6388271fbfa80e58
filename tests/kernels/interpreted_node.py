"""Ranks in one process for launches by Triton's interpreter: operands, stages and kernels are real, the rest is not.

Not real are signals (`interpreted_tokens.py`), streams and the driver. Ranks come one after the other and wait for
nobody, so every call is made twice with the same number: the first time for what it sends, the second for what it
finds; where sums of what was found are sent, once more. What is replaced is replaced when this is imported.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

_open: Any = ctypes.CDLL


class _NoDriver:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0


ctypes.CDLL = lambda name, *rest, **more: (  # type: ignore[misc,assignment]
    _NoDriver() if "libcuda" in str(name) else _open(name, *rest, **more)
)

import interpreted_tokens as parts  # noqa: E402 - its replacements of signals hold here, too

from undertow.fabric.cuda import CudaFabric  # noqa: E402
from undertow.kernels import ahead, fused_columns, fused_decode  # noqa: E402
from undertow.ops import fused_cuda, fused_few, tokens_cuda  # noqa: E402
from undertow.ops.fused_stage import Stage  # noqa: E402
from undertow.plan import fused  # noqa: E402

CTAS = 3
HALF = torch.float16


class Node:
    """Ranks that share this process's memory."""

    def __init__(self, ranks: int, bulk: bool, together: bool = False) -> None:
        self.ranks, self.bulk, self.together, self.stages = ranks, bulk, together, dict[Any, list[Stage]]()
        parts.BULK[0] = bulk

    def fabric(self, rank: int) -> Any:
        made = object.__new__(CudaFabric)
        made.group = types.SimpleNamespace(rank=rank, size=self.ranks, deadline=1.0, device=torch.device("cpu"))
        made.device, made.multiprocessors, made.bulk_copies = made.group.device, CTAS, self.bulk
        made.guard = types.SimpleNamespace(  # type: ignore[assignment]
            abort=parts.NOBODY, error=parts.NOBODY, poisons_itself=lambda: None
        )
        made.node, made.together = self, self.together  # type: ignore[attr-defined]
        return made

    def stage(self, fabric: Any, kind: Any, elements: int, lines: int, dtype: torch.dtype, unit: int = 8) -> Stage:
        if kind not in self.stages:
            half = -(-elements // (8 * unit)) * 8 * unit
            lines += lines % 2
            poison = float("nan") if dtype.is_floating_point else -1
            whole = torch.full((self.ranks, 2 * half), poison, dtype=dtype)
            data = list(whole)
            words = [torch.zeros((lines + CTAS) * fused.LINE, dtype=torch.int32) for _ in range(self.ranks)]
            # What is pulled is written where it is read: side by side, not through each rank's own mapping.
            pulled = kind[0] == "pulled" and not kind[-1]
            mapped = [torch.full_like(one, poison) for one in data] if pulled else data
            bases = parts.addresses(mapped), parts.addresses(words)
            self.stages[kind] = [
                Stage(_buffer(data, rank), half, _buffer(words, rank), lines, *(_counters() for _ in range(3)), *bases)
                for rank in range(self.ranks)
            ]
            for stage in self.stages[kind]:
                stage.described["side by side"], stage.described["mapped"] = whole, mapped
        return self.stages[kind][fabric.group.rank]

    def run(self, call: Callable[[Any, int], Callable[[], None]], times: int = 2) -> None:
        """Every rank's call, so many times with the same number."""
        for again in range(times):
            for rank in range(self.ranks):
                call(self.fabric(rank), rank)()
            if again + 1 < times:  # only what this call counts: the other counter is for the kernel to clear
                for stages in self.stages.values():
                    for stage in stages:
                        stage.taken[int(stage.epochs[0]) % 2 * fused.LINE] = 0
                        stage.epochs -= 1


def _counters() -> torch.Tensor:
    return torch.zeros(2 * fused.LINE, dtype=torch.int32)


def _buffer(tensors: list[torch.Tensor], rank: int) -> Any:
    return types.SimpleNamespace(local=tensors[rank], peer=lambda one: tensors[one])


@triton.jit
def sent(pointers, data, flag, wanted):
    tl.store(pointers, (data.to(tl.int64) & 0xFFFFFFFF) | (flag.to(tl.int64) << 32), mask=wanted)


def settled(pointers: Any, wanted: Any, flag: Any, watch: Any) -> Any:
    """Packets of another number, or that are not wanted, are not numbers."""
    found = []
    for at, one in enumerate(pointers):
        here = (wanted >> at) & 1 != 0
        word = tl.load(one, mask=here, other=0)
        found.append(tl.where(here & ((word >> 32).to(tl.int32) == flag), word.to(tl.int32), 0x7E007E00))
    return *found, tl.zeros_like(wanted)


fused_decode.send, fused_decode.settle = sent, settled  # type: ignore
for _name, _other in (("tell", parts.told), ("signal_wait_all", parts.no_wait), ("has_bulk_copies", parts.bulk_copies)):
    setattr(fused_columns, _name, _other)
ASKED: list[tuple[int, int]] = []  # addresses and bytes


def asked(pointers: Any, nbytes: Any) -> None:
    ASKED.extend((int(one), int(size)) for one, size in zip(pointers.handle.data, nbytes.handle.data, strict=True))


@triton.jit
def said(word_bases, offset, epoch, RANKS: tl.constexpr, LANES: tl.constexpr):
    for one in range(RANKS):
        tl.store(tl.load(word_bases + one).to(tl.pointer_type(tl.int32)) + offset, epoch)


ahead.ask, ahead.gdc_wait, ahead.gdc_launch_dependents = asked, parts.no_fence, parts.no_fence  # type: ignore[assignment]
fused_columns.say_running = said  # type: ignore[attr-defined]
for _module in (fused_cuda, fused_few, tokens_cuda):
    _module.stage_of = lambda fabric, *rest, **more: fabric.node.stage(fabric, *rest, **more)  # type: ignore[attr-defined]
    _module.device_table = lambda fabric, key, make: parts.table(make())  # type: ignore[attr-defined]
    _module.load = lambda *arguments: None  # type: ignore[attr-defined]
Stage.follow = Stage.enqueued = lambda self, fabric: None  # type: ignore[method-assign,assignment]
Stage.side_by_side = lambda self, fabric: self.described["side by side"]  # type: ignore[method-assign]


def made(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=HALF)


def wide(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one.float() for one in tensors]
