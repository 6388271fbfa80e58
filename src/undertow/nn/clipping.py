"""The norm of all gradients of a model some of whose parameters are shards, and gradients scaled by it.

    reference:  torch.nn.utils.clip_grad_norm_ of the whole model's gradients

A rank's own norm would miss what others hold, so ranks would scale the gradients of what they all hold differently, and
be of different models from then on. With g the gradients of shards and h those of parameters that are whole:

    norm^p = sum over ranks of |g_r|^p + |h|^p            (p = inf: the largest of them)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from ..collective.operators import all_reduce
from ..errors import InvalidArgument
from ..fabric.registry import named
from .embedding import ShardedEmbeddingBag
from .slices import cuts_in


def clip_grad_norm_(
    model: torch.nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients of `model` so that their norm is `max_norm` at most; returns the norm before. Collective.

    Gradients of parameters that are whole must be the same on all ranks, as they are behind layers of this package.
    """
    if not norm_type > 0:
        raise InvalidArgument(argument="norm_type", was=norm_type, must="above 0, or math.inf")
    holders = _holders(model)
    parameters = list(model.parameters())  # one that modules share once
    power = 1.0 if math.isinf(norm_type) else norm_type
    total = _norm([one for one in parameters if id(one) not in holders], norm_type) ** power
    for group_name in dict.fromkeys(holders.values()):  # those of modules, so in one order on all ranks
        mine = _norm([one for one in parameters if holders.get(id(one)) == group_name], norm_type) ** power
        group = named(group_name)
        part = mine.to(group.device).reshape(1)
        all_reduce(part, op="max" if math.isinf(norm_type) else "sum", group=group)
        part = part[0].to(total.device)
        total = torch.maximum(total, part) if math.isinf(norm_type) else total + part
    gradients = [one.grad for one in parameters if one.grad is not None]
    wide = torch.float64 if any(one.dtype == torch.float64 for one in gradients) else torch.float32
    total = (total ** (1 / power)).to(wide)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise InvalidArgument(argument="the norm of all gradients", was=float(total), must="finite")
    torch.nn.utils.clip_grads_with_norm_([one for one in parameters if not _is_sparse(one)], max_norm, total)
    for one in gradients:
        if one.is_sparse:
            one._values().mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0).to(one.dtype))
    return total


def _is_sparse(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def _holders(model: torch.nn.Module) -> dict[int, str]:
    """The parameters that are this rank's alone, and the group over which they are cut."""
    found: dict[int, str] = {}
    for module in model.modules():
        held = cuts_in(module)
        if held is not None:
            found |= {id(module.get_parameter(name)): held.group_name for name in held.cuts}
        elif isinstance(module, ShardedEmbeddingBag):
            found |= {id(piece): module.group_name for piece in module.pieces}
            found[id(module)] = module.group_name  # of a rank that has none, too, which takes part
    return found


def _norm(parameters: Sequence[torch.nn.Parameter], norm_type: float) -> torch.Tensor:
    """In 64 bits, whose square is no more than they hold."""
    gradients = [
        one.grad.coalesce().values() if one.grad.is_sparse else one.grad for one in parameters if one.grad is not None
    ]
    device = parameters[0].device if parameters else "cpu"
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    whole: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm  # cut once more, by FSDP
    return whole.double()
