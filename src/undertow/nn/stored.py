"""By which names, and in which pieces, a checkpoint has what a model holds as one tensor.

    the model's                            the checkpoint's
    P                                      P
    *.mlp.*                                *.block_sparse_moe.*                 Mixtral
    *.experts.gate_up_proj  [E, 2 I, H]    *.experts.{e}.gate_proj.weight  [I, H], up_proj below it; or w1 and w3
    *.experts.up_proj       [E, I, H]      *.experts.{e}.up_proj.weight    [I, H]; experts without gates
    *.experts.down_proj     [E, H, I]      *.experts.{e}.down_proj.weight  [H, I]; or w2

The model's names count first. The others are how most models of experts are published, and how transformers 5 writes
them, although its own modules hold all experts of a layer in two tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..errors import InvalidArgument
from .parallel_experts import TensorParallelExperts
from .weights_file import Weights

_BLOCKS = (".mlp.", ".block_sparse_moe.")
_EXPERTS = ".experts."
_ONE_BY_ONE = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
_TOLD = 5  # names in an error


class Stored(NamedTuple):
    """The names under which a checkpoint has a tensor. `below`: so many of them, one below the other, are one index of
    its first dimension; 0 for a tensor that is stored as it is, under one name."""

    names: tuple[str, ...]
    below: int = 0

    def pieces(self, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """What is stored of it, by name."""
        if not self.below:
            yield self.names[0], whole
            return
        parts = (part for one in whole for part in one.chunk(self.below))
        yield from zip(self.names, parts, strict=True)

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Of the pieces of a tensor of this shape."""
        return [tuple(shape) if not self.below else (shape[1] // self.below, *shape[2:])] * len(self.names)

    def read(self, weights: Weights) -> torch.Tensor | Below:
        """The whole; no byte is touched yet."""
        tensors = [weights[name] for name in self.names]
        if not self.below:
            return tensors[0]
        return Below([tensors[at : at + self.below] for at in range(0, len(tensors), self.below)])


class Below(NamedTuple):
    """[E, rows, H] of pieces [r, H]: `pieces[e]`, one below the other."""

    pieces: list[list[torch.Tensor]]

    def narrow(self, dim: int, start: int, length: int, /) -> torch.Tensor:
        """As torch.Tensor.narrow; what is left out is not read."""
        chosen = self.pieces[start : start + length] if dim == 0 else self.pieces
        return torch.stack([torch.cat(list(_narrowed(some, dim, start, length))) for some in chosen])

    def whole(self) -> torch.Tensor:
        return self.narrow(0, 0, len(self.pieces))


def _narrowed(some: Iterable[torch.Tensor], dim: int, start: int, length: int) -> Iterator[torch.Tensor]:
    """Of one index, what rows (dim 1) or columns (dim 2) of its pieces are wanted."""
    first = 0
    for piece in some:
        if dim == 1:
            yield piece[max(0, start - first) : max(0, start + length - first)]
        else:
            yield piece.narrow(1, start, length) if dim == 2 else piece
        first += piece.shape[0]


def never_apart(model: torch.nn.Module) -> set[int]:
    """The tensors of experts that hold gates and ups in turn, or weights the other way round: what is stored for one
    expert is no part of these, even where the shapes are."""
    found = set[int]()
    for module in model.modules():
        experts = module._model[0] if isinstance(module, TensorParallelExperts) else module
        if not getattr(experts, "is_concatenated", True) or getattr(experts, "is_transposed", False):
            found |= {id(one) for one in module.parameters(recurse=False)}
    return found


def find(weights: Weights, names: Sequence[str], shape: Sequence[int], *, together: bool = False) -> Stored | None:
    """How a checkpoint has a tensor of this shape, whose model has it under each of `names`; None where it has none.

    One that is there in part, or of another shape, is refused. `together`: it is not looked for in pieces.
    """
    for found in (Stored((other,)) for name in names for other in _named(name)):
        if found.names[0] in weights:
            return _checked(weights, found, shape)
    for found in () if together else (one for name in names for one in _one_by_one(name, shape)):
        missing = [one for one in found.names if one not in weights]
        if not missing:
            return _checked(weights, found, shape)
        if len(missing) < len(found.names):
            must = f"one with all {shape[0]} experts of a layer"
            raise InvalidArgument(argument="path", was=f"a checkpoint without {told(missing)}", must=must)
    return None


def _named(name: str) -> Iterator[str]:
    yield name
    if _BLOCKS[0] in name:
        yield name.replace(*_BLOCKS)


def _one_by_one(name: str, shape: Sequence[int]) -> Iterator[Stored]:
    before, experts, held = name.rpartition(_EXPERTS)
    if not experts or len(shape) != 3:
        return
    for spelled in _ONE_BY_ONE.get(held, ()):
        if shape[1] % len(spelled) == 0:
            for block in _named(f"{before}{experts}"):
                pieces = (f"{block}{expert}.{one}.weight" for expert in range(shape[0]) for one in spelled)
                yield Stored(tuple(pieces), len(spelled))


def _checked(weights: Weights, found: Stored, shape: Sequence[int]) -> Stored:
    for name, must in zip(found.names, found.shapes(shape), strict=True):
        if weights.shape(name) != must:
            was = f"of shape {list(weights.shape(name))} in the checkpoint"
            raise InvalidArgument(argument=name, was=was, must=str(list(must)))
    return found


def told(names: Sequence[str]) -> str:
    """Some names, for an error."""
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return ", ".join(names[:_TOLD]) + more
