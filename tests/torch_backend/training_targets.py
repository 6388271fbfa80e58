"""Training over a backend: code as users write it, of which only the backend's name changes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from backend_targets import fallbacks, world
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def perceptron(width: int = 48) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def batches(rank: int, width: int = 48) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, width, generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, inputs: list[torch.Tensor]) -> list[float]:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in inputs:
        optimiser.zero_grad()
        loss = (model(batch) - batch.flip(0)).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def data_parallel(group: dist.ProcessGroup) -> list[float]:
    # Several buckets, so that sums are under way while gradients are still computed.
    model = DistributedDataParallel(perceptron(), process_group=group, bucket_cap_mb=0.02)
    return train(model, batches(dist.get_rank()))


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    """Named after its backend: DTensor takes meshes of equal names and ranks for one, and would use one group only."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))


def tensor_parallel(group: dist.ProcessGroup) -> list[float]:
    mesh = mesh_of(group)
    model = parallelize_module(perceptron(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(model, batches(0))


def fully_sharded(group: dist.ProcessGroup) -> list[float]:
    model = perceptron()
    mesh = mesh_of(group)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, batches(dist.get_rank()))


KINDS = {"data": data_parallel, "tensor": tensor_parallel, "fully sharded": fully_sharded}


Losses = dict[tuple[str, str], list[float]]


def every_kind() -> tuple[Losses, dict[tuple[str, str], int], list[str]]:
    """Losses by kind and backend, how many calls Undertow's group had meanwhile, and what the fallback carried."""
    with world(), fallbacks() as said:
        groups = {"undertow": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
        losses, calls = {}, {}
        for kind, trained in KINDS.items():
            for name, group in groups.items():
                before = dist.group.WORLD.undertow.calls
                losses[kind, name] = trained(group)
                calls[kind, name] = dist.group.WORLD.undertow.calls - before
        return losses, calls, said


def alone(ranks: int, everybody: bool) -> list[list[float]]:
    """The same without any communication: the mean gradient over all ranks' batches, on one process."""
    model = perceptron()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    given = [batches(rank if everybody else 0) for rank in range(ranks)]
    for step in range(STEPS):
        optimiser.zero_grad()
        for rank in range(ranks):
            batch = given[rank][step]
            loss = (model(batch) - batch.flip(0)).square().mean()
            (loss / ranks).backward()
            losses[rank].append(float(loss.detach()))
        optimiser.step()
    return losses


def data_parallel_with_hooks() -> list[str]:
    """DDP's own extensions that work with handles and futures: a compression hook, no_sync, uneven inputs."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    with world() as (rank, size):
        wrong = []
        model = DistributedDataParallel(perceptron())
        model.register_comm_hook(None, fp16_compress_hook)
        train(model, batches(rank))
        weights = [torch.empty_like(model.module[0].weight) for _ in range(size)]
        dist.all_gather(weights, model.module[0].weight.detach())
        if not all(one.equal(weights[0]) for one in weights):
            wrong.append("weights differ after a compressing hook")
        model = DistributedDataParallel(perceptron())
        with model.join():
            train(model, batches(rank)[: STEPS - rank])
        return wrong
