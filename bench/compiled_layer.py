"""A transformer layer that torch's own styles have parallelized and torch.compile has compiled, forward and backward.

    PYTHONPATH=src python bench/compiled_layer.py
    PYTHONPATH=src python bench/compiled_layer.py --device cuda --ranks 4

    gloo          torch's functional collectives over Gloo (on a CPU only)
    undertow      the same graph over backend="undertow": the strongest form without overlap
    async-TP      torch's own pass over symmetric memory (on a GPU only)
    pass ...      `ut.nn.overlap_pass` by the strategy named

Sequence parallel, gathered once before projections that belong together, as torch's guides have it. All variants are
interleaved; ratios are paired by round, with 95% intervals. Before anything is timed results and gradients are compared
with those of the layer without a compiler: told is by how much they are apart, of the largest element.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from layer_report import report
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import undertow as ut
import undertow.torch_backend
from undertow.fabric.timer import Comparison, compare


class Size(NamedTuple):
    hidden: int
    inner: int
    heads: int
    rows: int
    dtype: torch.dtype
    strategies: tuple[str, ...]


SIZES = {
    "cpu": Size(512, 1408, 8, 1024, torch.float32, ("serial:peer", "auto")),
    "cuda": Size(4096, 14336, 32, 4096, torch.bfloat16, ("serial:peer", "fused:peer", "auto")),
}
BASE = "undertow"


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.width = size.hidden // size.heads
        self.q, self.k, self.v, self.o = (nn.Linear(size.hidden, size.hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [one(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for one in (self.q, self.k, self.v)]
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.hidden, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.attention, self.feed_forward = Attention(size), FeedForward(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))  # type: ignore[no-any-return]


def parallel(size: Size, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layer = Layer(size).to(device, size.dtype)
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    scattered = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    styles = {
        "": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),)),
        "first": SequenceParallel(), "second": SequenceParallel(), "attention": gathered, "feed_forward": gathered,
        "attention.o": scattered, "feed_forward.down": scattered,
        **{f"attention.{one}": ColwiseParallel() for one in "qkv"},
        **{f"feed_forward.{one}": ColwiseParallel() for one in ("gate", "up")},
    }  # fmt: skip
    return parallelize_module(layer, mesh, styles)


def variants_of(size: Size, device: torch.device) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The layer without a compiler, and all that are compared."""
    process_group = dist.new_group(backend=BASE)
    assert isinstance(process_group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(process_group, device.type, mesh_dim_names=(BASE,))
    found: dict[str, Any] = {BASE: torch.compile(parallel(size, mesh, device))}
    if device.type == "cpu":
        gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu", mesh_dim_names=("gloo",))
        found["gloo"] = torch.compile(parallel(size, gloo, device))
    else:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(process_group.group_name)
        found["async-TP"] = torch.compile(parallel(size, mesh, device), options={"_micro_pipeline_tp": True})
    for strategy in size.strategies:
        step = ut.nn.overlap_pass(mesh, strategy=strategy)
        options = {"post_grad_custom_pre_pass": step}
        found[f"pass {strategy}"] = torch.compile(parallel(size, mesh, device), options=options)
    return parallel(size, mesh, device), found


def measure(rounds: int) -> tuple[Comparison, dict[str, float]]:
    group = ut.init()
    size = SIZES[group.device.type]
    plain, modules = variants_of(size, group.device)
    chance = torch.Generator().manual_seed(group.rank)
    x = torch.randn(1, size.rows // group.size, size.hidden, generator=chance).to(group.device, size.dtype)

    def step(module: nn.Module) -> Callable[[], list[torch.Tensor]]:
        def run() -> list[torch.Tensor]:
            given = x.clone().requires_grad_()
            module.zero_grad()
            y = _local(module(given))
            y.square().sum().backward()
            return [y.detach(), *(_local(one.grad) for one in (given, *module.parameters()) if one.grad is not None)]

        return run

    wanted, apart = step(plain)(), {}
    for name, module in modules.items():
        pairs = zip(step(module)(), wanted, strict=True)
        apart[name] = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    steps = {name: step(module) for name, module in modules.items()}
    calls = 4 if group.device.type == "cuda" else None  # the hosts run ahead of the GPU
    found = compare(steps, repeats=rounds, calls=calls, reduce_max=group.reduce_max, before=group.barrier)
    group.check()
    return found, apart


def _local(one: torch.Tensor) -> torch.Tensor:
    return one.to_local() if isinstance(one, DTensor) else one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    size, ranks = SIZES[options.device], options.ranks
    found, apart = ut.launch(measure, ranks, device=options.device, args=(options.rounds,), deadline=120)[0]
    link = "shared memory" if options.device == "cpu" else "peer memory of one GPU"
    title = f"{size.rows} rows of {size.hidden}, inner {size.inner}, {ranks} ranks, {link}"
    facts = {"link": link, "ranks": ranks, **size._asdict()}
    report(found, apart, BASE, title, facts, options.json)


if __name__ == "__main__":
    main()
