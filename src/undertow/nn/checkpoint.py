"""Checkpoints without shards: what `load_state_dict` of the ordinary model takes."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ..collective.operators import all_gather
from ..fabric.registry import named
from .embedding import whole_state
from .sharded import Cut, Sharded


def full_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the model, put together from the shards of all ranks, on every rank. Collective.

    What two modules share they share in the result.
    """
    state: dict[str, torch.Tensor] = model.state_dict()
    found: dict[tuple[int, Cut], torch.Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Sharded):
            for name, cut in module.cuts.items():
                key = f"{prefix}.{name}" if prefix else name
                if key in state:
                    held = id(module.get_parameter(name)), cut
                    if held not in found:
                        found[held] = _whole(state[key], cut, module)
                    state[key] = found[held]
    return whole_state(model, state)


def _whole(shard: torch.Tensor, cut: Cut, module: Sharded) -> torch.Tensor:
    """The shards of all ranks, which may differ in size, joined, where this rank's shard was."""
    if isinstance(shard, DTensor):  # cut once more by FSDP, on the other dimension
        shard = shard.full_tensor()
    group, device = named(module.group_name), shard.device
    sizes = [sum(cut.sizes(rank)) for rank in range(cut.ranks)]
    # One behind the other along the first dimension, as they travel; by the group's device, wherever the model is.
    travelling = shard.detach().movedim(cut.dim, 0).contiguous().to(group.device)
    parts = torch.split(all_gather(travelling, rows=sizes, group=group), sizes)
    return cut.join([part.movedim(0, cut.dim) for part in parts]).contiguous().to(device)
