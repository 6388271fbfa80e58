"""Parameters that are whole on every rank: their gradients, of which each rank has a part, are summed.

While such a module is called, its parameters' places hold the same numbers, whose gradients are sums over ranks. That
is done by two hooks of the module. Hooks of the parameters would go with them: behind `fully_shard`, and in a copy, a
module has others. FSDP puts its parameters into their places in a hook of its own, which comes first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..ops.rows_all_reduce import held_by_all
from .sharded import Sharded

_KEY: Any = "undertow: gradients are summed"
_GROUP, _OWN, _CALLS = "_undertow_sums_over", "_undertow_own", "_undertow_calls"
"""Attributes of modules: a group's name; parameters whose places stand-ins have; which modules each call filled."""


def sum_gradients(layer: torch.nn.Module, group: str) -> None:
    """Of all parameters in `layer`, but for shards. Once, however often it is asked for."""
    for module in layer.modules():
        if isinstance(module, Sharded) or _GROUP in module.__dict__:
            continue
        setattr(module, _GROUP, group)
        # As registering does, but by one key for all: compilers look for a hook by its key, which torch makes a new one
        # for each, and would compile every layer anew. First of all, as others' hooks may compute with parameters.
        module._forward_pre_hooks[_KEY] = _before
        module._forward_pre_hooks.move_to_end(_KEY, last=False)  # type: ignore[attr-defined]
        module._forward_hooks[_KEY] = _after
        module._forward_hooks_always_called[_KEY] = True


def _before(module: torch.nn.Module, _: object) -> None:
    """Also in modules inside, which may be used without being called: lists of parameters, the way out of attention."""
    group = module.__dict__.get(_GROUP)  # none of a layer that took this one's place, and its hooks
    if group is None or not torch.is_grad_enabled():
        return
    filled: list[torch.nn.Module] = []
    for inner in module.modules():
        if isinstance(inner, Sharded) or _OWN in inner.__dict__:
            continue
        own = {
            name: one
            for name, one in inner._parameters.items()
            if one is not None and one.requires_grad and not isinstance(one, DTensor)
        }
        if own:
            setattr(inner, _OWN, own)
            filled.append(inner)
            for name, one in own.items():
                inner._parameters[name] = held_by_all(one, group)  # type: ignore[assignment]
    setattr(module, _CALLS, [*module.__dict__.get(_CALLS, ()), filled])


def _after(module: torch.nn.Module, _: object, __: object) -> None:
    """What this call filled: a call inside another of the same module leaves that one's as they are."""
    calls = module.__dict__.get(_CALLS)
    if not calls:
        return
    for inner in calls[-1]:
        inner._parameters.update(inner.__dict__.pop(_OWN))
    if len(calls) > 1:
        setattr(module, _CALLS, calls[:-1])
    else:
        del module.__dict__[_CALLS]


def carry_hooks(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Hooks of the calls of a module, forward and backward, that another takes the place of. The same dictionaries: who
    may remove a hook still can."""
    for name in (
        "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    ):  # fmt: skip
        setattr(new, name, getattr(old, name))
