"""Parameters that a model's own module holds beside cut layers, and that are cut with them: a number for each head.

The module stays what it is. It remembers how its parameters were cut, and takes whole ones from a checkpoint as a
`Sharded` module does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..fabric.registry import named
from .sharded import Cut, Sharded, take_shards

_SLICES = "_undertow_slices"


class Cuts(NamedTuple):
    """Which parameters of a module are shards, and over which group."""

    cuts: dict[str, Cut]
    group_name: str


def cuts_in(module: torch.nn.Module) -> Cuts | None:
    """Of a module's own parameters."""
    if isinstance(module, Sharded):
        return Cuts(module.cuts, module.group_name)
    found: Cuts | None = module.__dict__.get(_SLICES)
    return found


def is_shard(model: torch.nn.Module, name: str) -> bool:
    """Whether the parameter of this name is one already."""
    parent, _, own = name.rpartition(".")
    held = cuts_in(model.get_submodule(parent))
    return held is not None and own in held.cuts


def slice_parameter(module: torch.nn.Module, name: str, cut: Cut, group: str) -> None:
    """This rank's part in the place of the whole."""
    held = module.__dict__.get(_SLICES)
    if held is None:
        held = module.__dict__[_SLICES] = Cuts({}, group)
        module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
    whole = module.get_parameter(name)
    shard = cut.take(whole.detach(), named(group).rank).clone()
    setattr(module, name, torch.nn.Parameter(shard, requires_grad=whole.requires_grad))
    held.cuts[name] = cut


def _before_loading(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    held: Cuts = module.__dict__[_SLICES]
    take_shards(state, prefix, module, held.cuts, named(held.group_name).rank)
