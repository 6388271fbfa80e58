"""A block that torch's own styles parallelize and torch.compile compiles, with its collectives beneath its matmuls.

undertow run -n 2 --device cpu examples/compiled_tensor_parallel.py
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

import undertow as ut


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(256, 704, bias=False), nn.Linear(256, 704, bias=False)
        self.down = nn.Linear(704, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feed_forward = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed_forward(x)


group = ut.init()
mesh = init_device_mesh(group.device.type, (group.size,), mesh_dim_names=("tp",))
torch.manual_seed(0)  # the same weights on all ranks
block = parallelize_module(
    Block().to(group.device),
    mesh["tp"],
    {
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.gate": ColwiseParallel(), "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    },
)  # fmt: skip
overlap = ut.nn.overlap_pass(mesh["tp"])
compiled = torch.compile(block, options={"post_grad_custom_pre_pass": overlap})
x = torch.randn(1, 512 // group.size, 256, device=group.device)  # this rank's part of a sequence
compiled(x).square().sum().backward()
if group.rank == 0:
    print(*overlap.told, sep="\n")
    print(ut.explain())
ut.shutdown()
