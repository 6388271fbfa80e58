"""One transformer layer, forward and backward, sequence parallel, against its serial forms.

    PYTHONPATH=src python bench/layer.py
    PYTHONPATH=src python bench/layer.py --device cuda --ranks 4

    overlapped   every operator by the strategy named: gathers and scatters beneath their matmuls, in both passes
    serial       the same operators, each communication after or before its whole matmul, over the same lane
    Megatron     the layer as it is commonly written: an autograd function for the gather and one for the scatter around
                 plain matmuls, gathered again in the backward pass; over the same lane

On a CPU the link is emulated (lane dma, paced so that all that moves takes about as long as all that is computed), as
its own copies would take the core that computes; `auto` is left out, as it might choose a lane that is not paced. On a
GPU it is peer memory, a layer of Llama-3 8B in bf16, device time, and Megatron's communication is this library's own
all_gather and reduce_scatter. All variants are interleaved; ratios are paired by round, with 95% intervals. Gradients
are compared with those of Megatron's form in fp32 (on a CPU fp64).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from layer_report import report

import undertow as ut
from undertow.collective.carry import Carrier
from undertow.fabric.timer import Comparison, compare

PACE = "100MB/s,20us"
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class Size:
    hidden: int
    inner: int
    heads: int
    rows: int
    dtype: torch.dtype
    strategies: tuple[str, ...]


SIZES = {
    "cpu": Size(512, 1408, 8, 1024, torch.float32, ("serial:dma", "chunked:dma", "signaled:dma")),
    "cuda": Size(4096, 14336, 32, 4096, torch.bfloat16, ("serial:peer", "fused:peer", "auto")),
}


class Layer(torch.nn.Module):
    """Attention and a gated feed-forward block, each after a norm, each added to what came in."""

    def __init__(self, size: Size, strategy: str, device: torch.device) -> None:
        super().__init__()
        self.unit = size.hidden // size.heads
        place: dict[str, Any] = {"device": device, "dtype": size.dtype}
        options: dict[str, Any] = {"bias": False, "sequence_parallel": True, "strategy": strategy, **place}
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(size.hidden, **place) for _ in range(2))
        self.qkv = ut.nn.ColumnParallelLinear(size.hidden, (size.hidden,) * 3, unit=self.unit, **options)
        self.out = ut.nn.RowParallelLinear(size.hidden, size.hidden, unit=self.unit, **options)
        self.mlp = ut.nn.TensorParallelMLP(size.hidden, size.inner, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(_attention(*self.qkv(self.norms[0](x)), self.unit))
        return x + self.mlp(self.norms[1](x))


class Megatron(torch.nn.Module):
    """The same with the weights of `layer`, as communication functions around plain matmuls."""

    def __init__(self, layer: Layer, group: ut.Group) -> None:
        super().__init__()
        self.layer, self.group = layer, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        both = _linear(layer.norms[0](x), layer.qkv.weight, self.group)
        q, k, v = both.split(layer.qkv.cut.sizes(self.group.rank), -1)
        x = x + _Scatter.apply(_attention(q, k, v, layer.unit) @ layer.out.weight.t(), self.group)
        gate, up = _linear(layer.norms[1](x), layer.mlp.up.weight, self.group).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        return x + _Scatter.apply(hidden @ layer.mlp.down.weight.t(), self.group)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int) -> torch.Tensor:
    heads = [one.reshape(1, one.shape[0], -1, width).transpose(1, 2) for one in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    return y.transpose(1, 2).reshape(q.shape[0], -1)


def _linear(x: torch.Tensor, weight: torch.Tensor, group: ut.Group) -> torch.Tensor:
    return _GatherLinear.apply(x, weight, group)  # type: ignore[no-any-return,no-untyped-call]


def _gather(x: torch.Tensor, group: ut.Group) -> torch.Tensor:
    """Equal shards, all of them before anything follows; on a CPU over lane dma."""
    if x.is_cuda:
        return ut.collective.all_gather(x.contiguous(), group=group)
    whole = x.new_empty(x.shape[0] * group.size, x.shape[1])
    parts = whole.chunk(group.size)
    parts[group.rank].copy_(x)
    lane = group.fabric.lane("dma")
    carrier = Carrier(group.fabric, lane, x, x.numel())
    carrier.send(0, [x.contiguous().view(-1)] * group.size)
    carrier.receive(0, [one.view(-1) for one in parts])
    lane.flush()
    return whole


def _scatter(y: torch.Tensor, group: ut.Group) -> torch.Tensor:
    """This rank's rows of the sum; on a CPU over lane dma."""
    if y.is_cuda:
        return ut.collective.reduce_scatter(y.contiguous(), group=group)
    lane, rows = group.fabric.lane("dma"), y.contiguous().chunk(group.size)
    carrier = Carrier(group.fabric, lane, y, rows[0].numel())
    carrier.give(0, [one.view(-1) for one in rows])
    mine = rows[group.rank].view(-1)
    total = torch.empty_like(mine)
    carrier.reduce(0, mine, lambda parts: torch.add(parts[0], parts[1], out=total))
    lane.flush()
    return total.view(-1, y.shape[1])


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: ut.Group) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return _gather(x, group) @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return _scatter(dy @ weight, ctx.group), dy.t() @ _gather(x, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: ut.Group) -> torch.Tensor:
        ctx.group = group
        return _scatter(y, group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _gather(dy, ctx.group), None


def measure(rounds: int) -> tuple[Comparison, dict[str, float]]:
    """The comparison, and of each variant the largest difference of a gradient from that of Megatron's form in twice as
    wide a type, relative to the largest element there."""
    group = ut.init()
    size = SIZES[group.device.type]
    torch.manual_seed(0)
    layers = {strategy: Layer(size, strategy, group.device) for strategy in size.strategies}
    first = layers[size.strategies[0]]
    for layer in layers.values():
        layer.load_state_dict(first.state_dict())
    modules: dict[str, torch.nn.Module] = {"Megatron": Megatron(first, group), **layers}
    chance = torch.Generator().manual_seed(group.rank)
    x = torch.randn(size.rows // group.size, size.hidden, generator=chance).to(group.device, size.dtype)

    def step(module: torch.nn.Module, dtype: torch.dtype = size.dtype) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            given = x.to(dtype, copy=True).requires_grad_()
            module(given).square().sum().backward()
            assert given.grad is not None
            return given.grad

        return run

    variants = {name: step(module) for name, module in modules.items()}
    wide = WIDER[size.dtype]

    def gradients(module: torch.nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        module.zero_grad()
        return [one.to(wide) for one in (run(), *(w.grad for w in module.parameters() if w.grad is not None))]

    exact = Megatron(copy.deepcopy(first).to(wide), group)
    wanted = gradients(exact, step(exact, wide))
    apart = {
        name: max(
            float((one - other).abs().max() / other.abs().max())
            for one, other in zip(gradients(modules[name], run), wanted, strict=True)
        )
        for name, run in variants.items()
    }
    del exact, wanted
    calls = 4 if group.device.type == "cuda" else None  # the hosts run ahead of the GPU
    found = compare(variants, repeats=rounds, calls=calls, reduce_max=group.reduce_max, before=group.barrier)
    group.check()
    return found, apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    size, ranks = SIZES[options.device], options.ranks
    env = {"UNDERTOW_DMA_PACE": PACE} if options.device == "cpu" else {}
    found, apart = ut.launch(measure, ranks, device=options.device, args=(options.rounds,), env=env, deadline=60)[0]
    link = f"emulated link of {PACE}" if options.device == "cpu" else "peer memory of one GPU"
    title = f"{size.rows} rows of {size.hidden}, inner {size.inner}, {ranks} ranks, {link}"
    facts = {"link": link, "ranks": ranks, "rows": size.rows, "hidden": size.hidden, "inner": size.inner}
    report(found, apart, "Megatron", title, facts, options.json)


if __name__ == "__main__":
    main()
