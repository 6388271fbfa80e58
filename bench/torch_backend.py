"""Training steps over torch.distributed, side by side: backend "undertow" and Gloo, same code, same processes.

    ddp       a perceptron of four layers under DistributedDataParallel: a sum over ranks for each bucket of gradients
    tensor    a block of two layers under ColwiseParallel and RowwiseParallel: a sum in every forward and backward pass
    fsdp2     the perceptron under fully_shard: gathers of parameters, scattered sums of gradients

Every round takes a block of steps of each backend, in random order, all ranks starting together; a block's time is the
slowest rank's. Ranks are not bound to cores: Gloo's threads would be in each other's way there. Losses are compared,
step by step, before anything is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import undertow as ut
import undertow.torch_backend
from undertow.fabric.environment import environment
from undertow.fabric.timer import compare

UNDERTOW, GLOO = "undertow", "gloo"
STEPS_OF_BLOCK = 5
COMPARED_STEPS = 5


def perceptron(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def data_parallel(width: int, group: dist.ProcessGroup, device: str) -> nn.Module:
    return DistributedDataParallel(perceptron(width, 4).to(device), process_group=group)


def mesh_of(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    """Named after its backend: DTensor takes meshes of equal names and ranks for one, and would use one group only."""
    return DeviceMesh.from_group(group, device, mesh_dim_names=(dist.get_backend(group),))


def tensor_parallel(width: int, group: dist.ProcessGroup, device: str) -> nn.Module:
    mesh = mesh_of(group, device)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(perceptron(width, 2).to(device), mesh, plan)


def fully_sharded(width: int, group: dist.ProcessGroup, device: str) -> nn.Module:
    mesh = mesh_of(group, device)
    model = perceptron(width, 4).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS: dict[str, Callable[[int, dist.ProcessGroup, str], nn.Module]] = {
    "ddp": data_parallel, "tensor": tensor_parallel, "fsdp2": fully_sharded,
}  # fmt: skip


def step_of(model: nn.Module, batch: torch.Tensor) -> Callable[[], torch.Tensor]:
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        optimiser.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


def run_rank(kinds: list[str], widths: list[int], rows: int, rounds: int) -> list[dict[str, Any]]:
    """All measurements, in one rank; times are the slowest rank's."""
    dist.init_process_group(UNDERTOW)
    device = ut.as_group(None).device.type
    groups = {UNDERTOW: dist.group.WORLD, GLOO: dist.new_group(backend=GLOO)}
    found = []
    for kind in kinds:
        for width in widths:
            batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(device)
            steps = {name: step_of(KINDS[kind](width, group, device), batch) for name, group in groups.items()}
            losses = {name: [float(step()) for _ in range(COMPARED_STEPS)] for name, step in steps.items()}
            group = ut.as_group(None)
            measured = compare(
                steps, calls=STEPS_OF_BLOCK, repeats=rounds, reduce_max=group.reduce_max, before=group.barrier
            )
            ratio = measured.ratio(of=GLOO, to=UNDERTOW)
            found.append({
                "kind": kind, "ranks": group.size, "width": width, "rows": rows,
                "us": {name: measured.estimate(name).median * 1e6 for name in steps},
                "gloo over undertow": [ratio.median, ratio.low, ratio.high],
                "losses differ by": max(abs(a - b) for a, b in zip(losses[UNDERTOW], losses[GLOO], strict=True)),
            })  # fmt: skip
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="keep the result, with its environment, as JSON")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for ranks in chosen.ranks:
        arguments = (chosen.kinds, chosen.widths, chosen.rows, chosen.rounds)
        rows += ut.launch(run_rank, ranks, chosen.device, args=arguments, env={"UNDERTOW_BIND": "0"})[0]
    print(f"{'kind':8}{'ranks':>6}{'width':>7}{'undertow':>12}{'gloo':>12}  gloo / undertow   losses differ by")
    for row in rows:
        median, low, high = row["gloo over undertow"]
        times = "".join(f"{row['us'][name]:>9.0f} us" for name in (UNDERTOW, GLOO))
        shown = f"{median:5.2f} [{low:.2f}, {high:.2f}]"
        print(f"{row['kind']:8}{row['ranks']:>6}{row['width']:>7}{times}  {shown:17} {row['losses differ by']:.1e}")
    if chosen.out is not None:
        chosen.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
