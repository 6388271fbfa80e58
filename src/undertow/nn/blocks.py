"""What a plan does to the modules of a model, read before anything is changed: sizes, and what stands beside them.

Between a `Column` and the `Row` that follows it a rank sees its own part only. What else computes there is right if it
goes number by number or head by head, and its parameters get their gradients from that part alone. A plan for models
that its author does not know must therefore name all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

import torch

from ..errors import InvalidArgument
from ..plan.plan import split
from .sharded import Sharded
from .slices import is_shard
from .styles import Column, Row, Slice, Style, Unit, Vocabulary


class Sizes(NamedTuple):
    """Of the dimension that is cut: the sizes of its parts, and of what stays together in each."""

    parts: tuple[int, ...]
    units: tuple[int, ...]

    @property
    def number(self) -> int:
        """Of what stays together."""
        return self.parts[0] // self.units[0]


def sizes_of(model: torch.nn.Module, chosen: Mapping[str, Style]) -> dict[str, Sizes]:
    """Of all that is cut, but for experts, whose tensors tell."""
    found: dict[str, Sizes] = {}
    later: list[str] = []
    for name, style in chosen.items():
        if isinstance(style, (Column, Row, Vocabulary, Slice)):
            if isinstance(style, Vocabulary) or not style.like:
                found[name] = _sizes(model, name, style, None)
            else:
                later.append(name)
    while later:
        left = [name for name in later if not _resolved(model, chosen, found, name)]
        if len(left) == len(later):
            must = "one whose `like` leads to a layer with a unit"
            raise InvalidArgument(argument="plan", was=f"one in which {left[0]} is like itself", must=must)
        later = left
    return found


def _resolved(model: torch.nn.Module, chosen: Mapping[str, Style], found: dict[str, Sizes], name: str) -> bool:
    style = chosen[name]
    assert isinstance(style, (Column, Row, Slice)), "sizes_of takes nothing else"
    others = [beside(name, one) for one in style.like]
    other = next((one for one in others if one in chosen and one != name), None)
    if other is not None and other not in found:
        return False
    found[name] = _sizes(model, name, style, None if other is None else (other, found[other].number))
    return True


def beside(name: str, other: str) -> str:
    """The name of another child of the same module."""
    return ".".join([*name.split(".")[:-1], other])


def _sizes(
    model: torch.nn.Module, name: str, style: Column | Row | Vocabulary | Slice, like: tuple[str, int] | None
) -> Sizes:
    argument, size = _dimension(model, name, style)
    argument = f"{argument} of {name}"
    if like is not None:
        other, number = like
        if size % number:
            raise InvalidArgument(
                argument=argument, was=str(size), must=f"a multiple of {number}, the units of {other}"
            )
        return Sizes((size,), (size // number,))
    around = model.get_submodule(name.rpartition(".")[0])
    sections = style.sections if isinstance(style, Column) else ()
    units = tuple(unit_of(one, around, name) for one in sections or (style.unit,))
    together = sum(units)
    if min(units) < 1 or size % together:
        what = "the units of its sections" if sections else "its unit"
        raise InvalidArgument(argument=argument, was=str(size), must=f"a multiple of {together}, {what}")
    return Sizes(tuple(size // together * one for one in units), units)


def _dimension(model: torch.nn.Module, name: str, style: Style) -> tuple[str, int]:
    if isinstance(style, Slice):
        shape = model.get_parameter(name).shape
        return "shape[0]", shape[0] if shape else 1
    layer = model.get_submodule(name)
    if isinstance(style, Vocabulary):
        assert isinstance(layer, torch.nn.Embedding), "what is chosen is no other"
        return "num_embeddings", layer.num_embeddings
    assert isinstance(layer, torch.nn.Linear), "what is chosen is no other"
    return ("out_features", layer.out_features) if isinstance(style, Column) else ("in_features", layer.in_features)


def refuse_torn_apart(chosen: Mapping[str, Style], sizes: Mapping[str, Sizes], ranks: int) -> None:
    """Layers of one module that are cut by heads: a rank has the same share of each, or what it has does not belong
    together."""
    first: dict[str, str] = {}
    for name, style in chosen.items():
        if not isinstance(style, (Column, Row)) or not _by_heads(style):
            continue
        other = first.setdefault(name.rpartition(".")[0], name)
        if _shares(sizes[name].number, ranks) != _shares(sizes[other].number, ranks):
            must = f"of {sizes[other].number}, as {other} is, so that ranks hold what belongs together: set its `unit`"
            raise InvalidArgument(argument=name, was=f"of {sizes[name].number} units", must=must)


def _by_heads(style: Column | Row) -> bool:
    return bool(style.like) or not isinstance(style.unit, int) or (isinstance(style, Column) and bool(style.sections))


def _shares(number: int, ranks: int) -> list[Fraction]:
    return [Fraction(stop, number) for _, stop in split(number, ranks)]


def refuse_unnamed(model: torch.nn.Module, chosen: Mapping[str, Style]) -> None:
    """What the plan says nothing of, beside layers that want all named."""
    around_others = {prefix for name in chosen for prefix in _prefixes(name)}
    for name, style in chosen.items():
        if not isinstance(style, (Column, Row)) or not style.all_named:
            continue
        around = model.get_submodule(name.rpartition(".")[0])
        for own, _ in around.named_parameters(recurse=False):
            inside = beside(name, own)
            if inside not in chosen and not is_shard(model, inside):
                must = "ut.nn.Slice for one with a part for each head, ut.nn.Whole for one that meets none of them"
                _refuse_unnamed(inside, name, must)
        for own, child in around.named_children():
            inside = beside(name, own)
            known = inside in chosen or inside in around_others or isinstance(child, Sharded)
            if not known and any(True for _ in child.parameters()):
                must = (
                    "ut.nn.Shared for one that sees heads of this rank, ut.nn.Whole for one that sees what all ranks"
                    " have, ut.nn.Column or Row for one that is cut with them"
                )
                _refuse_unnamed(inside, name, must)


def _prefixes(name: str) -> Iterator[str]:
    """Of the modules around it."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end])


def _refuse_unnamed(name: str, cut: str, styles: str) -> None:
    must = f"named in it, too ({styles}); narrower patterns, or another part of the model, leave it whole"
    raise InvalidArgument(argument=name, was=f"left out of a plan that cuts {cut} beside it", must=must)


def unit_of(unit: Unit, around: torch.nn.Module, name: str) -> int:
    """As a number."""
    if isinstance(unit, int):
        return unit
    found = 1
    for attributes in (unit,) if isinstance(unit, str) else unit:
        total = 0
        for attribute in attributes.split("+"):
            value = getattr(around, attribute.strip(), None)
            if not isinstance(value, int):
                must = f"a whole number: {type(around).__name__} has none of that name, so give the unit as a number"
                argument = f"attribute {attribute.strip()!r} around {name}"
                raise InvalidArgument(argument=argument, was=repr(value), must=must)
            total += value
        found *= total
    return found
