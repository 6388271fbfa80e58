"""Checkpoints without shards: what `load_state_dict` of the ordinary model takes. Files: `checkpoint_files.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..collective.operators import all_gather
from ..errors import InvalidArgument
from ..fabric.registry import named
from .embedding import as_saved, bags_of
from .sharded import Cut, Narrowed
from .slices import cuts_in


class Shard(NamedTuple):
    """How a parameter was cut, over which group."""

    cut: Cut
    group_name: str

    def take(self, whole: Narrowed) -> torch.Tensor:
        """This rank's part."""
        return self.cut.take(whole, named(self.group_name).rank)

    def whole_shape(self, mine: torch.Tensor) -> tuple[int, ...]:
        shape = list(mine.shape)
        shape[self.cut.dim] = sum(self.cut.parts)
        return tuple(shape)


def full_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the model, put together from the shards of all ranks, on every rank. Collective.

    What two modules share they share in the result.
    """
    state, shards = state_and_shards(model)
    found: dict[int, torch.Tensor] = {}
    for key, one in state.items():
        if not isinstance(one, torch.Tensor):
            continue  # what a module says of itself (`get_extra_state`)
        if id(one) not in found:
            found[id(one)] = put_together(one, shards.get(id(one)))
        state[key] = found[id(one)]
    for prefix, bag in bags_of(model):
        for number, key in enumerate(bag.table_keys):
            state[prefix + key] = bag.whole_table(number)
    return state


def state_and_shards(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[int, Shard]]:
    """What the model has, by name, but for pieces of embedding tables; and its shards, by the parameter itself: whoever
    wraps a module may rename it."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)  # first, as FSDP may change parameters for it
    pieces = {id(piece) for _, bag in bags_of(model) for piece in bag.pieces}
    state = {key: one for key, one in state.items() if id(one) not in pieces}
    there, shards = {id(one) for one in state.values()}, dict[int, Shard]()
    for prefix, module in model.named_modules():
        held = cuts_in(module)
        if held is not None:
            for name, cut in held.cuts.items():
                key = as_saved(f"{prefix}.{name}" if prefix else name)
                one: torch.Tensor | None = module._parameters.get(name)
                if id(one) not in there:  # a hook has put something in its place
                    one = state.get(key)
                if one is None:
                    must = "one with all shards of its layers in it"
                    raise InvalidArgument(argument="model", was=f"one whose state has no {key}", must=must)
                shards[id(one)] = Shard(cut, held.group_name)
    return state, shards


def put_together(one: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """The whole, on the device where this rank's part is. Collective for a shard, and for what FSDP has cut."""
    one = one.detach()
    one = one.full_tensor() if isinstance(one, DTensor) else one
    if shard is None:
        return one
    cut, group, device = shard.cut, named(shard.group_name), one.device
    sizes = [sum(cut.sizes(rank)) for rank in range(cut.ranks)]
    # One behind the other along the first dimension, as they travel; by the group's device, wherever the model is.
    travelling = one.movedim(cut.dim, 0).contiguous().to(group.device)
    parts = torch.split(all_gather(travelling, rows=sizes, group=group), sizes)
    return cut.join([part.movedim(0, cut.dim) for part in parts]).contiguous().to(device)
