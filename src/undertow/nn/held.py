"""What modules hold together: parameters that are whole on every rank, and parameters that several modules share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ops.rows_all_reduce import held_by_all


class SummedForward:
    """A module's `forward` in which its parameters are those of all ranks: their gradients are sums over ranks.

    Hooks of the parameters would go with them: behind `fully_shard`, and in a copy, a module has others.
    """

    def __init__(self, layer: torch.nn.Module, group: str) -> None:
        self._layer, self._group = layer, group
        self._own = layer.__dict__.get("forward")  # of one that somebody else has wrapped

    @staticmethod
    def give(layer: torch.nn.Module, group: str) -> None:
        """Have the gradients of `layer` summed: once, however often it is asked for."""
        if not isinstance(layer.__dict__.get("forward"), SummedForward):
            layer.forward = SummedForward(layer, group)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        own: dict[torch.nn.Module, dict[str, Any]] = {}
        held: dict[torch.nn.Parameter, Any] = {}
        if torch.is_grad_enabled():
            for module in self._layer.modules():
                own[module] = dict(module._parameters)
        try:
            for module, parameters in own.items():
                for name, parameter in parameters.items():
                    if parameter is not None and parameter.requires_grad:
                        if parameter not in held:
                            held[parameter] = held_by_all(parameter, self._group)
                        module._parameters[name] = held[parameter]
            if self._own is not None:
                return self._own(*arguments, **options)
            return type(self._layer).forward(self._layer, *arguments, **options)
        finally:
            for module, parameters in own.items():
                module._parameters.update(parameters)


class OneAgain:
    """What several modules share, after `load_state_dict(assign=True)`, which gives each of them a parameter.

    `names`: of the parameter, one for each module.
    """

    def __init__(self, names: Sequence[str], shared: torch.nn.Parameter) -> None:
        self._names, self._shared = tuple(names), shared

    def __call__(self, model: torch.nn.Module, _: object) -> None:
        """As a hook behind loading. Where a checkpoint has only one of the names, that one counts."""
        found = [model.get_parameter(name) for name in self._names]
        self._shared = next((one for one in found if one is not self._shared), self._shared)
        for name in self._names:
            holder, _, own = name.rpartition(".")
            setattr(model.get_submodule(holder), own, self._shared)


def carry_hooks(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Hooks of a module that another takes the place of. The same dictionaries: who may remove a hook still can."""
    for name in (
        "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    ):  # fmt: skip
        setattr(new, name, getattr(old, name))
