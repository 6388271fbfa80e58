"""Take a model that exists to tensor parallel: layers that a plan names are replaced by their shards.

    ut.nn.parallelize(model, {"*.q_proj": ut.nn.Column(unit="head_dim"), "*.o_proj": ut.nn.Row(unit="head_dim")})

A plan maps patterns (as of a shell: `*` is any text, dots too) of module names to what becomes of them. Every rank
holds the whole model before, with the same weights, and its shards after. A pattern that matches nothing is refused: a
plan that silently did nothing would look like one that works.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument
from ..fabric.registry import as_group
from ..ops.operands import check_dtype
from .blocks import Sizes, beside, refuse_torn_apart, refuse_unnamed, sizes_of, unit_of
from .counts import count_own
from .held import carry_hooks, sum_gradients
from .linear import ColumnParallelLinear, RowParallelLinear
from .parallel_experts import TensorParallelExperts, cuts_of
from .sharded import Cut, Sharded, check_strategy
from .slices import is_shard, slice_parameter
from .styles import Column, Experts, Optional, Row, Shared, Slice, Style, Vocabulary, Whole
from .vocabulary import VocabularyParallelEmbedding, cut_of
from .whole import gather_for, spread

if TYPE_CHECKING:
    from .sharded import AnyGroup


def parallelize(
    model: torch.nn.Module, plan: Mapping[str, Style], *, group: AnyGroup = None, strategy: str = "auto"
) -> torch.nn.Module:
    """Replace, in place, every layer of `model` that `plan` names; returns the model.

    The first pattern that matches a module counts. `strategy` is that of all the layers' operators. Hooks of a layer's
    calls are carried over; they see what this rank has.
    """
    on = as_group(group)
    check_strategy(strategy)
    chosen = _chosen(model, plan)
    sizes = sizes_of(model, chosen)  # all of them first: what is refused leaves the model as it was
    refuse_unnamed(model, chosen)
    refuse_torn_apart(chosen, sizes, on.size)
    gathered, spreads = dict[str, Cut](), dict[str, int]()
    for name, style in chosen.items():
        if isinstance(style, Shared):
            cut = _gathered(model, name, style, sizes, on.size)
            gathered |= {} if cut is None else {name: cut}
            continue
        if isinstance(style, Whole):
            if style.spread is not None:
                spreads[name] = unit_of(style.spread, model.get_submodule(name.rpartition(".")[0]), name)
            continue
        with _named(name):
            if isinstance(style, Experts):
                cuts_of(model.get_submodule(name), _experts_unit(model, name, style), on.size)
            else:
                _refuse_uncut(model, name, style, sizes[name], on.size)
    tied = _tied(model, chosen, sizes)
    shards: dict[int, list[tuple[Sharded, str]]] = {}  # of what is tied, and who holds it
    for name, style in chosen.items():
        parent, _, child = name.rpartition(".")
        around = model.get_submodule(parent)
        layer = getattr(around, child)
        if isinstance(style, Shared):
            if name in gathered:
                gather_for(layer, gathered[name], on.name)
            if any(True for _ in layer.parameters()):  # activations seldom have any
                sum_gradients(layer, on.name)
            continue
        if isinstance(style, Whole):
            if name in spreads:
                spread(layer, spreads[name], on.name)
            continue
        if isinstance(style, Slice):
            slice_parameter(around, child, _cut_of_slice(sizes[name], on.size), on.name)
            continue
        with _named(name):
            if isinstance(style, Experts):
                made: Sharded = TensorParallelExperts(
                    layer, group=on.name, unit=_experts_unit(model, name, style), strategy=strategy
                )
            else:
                made = _made(layer, style, sizes[name], on.name, strategy)
        for own, whole in layer.named_parameters(recurse=False):
            if id(whole) in tied:
                made.tie(own, shards.setdefault(id(whole), []))
        if not isinstance(style, Experts):  # the model's own, which are called inside, keep theirs
            carry_hooks(layer, made)
        setattr(around, child, made.train(layer.training))
        if isinstance(style, Column):
            for attribute in style.counts:
                count_own(around, attribute, sizes[name].number, on)
    return model


@contextmanager
def _named(name: str) -> Iterator[None]:
    """A refusal inside tells of the module."""
    try:
        yield
    except InvalidArgument as error:
        facts = error.facts
        raise InvalidArgument(**{**facts, "argument": f"{facts['argument']} of {name}"}) from error


def _gathered(model: torch.nn.Module, name: str, style: Shared, sizes: Mapping[str, Sizes], ranks: int) -> Cut | None:
    """How ranks hold what this one needs all of, if it does; else it must be of what a rank holds whole."""
    if style.unit is None and style.gathered is None:
        return None
    layer = model.get_submodule(name)
    unit = None if style.unit is None else unit_of(style.unit, model.get_submodule(name.rpartition(".")[0]), name)
    other = None if style.gathered is None else sizes.get(beside(name, style.gathered))
    columns = None if other is None else sum(other.parts)
    shapes = {f"{name}.{own}": list(one.shape) for own, one in layer.named_parameters()}
    if not shapes and isinstance(layer, (torch.nn.LayerNorm, torch.nn.RMSNorm)):  # without parameters
        shapes = {name: list(layer.normalized_shape)}
    if all(math.prod(shape) == unit for shape in shapes.values()):
        return None
    if other is not None and all(shape == [columns] for shape in shapes.values()):
        return Cut.of("a norm over all", 0, other.parts, other.units, ranks)
    own, shape = next((own, shape) for own, shape in shapes.items() if math.prod(shape) != unit)
    also = "" if other is None else f", or {[columns]} of all heads"
    must = f"of {unit}{also}: ranks hold whole heads, and no rank has what a norm over all of them needs"
    raise InvalidArgument(argument=own, was=f"of {math.prod(shape)} elements", must=must)


def _experts_unit(model: torch.nn.Module, name: str, style: Experts) -> int:
    return unit_of(style.unit, model.get_submodule(name.rpartition(".")[0]), name)


def _cut_of_slice(sizes: Sizes, ranks: int) -> Cut:
    return Cut.of("shape[0]", 0, sizes.parts, sizes.units, ranks)


def _refuse_uncut(
    model: torch.nn.Module, name: str, style: Column | Row | Vocabulary | Slice, sizes: Sizes, ranks: int
) -> None:
    if isinstance(style, Slice):
        _cut_of_slice(sizes, ranks)
        return
    layer = model.get_submodule(name)
    _refuse_computed(layer)
    if isinstance(style, Vocabulary):
        assert isinstance(layer, torch.nn.Embedding), "_chosen takes nothing else"
        cut_of(layer, sizes.units[0], ranks)
        return
    check_dtype("weight", layer.get_parameter("weight").dtype)
    column = isinstance(style, Column)
    Cut.of("out_features" if column else "in_features", 0 if column else 1, sizes.parts, sizes.units, ranks)


def _refuse_computed(layer: torch.nn.Module) -> None:
    """What makes a weight anew before each call (pruning, weight_norm) does not know of shards."""
    if not isinstance(layer._parameters.get("weight"), torch.nn.Parameter):
        must = "a parameter: prune.remove, remove_weight_norm or remove_parametrizations makes it one"
        raise InvalidArgument(argument="weight", was="computed from other tensors", must=must)


def _chosen(model: torch.nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            must = "a ut.nn.Column, Row, Vocabulary, Experts, Slice, Shared or Whole"
            raise InvalidArgument(argument=f"plan[{pattern!r}]", was=repr(style), must=must)
    matches: dict[str, list[str]] = {}
    whole = set[str]()  # by an earlier pattern, so that a later one matches nothing there
    for pattern, style in plan.items():
        matches[pattern] = [name for name in _matched(model, pattern, style) if name not in whole]
        whole |= set(matches[pattern]) if isinstance(style, Whole) else set()
    found: dict[str, Style] = {}
    for pattern, style in plan.items():
        if not matches[pattern]:
            _refuse_missing(pattern, style.optional, matches)
        for name in matches[pattern]:
            if isinstance(style, (Slice, Whole)):
                found.setdefault(name, style)
                continue
            module = model.get_submodule(name)
            if isinstance(style, (Column, Row)) and not isinstance(module, torch.nn.Linear):
                must = "a torch.nn.Linear: a narrower pattern leaves it out"
                raise InvalidArgument(argument=f"{name}, matched by {pattern!r},", was=type(module).__name__, must=must)
            if isinstance(style, Vocabulary) and not isinstance(module, torch.nn.Embedding):
                must = "a torch.nn.Embedding: a narrower pattern leaves it out"
                raise InvalidArgument(argument=f"{name}, matched by {pattern!r},", was=type(module).__name__, must=must)
            found.setdefault(name, style)
    return found


def _matched(model: torch.nn.Module, pattern: str, style: Style) -> list[str]:
    """Names of modules, and of parameters where those are meant. Experts that are modules of their own, in a list, are
    no match: their layers have names."""
    left = (Sharded, torch.nn.ModuleList) if isinstance(style, Experts) else Sharded
    named = [name for name, module in model.named_modules() if name and not isinstance(module, left)]
    if isinstance(style, (Slice, Whole)):
        own = [name for name, _ in model.named_parameters() if not is_shard(model, name)]
        named = own if isinstance(style, Slice) else [*named, *own]
    found = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
    if isinstance(style, Column) and style.beside is not None:
        return [name for name in found if hasattr(model.get_submodule(name.rpartition(".")[0]), style.beside)]
    return found


def _refuse_missing(pattern: str, optional: Optional, matches: Mapping[str, list[str]]) -> None:
    """Of a pattern that matches nothing."""
    others = () if isinstance(optional, bool) else (optional,) if isinstance(optional, str) else optional
    if optional is True or any(matches.get(one) for one in others):
        return
    other = f", or {' or '.join(repr(one) for one in others)} must match one" if others else ""
    must = f"one that matches a module{other}; model.named_modules() lists them"
    raise InvalidArgument(argument="a pattern of plan", was=repr(pattern), must=must)


def _tied(model: torch.nn.Module, chosen: Mapping[str, Style], sizes: Mapping[str, Sizes]) -> set[int]:
    """Which parameters several modules share that all cut alike. One that is cut for some of them only is refused."""
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    found = set[int]()
    for name in (one for one, style in chosen.items() if not isinstance(style, (Shared, Whole))):
        for own, parameter in _parameters(model, name, chosen[name]):
            shared = holders[id(parameter)]
            if len(shared) == 1:
                continue
            cuts = {_cuts_rows(chosen, sizes, *one.rpartition(".")[::2]) for one in shared}
            if len(cuts) > 1 or None in cuts:
                must = "a weight of its own: leave the layer out of the plan, or untie it"
                modules = {id(model.get_submodule(one.rpartition(".")[0])) for one in shared}
                if own == "weight" and len(modules) == len(shared) and isinstance(chosen[name], (Column, Vocabulary)):
                    must = (
                        "a weight of its own, or one that all its holders cut by rows alike: name each in the plan"
                        " (ut.nn.Vocabulary, ut.nn.Column), leave all out of it, or untie it"
                    )
                raise InvalidArgument(
                    argument=f"{name}.{own}".rstrip("."), was=f"shared by {', '.join(shared)}", must=must
                )
            found.add(id(parameter))
    return found


def _parameters(model: torch.nn.Module, name: str, style: Style) -> Iterable[tuple[str, torch.nn.Parameter]]:
    if isinstance(style, Slice):
        return [("", model.get_parameter(name))]
    return model.get_submodule(name).named_parameters()


def _cuts_rows(chosen: Mapping[str, Style], sizes: Mapping[str, Sizes], holder: str, own: str) -> Sizes | None:
    """In which units the plan cuts the rows of a module's weight, if it does."""
    rows = isinstance(chosen.get(holder), (Column, Vocabulary)) and own == "weight"
    return sizes[holder] if rows else None


def _made(layer: torch.nn.Module, style: Column | Row | Vocabulary, sizes: Sizes, group: str, strategy: str) -> Sharded:
    if isinstance(style, Vocabulary):
        assert isinstance(layer, torch.nn.Embedding), "_chosen takes nothing else"
        return VocabularyParallelEmbedding.from_embedding(
            layer, group=group, unit=sizes.units[0], strategy=strategy, sequence_parallel=style.sequence_parallel
        )
    assert isinstance(layer, torch.nn.Linear), "_chosen takes nothing else"
    if isinstance(style, Row):
        return RowParallelLinear.from_linear(
            layer, group=group, unit=sizes.units[0], strategy=strategy, sequence_parallel=style.sequence_parallel
        )
    return ColumnParallelLinear.from_linear(
        layer, group=group, parts=sizes.parts, unit=sizes.units, strategy=strategy,
        sequence_parallel=style.sequence_parallel, gather_output=style.gather_output,
    )  # fmt: skip
