"""Checkpoints without shards: what `load_state_dict` of the ordinary model takes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..fabric.registry import named
from .embedding import whole_state
from .sharded import Cut, Sharded


def full_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the model, put together from the shards of all ranks, on every rank. Collective."""
    state: dict[str, torch.Tensor] = model.state_dict()
    for prefix, module in model.named_modules():
        if isinstance(module, Sharded):
            for name, cut in module.cuts.items():
                key = f"{prefix}.{name}" if prefix else name
                if key in state:
                    state[key] = _whole(state[key], cut, module)
    return whole_state(model, state)


def _whole(shard: torch.Tensor, cut: Cut, module: Sharded) -> torch.Tensor:
    """The shards of all ranks, which may differ in size, joined."""
    if isinstance(shard, DTensor):  # cut once more by FSDP, on the other dimension
        shard = shard.full_tensor()
    group = named(module.group_name)
    longest = max(sum(cut.sizes(rank)) for rank in range(cut.ranks))
    shape = list(shard.shape)
    shape[cut.dim] = longest
    padded = shard.new_zeros(shape)
    padded.narrow(cut.dim, 0, shard.shape[cut.dim]).copy_(shard)
    parts = [torch.empty_like(padded) for _ in range(cut.ranks)]
    with group.connected("gathering a checkpoint"):
        dist.all_gather(parts, padded, group=group.process_group)
    return cut.join([part.narrow(cut.dim, 0, sum(cut.sizes(rank))) for rank, part in enumerate(parts)])
