"""Take a model that exists to tensor parallel: layers that a plan names are replaced by their shards.

    ut.nn.parallelize(model, {"*.q_proj": ut.nn.Column(unit="head_dim"), "*.o_proj": ut.nn.Row(unit="head_dim")})

A plan maps patterns (as of a shell: `*` is any text, dots too) of module names to what becomes of them. Every rank
holds the whole model before, with the same weights, and its shards after. A pattern that matches nothing is refused: a
plan that silently did nothing would look like one that works.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument
from ..fabric.registry import as_group
from ..ops.operands import check_dtype
from .held import carry_hooks, sum_gradients
from .linear import ColumnParallelLinear, RowParallelLinear
from .parallel_experts import TensorParallelExperts, cuts_of
from .sharded import Cut, Sharded, check_strategy
from .vocabulary import VocabularyParallelEmbedding, cut_of

if TYPE_CHECKING:
    from .sharded import AnyGroup

Unit = int | str | tuple[str, ...]
"""What stays together: a number, or attributes of the module around the layer, multiplied."""


Optional = bool | str
"""Whether a model may have none; or the pattern of the plan that must match something then, in its place."""


@dataclass(frozen=True)
class Column:
    """Cut by columns of the result. `gather_output`: every rank gets all of them."""

    unit: Unit = 1
    gather_output: bool = False
    sequence_parallel: bool = False
    optional: Optional = False


@dataclass(frozen=True)
class Row:
    """Cut by the inner dimension; the result is summed, or summed and scattered in the sequence-parallel form."""

    unit: Unit = 1
    sequence_parallel: bool = False
    optional: Optional = False


@dataclass(frozen=True)
class Vocabulary:
    """An embedding, cut by its rows; what it gives is summed, or summed and scattered in the sequence-parallel form. A
    last layer with the same weight is a `Column`."""

    unit: Unit = 1
    sequence_parallel: bool = False
    optional: Optional = False


@dataclass(frozen=True)
class Experts:
    """Experts held as two tensors, `gate_up_proj` and `down_proj`: each is cut by its inner dimension.

    `unit`: eight numbers that stay together keep rows of 16-bit weights on 16 bytes, as grouped matmuls want them.
    """

    unit: Unit = 8
    optional: Optional = False


@dataclass(frozen=True)
class Shared:
    """Left whole on every rank, where it sees only the rank's part: gradients of its parameters are summed over ranks.

    Norms of single heads, and, in the sequence-parallel form, norms of rows. What is summed is what calls of the module
    make of them, not what others do with its parameters. `unit`: how many elements each has, None: any. `optional`: a
    model may have none.
    """

    unit: Unit | None = None
    optional: Optional = False


Parted = Column | Row | Vocabulary | Experts
Style = Parted | Shared

TRANSFORMER: Mapping[str, Style] = {
    "*.q_proj": Column(unit=("head_dim", "num_key_value_groups")),
    "*.k_proj": Column(unit="head_dim"),
    "*.v_proj": Column(unit="head_dim"),
    "*.o_proj": Row(unit=("head_dim", "num_key_value_groups")),
    "*.gate_proj": Column(optional="*.experts"),
    "*.up_proj": Column(optional="*.experts"),
    "*.down_proj": Row(optional="*.experts"),
    "*.experts": Experts(optional="*.down_proj"),
    "*.self_attn.q_norm": Shared(unit="head_dim", optional=True),
    "*.self_attn.k_norm": Shared(unit="head_dim", optional=True),
}
"""For decoders whose layers are named as in Llama (Qwen, Mistral, and with experts Mixtral and others): query heads
follow their keys."""

VOCABULARY: Mapping[str, Style] = {"*.embed_tokens": Vocabulary(), "lm_head": Column(gather_output=True)}
"""The first and the last layer of such a model, whether they share their weight or not: {**TRANSFORMER, **VOCABULARY}.
"""


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
    units: dict[str, int] = {}
    for name, style in chosen.items():  # all of them first: what is refused leaves the model as it was
        if style.unit is None:
            continue
        units[name] = _unit(style.unit, model.get_submodule(name.rpartition(".")[0]), name)
        if isinstance(style, Shared):
            _refuse_parts(model.get_submodule(name), units[name], name)
        else:
            with _named(name):
                _refuse_uncut(model.get_submodule(name), style, units[name], on.size)
    tied = _tied(model, chosen, units)
    shards: dict[int, list[tuple[Sharded, str]]] = {}  # of what is tied, and who holds it
    for name, style in chosen.items():
        parent, _, child = name.rpartition(".")
        around = model.get_submodule(parent)
        layer = getattr(around, child)
        if isinstance(style, Shared):
            sum_gradients(layer, on.name)
            continue
        with _named(name):
            made = _made(layer, style, units[name], on.name, strategy)
        for own, whole in layer.named_parameters(recurse=False):
            if id(whole) in tied:
                made.tie(own, shards.setdefault(id(whole), []))
        if not isinstance(style, Experts):  # the model's own, which are called inside, keep theirs
            carry_hooks(layer, made)
        setattr(around, child, made.train(layer.training))
    return model


@contextmanager
def _named(name: str) -> Iterator[None]:
    """A refusal inside tells of the module."""
    try:
        yield
    except InvalidArgument as error:
        facts = error.facts
        raise InvalidArgument(**{**facts, "argument": f"{facts['argument']} of {name}"}) from error


def _refuse_parts(layer: torch.nn.Module, unit: int, name: str) -> None:
    """What is left whole must be of what a rank holds whole: a norm over all heads would need those of other ranks."""
    for own, parameter in layer.named_parameters():
        if parameter.numel() != unit:
            must = f"of {unit}: ranks hold whole heads, and no rank has what a norm over all of them needs"
            raise InvalidArgument(argument=f"{name}.{own}", was=f"of {parameter.numel()} elements", must=must)


def _refuse_uncut(layer: torch.nn.Module, style: Parted, unit: int, ranks: int) -> None:
    if isinstance(style, Experts):
        cuts_of(layer, unit, ranks)
    elif isinstance(style, Vocabulary):
        assert isinstance(layer, torch.nn.Embedding), "_chosen takes nothing else"
        _refuse_computed(layer)
        cut_of(layer, unit, ranks)
    else:
        assert isinstance(layer, torch.nn.Linear), "_chosen takes nothing else"
        _refuse_computed(layer)
        check_dtype("weight", layer.weight.dtype)
        if isinstance(style, Column):
            Cut.of("out_features", 0, (layer.out_features,), (unit,), ranks)
        else:
            Cut.of("in_features", 1, (layer.in_features,), (unit,), ranks)


def _refuse_computed(layer: torch.nn.Module) -> None:
    """What makes a weight anew before each call (pruning, weight_norm) does not know of shards."""
    if not isinstance(layer._parameters.get("weight"), torch.nn.Parameter):
        must = "a parameter: prune.remove, remove_weight_norm or remove_parametrizations makes it one"
        raise InvalidArgument(argument="weight", was="computed from other tensors", must=must)


def _chosen(model: torch.nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            must = "a ut.nn.Column, Row, Vocabulary, Experts or Shared"
            raise InvalidArgument(argument=f"plan[{pattern!r}]", was=repr(style), must=must)
    matches = {pattern: _matched(model, pattern, style) for pattern, style in plan.items()}
    found: dict[str, Style] = {}
    for pattern, style in plan.items():
        if not matches[pattern]:
            _refuse_missing(pattern, style.optional, matches)
        for name in matches[pattern]:
            module = model.get_submodule(name)
            if isinstance(style, (Column, Row)) and not isinstance(module, torch.nn.Linear):
                must = "a torch.nn.Linear: a narrower pattern leaves it out"
                raise InvalidArgument(argument=f"{name}, matched by {pattern!r},", was=type(module).__name__, must=must)
            if isinstance(style, Vocabulary) and type(module) is not torch.nn.Embedding:  # one of its kind adds to it
                must = "a torch.nn.Embedding: a narrower pattern leaves it out"
                raise InvalidArgument(argument=f"{name}, matched by {pattern!r},", was=type(module).__name__, must=must)
            found.setdefault(name, style)
    return found


def _matched(model: torch.nn.Module, pattern: str, style: Style) -> list[str]:
    """Names of modules. Experts that are modules of their own, in a list, are no match: their layers have names."""
    left = (Sharded, torch.nn.ModuleList) if isinstance(style, Experts) else Sharded
    named = [name for name, module in model.named_modules() if name and not isinstance(module, left)]
    return [name for name in named if fnmatch.fnmatchcase(name, pattern)]


def _refuse_missing(pattern: str, optional: Optional, matches: Mapping[str, list[str]]) -> None:
    """Of a pattern that matches nothing."""
    if optional is True or (isinstance(optional, str) and matches.get(optional)):
        return
    other = f", or {optional!r} must match one" if optional else ""
    must = f"one that matches a module{other}; model.named_modules() lists them"
    raise InvalidArgument(argument="a pattern of plan", was=repr(pattern), must=must)


def _tied(model: torch.nn.Module, chosen: Mapping[str, Style], units: Mapping[str, int]) -> set[int]:
    """Which parameters several modules share that all cut alike. One that is cut for some of them only is refused."""
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    found = set[int]()
    for name in (one for one, style in chosen.items() if not isinstance(style, Shared)):
        for own, parameter in model.get_submodule(name).named_parameters():
            shared = holders[id(parameter)]
            if len(shared) == 1:
                continue
            cuts = {_cuts_rows(chosen, units, *one.rpartition(".")[::2]) for one in shared}
            if len(cuts) > 1 or None in cuts:
                must = "a weight of its own: leave the layer out of the plan, or untie it"
                modules = {id(model.get_submodule(one.rpartition(".")[0])) for one in shared}
                if own == "weight" and len(modules) == len(shared) and isinstance(chosen[name], (Column, Vocabulary)):
                    must = (
                        "a weight of its own, or one that all its holders cut by rows alike: name each in the plan"
                        " (ut.nn.Vocabulary, ut.nn.Column), leave all out of it, or untie it"
                    )
                raise InvalidArgument(argument=f"{name}.{own}", was=f"shared by {', '.join(shared)}", must=must)
            found.add(id(parameter))
    return found


def _cuts_rows(chosen: Mapping[str, Style], units: Mapping[str, int], holder: str, own: str) -> int | None:
    """In which units the plan cuts the rows of a module's weight, if it does."""
    rows = isinstance(chosen.get(holder), (Column, Vocabulary)) and own == "weight"
    return units[holder] if rows else None


