"""The torch backend on a GPU, inside the ranks of a virtual node: streams, futures, the fallback, DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import undertow.torch_backend  # noqa: F401  # registers it


def run() -> list[str]:
    """What was not as it should be."""
    dist.init_process_group("undertow")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = dist.group.WORLD.undertow.device
    wrong: list[str] = []

    def expect(name: str, found: torch.Tensor, value: float) -> None:
        if not bool(found.eq(value).all()):
            wrong.append(f"{name}: {found.flatten()[:4].tolist()}, not {value}")

    total = size * (size + 1) / 2
    tensor = torch.full((100_003,), rank + 1.0, device=device)
    dist.all_reduce(tensor)
    expect("blocking", tensor, total)
    for step in range(
        10
    ):  # the producer is on the caller's stream, the call on the group's, the consumer on the caller's
        big = torch.full((1 << 20,), 0.0, device=device)
        big.add_(rank + 1.0 + step)
        work = dist.all_reduce(big, async_op=True)
        work.wait()
        expect(f"asynchronous {step}", big * 2, 2 * (total + size * step))
    (found,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
    expect("future", found, total * size)
    out = torch.empty(size * 1000, device=device, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(out, torch.full((1000,), rank, device=device, dtype=torch.bfloat16))
    for one, part in enumerate(out.chunk(size)):
        expect(f"all_gather {one}", part, one)
    shard = torch.empty(500, device=device)
    dist.reduce_scatter_tensor(shard, torch.full((500 * size,), rank + 1.0, device=device), op=dist.ReduceOp.AVG)
    expect("reduce_scatter", shard, total / size)
    on_host = torch.full((5,), rank + 1.0)
    dist.all_reduce(on_host)
    expect("the fallback, on the host", on_host, total)
    dist.barrier()
    graph, still = torch.cuda.CUDAGraph(), torch.full((1000,), 1.0, device=device)
    dist.all_reduce(torch.ones_like(still))  # of this size, once before it is captured
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dist.all_reduce(still)
    for _ in range(3):
        graph.replay()
    expect("replayed", still, float(size**3))
    again = torch.cuda.CUDAGraph()  # a second capture right after the first: nothing may be waited for across them
    still.fill_(1.0)
    torch.cuda.synchronize()
    with torch.cuda.graph(again):
        dist.all_reduce(still)
    again.replay()
    expect("replayed, of a second graph", still, float(size))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64, device=device), bucket_cap_mb=0.001)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimiser.zero_grad()
        model(torch.full((4, 64), float(rank + step), device=device)).square().mean().backward()
        optimiser.step()
    weights = [torch.empty(64, 64, device=device) for _ in range(size)]
    dist.all_gather(weights, model.module.weight.detach())
    if not all(one.equal(weights[0]) and bool(one.isfinite().all()) for one in weights):
        wrong.append("DDP: weights differ between ranks")
    dist.destroy_process_group()
    return wrong
