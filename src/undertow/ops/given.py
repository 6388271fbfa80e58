"""What kind of thing each argument of an operator is, asked before anything looks into it or moves.

Everything here is one sentence for what would otherwise fail inside torch, on some ranks half-way through a call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from ..errors import InvalidArgument
from ..fabric.registry import as_group
from ..plan.plan import Plan
from .finish import check_finish
from .operands import check_factors

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.group import Group

_SHOWN = 60  # characters of a value that a message shows


def check_given(
    x: torch.Tensor, w: torch.Tensor, strategy: str, plan: Plan | None = None, **optional: torch.Tensor | None
) -> None:
    """`optional`: by name, tensors that may be None."""
    for name, one in (("x", x), ("w", w), *optional.items()):
        if not isinstance(one, torch.Tensor) and (one is not None or name in ("x", "w")):
            must = "a torch.Tensor" if name in ("x", "w") else "a torch.Tensor or None"
            raise InvalidArgument(argument=name, was=f"of type {type(one).__name__}", must=must)
        if one is not None and one.is_nested:
            raise InvalidArgument(argument=name, was="a nested tensor", must="one whose rows are equally long")
    if not isinstance(strategy, str):
        raise InvalidArgument(argument="strategy", was=f"of type {type(strategy).__name__}", must="a string")
    if plan is not None and not isinstance(plan, Plan):
        must = "a Plan, such as Plan.from_json gives, or None"
        raise InvalidArgument(argument="plan", was=f"of type {type(plan).__name__}", must=must)
    if not torch.compiler.is_compiling():
        _check_plain(x, w, *optional.values())


def _check_plain(*tensors: torch.Tensor | None) -> None:
    """Outside of torch.func and forward-mode gradients, whose tensors have no memory that another rank could write."""
    functorch: Any = torch._C._functorch
    interpreter = functorch.peek_interpreter_stack()
    kind = None if interpreter is None else interpreter.key()
    if kind not in (None, functorch.TransformType.Functionalize):
        must = "made outside of it: torch.autograd takes gradients of it"
        raise InvalidArgument(argument="call", was=f"inside torch.func's {kind.name.lower()}", must=must)
    if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        must = "one without: only backward gradients are there"
        raise InvalidArgument(argument="x, w or bias", was="a tensor with a forward-mode gradient", must=must)


def _has_tangent(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def check_before_dispatch(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    group: Group | dist.ProcessGroup | DeviceMesh | str | None,
    grouped: bool = False,
) -> None:
    """What an operator of torch would find out later, or not at all: a bias on another device decides for it where it
    runs. While torch traces no group is looked up."""
    if torch.compiler.is_compiling():
        return
    check_factors(x, w, as_group(group), grouped=grouped)
    check_finish(bias, activation, w.shape[-1], x, w.shape[0] if w.dim() == 3 else None)


def counts_of(name: str, given: Sequence[int] | torch.Tensor) -> list[int]:
    """Whole numbers, from a sequence or a tensor of one dimension."""
    if torch.compiler.is_compiling():
        return list(given)
    try:
        return [operator.index(one) for one in listed(given)]
    except TypeError:
        raise InvalidArgument(argument=name, was=_short(given), must="a sequence of whole numbers") from None


def listed(given: Any) -> Any:
    """Tensors and arrays as lists."""
    return given.tolist() if hasattr(given, "tolist") else given


def _short(given: object) -> str:
    text = " ".join(repr(given).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
