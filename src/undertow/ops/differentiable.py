"""When a call goes through torch's dispatcher: where a gradient may be asked for, or torch traces.

A plain call runs as it is, without the dispatcher's cost. One that autograd or torch.compile must know of becomes an
operator of torch (`library.py`), which carries names and not objects: the group's name, the digest of a plan, the name
of a program. The activation and the residual then follow as torch's own operations, since the gradient needs the value
before the activation anyway, and a compiler fuses them with their neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import torch

from ..errors import InvalidArgument
from ..fabric.group import Group
from ..fabric.registry import as_group
from ..plan.plan import DEVICES, Plan
from .finish import ACTIVATIONS, FUNCTIONS

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..collective.language import Program

_plans: dict[str, Plan] = {}
_programs: dict[str, Program] = {}
Held = TypeVar("Held")


def differentiable(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd or a tracer has to see this call."""
    if torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def autocast(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The operands as torch.autocast wants those of a matmul."""
    kind = x.device.type
    if kind not in DEVICES or not torch.is_autocast_enabled(kind):  # of others the operator says what they must be
        return x, w, bias
    dtype = torch.get_autocast_dtype(kind)
    if not (x.is_floating_point() and w.is_floating_point()) or torch.float64 in (x.dtype, w.dtype):
        return x, w, bias
    return x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)


def name_of(group: Group | dist.ProcessGroup | DeviceMesh | str | None) -> str:
    """The name by which `registry.named` finds the group again."""
    if isinstance(group, str):
        return group
    if isinstance(group, Group):
        return group.name
    return str(_found_name(group))


def _found_name(group: dist.ProcessGroup | DeviceMesh | None) -> str:
    return as_group(group).name


# What torch._dynamo.assume_constant_result does, without the second that importing it takes in every rank.
_found_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def held(one: Plan | Program | None) -> str:
    """A short name for a plan or a program, by which this process finds it again; "" for none."""
    if one is None:
        return ""
    if isinstance(one, Plan):
        _plans[one.digest] = one
        return one.digest
    key = f"{one.name}#{id(one)}"
    _programs[key] = one
    return key


def held_plan(key: str) -> Plan | None:
    return _found("plan", _plans, key)


def held_program(key: str) -> Program | None:
    return _found("program", _programs, key)


def _found(what: str, table: Mapping[str, Held], key: str) -> Held | None:
    """A graph that another process traced knows names that this one may never have heard."""
    if key and key not in table:
        raise InvalidArgument(argument=what, was=repr(key), must="one that this process gave to an operator before")
    return table[key] if key else None


def refuse_in_place(**arguments: object) -> None:
    """Arguments whose work is done in place, which neither autograd nor a tracer could follow."""
    for name, value in arguments.items():
        if value is not None:
            must = "None where gradients are taken or torch traces: call under torch.no_grad(), or do it apart"
            raise InvalidArgument(argument=name, was="given", must=must)


def finished(y: torch.Tensor, activation: str, residual: torch.Tensor | None = None) -> torch.Tensor:
    """What follows the product, as torch's own operations."""
    if activation not in ACTIVATIONS:
        raise InvalidArgument(argument="activation", was=repr(activation), must=f"one of {', '.join(ACTIVATIONS)}")
    if activation != "none":
        y = FUNCTIONS[activation](y)
    if residual is None:
        return y
    if residual.shape != y.shape or residual.dtype != y.dtype:
        was, must = f"{list(residual.shape)} {residual.dtype}", f"{list(y.shape)} {y.dtype}, as the result"
        raise InvalidArgument(argument="residual", was=was, must=must)
    return residual + y
