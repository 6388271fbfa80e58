"""Checkpoints without shards: what `load_state_dict` of the ordinary model takes."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ..collective.operators import all_gather
from ..errors import InvalidArgument
from ..fabric.registry import named
from .embedding import whole_state
from .sharded import Cut, Sharded


def full_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the model, put together from the shards of all ranks, on every rank. Collective.

    What two modules share they share in the result.
    """
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)  # first, as FSDP may change parameters for it
    shards: dict[int, tuple[str, Cut, str]] = {}  # by the parameter itself: whoever wraps a module may rename it
    for prefix, module in model.named_modules():
        if isinstance(module, Sharded):
            for name, cut in module.cuts.items():
                shards[id(module.get_parameter(name))] = f"{prefix}.{name}", cut, module.group_name
    left = shards.keys() - {id(one) for one in state.values()}
    if left:
        was = f"one whose state has no {shards[left.pop()][0].removeprefix('.')}"
        raise InvalidArgument(argument="model", was=was, must="one with all shards of its layers in it")
    found: dict[int, torch.Tensor] = {}
    for key, one in state.items():
        if not isinstance(one, torch.Tensor):
            continue  # what a module says of itself (`get_extra_state`)
        if id(one) not in found:
            found[id(one)] = (
                _whole(one.detach(), *shards[id(one)][1:]) if id(one) in shards else _gathered(one.detach())
            )
        state[key] = found[id(one)]
    return whole_state(model, state)


def _gathered(one: torch.Tensor) -> torch.Tensor:
    """Of what FSDP has cut: the whole of it."""
    return one.full_tensor() if isinstance(one, DTensor) else one


def _whole(shard: torch.Tensor, cut: Cut, group_name: str) -> torch.Tensor:
    """The shards of all ranks, which may differ in size, joined, where this rank's shard was."""
    shard = _gathered(shard)  # cut once more by FSDP, on the other dimension
    group, device = named(group_name), shard.device
    sizes = [sum(cut.sizes(rank)) for rank in range(cut.ranks)]
    # One behind the other along the first dimension, as they travel; by the group's device, wherever the model is.
    travelling = shard.movedim(cut.dim, 0).contiguous().to(group.device)
    parts = torch.split(all_gather(travelling, rows=sizes, group=group), sizes)
    return cut.join([part.movedim(0, cut.dim) for part in parts]).contiguous().to(device)