def _unit(unit: Unit, around: torch.nn.Module, name: str) -> int:
    if isinstance(unit, int):
        return unit
    found = 1
    for attribute in (unit,) if isinstance(unit, str) else unit:
        value = getattr(around, attribute, None)
        if not isinstance(value, int):
            must = f"a whole number: {type(around).__name__} has none of that name, so give the unit as a number"
            raise InvalidArgument(argument=f"attribute {attribute!r} around {name}", was=repr(value), must=must)
        found *= value
    return found


def _made(layer: torch.nn.Module, style: Parted, unit: int, group: str, strategy: str) -> Sharded:
    if isinstance(style, Experts):
        return TensorParallelExperts(layer, group=group, unit=unit, strategy=strategy)
    if isinstance(style, Vocabulary):
        assert isinstance(layer, torch.nn.Embedding), "_chosen takes nothing else"
        return VocabularyParallelEmbedding.from_embedding(
            layer, group=group, unit=unit, strategy=strategy, sequence_parallel=style.sequence_parallel
        )
    assert isinstance(layer, torch.nn.Linear), "_chosen takes nothing else"
    if isinstance(style, Row):
        return RowParallelLinear.from_linear(
            layer, group=group, unit=unit, strategy=strategy, sequence_parallel=style.sequence_parallel
        )
    return ColumnParallelLinear.from_linear(
        layer, group=group, unit=unit, strategy=strategy, sequence_parallel=style.sequence_parallel,
        gather_output=style.gather_output,
    )  # fmt: skip
