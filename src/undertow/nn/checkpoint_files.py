"""Checkpoints of the ordinary model in files, read and written without a rank that ever holds the model.

with ut.nn.without_weights():
    model = ...                                  # any model; its parameters take no memory
ut.nn.parallelize(model, plan)
ut.nn.load_checkpoint(model, "folder")           # each rank reads what it holds
ut.nn.save_checkpoint(model, "other")            # one whole tensor after the other, by one rank
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..errors import CheckpointFailed, InvalidArgument
from ..fabric.registry import named
from . import weights_file
from .checkpoint import put_together, state_and_shards
from .embedding import ShardedEmbeddingBag, bags_of
from .sharded import Sharded
from .weights_file import Listed, Weights

FILE_BYTES = 5 << 30
_TOLD = 5  # names in an error


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Parameters of modules that are made inside hold nothing (`meta`); buffers are as ever."""
    real = torch.nn.Module.register_parameter

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        real(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            empty = parameter.detach().to("meta")
            module._parameters[name] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = real  # type: ignore[method-assign]


# -- reading -----------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """What this rank holds of a tensor, which names that may have, and what finds it in the whole."""

    keys: tuple[str, ...]
    held: torch.Tensor
    shape: tuple[int, ...]
    take: Callable[[torch.Tensor], torch.Tensor]


def load_checkpoint(model: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Fill `model` with the weights of a safetensors file, or of a folder of them, as the ordinary model has them.

    Each rank reads what it holds of them. Parameters without memory (`without_weights`) get it on their group's device.
    `strict`: all that the model has must be there, and nothing else. What is refused leaves the model as it was, on all
    ranks. Collective over the groups of the model's layers.
    """
    groups = _groups(model)
    with _by_all(groups, "read"):
        weights = Weights(path)
        parts = [(key, part) for part in _parts(model) if (key := _found(part, weights)) is not None]
        _refuse_others(model, weights, strict)
    device = named(groups[0]).device if groups else torch.device("cpu")
    holders = _holders(model)
    with torch.no_grad():
        for key, part in parts:
            mine = part.take(weights[key])
            if part.held.is_meta:
                _hold(holders[id(part.held)], part.held, mine.to(device, part.held.dtype, copy=True))
            else:
                part.held.copy_(mine)


def _parts(model: torch.nn.Module) -> Iterator[_Part]:
    state, shards = state_and_shards(model)
    keys: dict[int, list[str]] = {}
    for key, held in state.items():
        keys.setdefault(id(held), []).append(key)
    for key, held in state.items():
        if not isinstance(held, torch.Tensor) or keys[id(held)][0] != key:
            continue
        if isinstance(held, DTensor):
            raise InvalidArgument(argument=key, was="a DTensor", must="no such yet: load before fully_shard")
        if id(held) in shards:
            yield _Part(tuple(keys[id(held)]), held, shards[id(held)].whole_shape(held), shards[id(held)].take)
        else:
            yield _Part(tuple(keys[id(held)]), held, tuple(held.shape), _all_of_it)
    for prefix, bag in bags_of(model):
        for number, piece, take in bag.parts():
            table = bag.tables[number]
            yield _Part((prefix + bag.table_keys[number],), piece, (table.rows, table.dim), take)


def _all_of_it(whole: torch.Tensor) -> torch.Tensor:
    return whole


def _found(part: _Part, weights: Weights) -> str | None:
    """By which of its names the checkpoint has it."""
    key = next((one for one in part.keys if one in weights), None)
    if key is not None and weights.shape(key) != part.shape:
        was = f"of shape {list(weights.shape(key))} in the checkpoint"
        raise InvalidArgument(argument=key, was=was, must=str(list(part.shape)))
    return key


def _refuse_others(model: torch.nn.Module, weights: Weights, strict: bool) -> None:
    """What the model has and the checkpoint has not, and the other way round. The same on all ranks."""
    state, _ = state_and_shards(model)
    tensors = {key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
    there = {id(one) for key, one in tensors.items() if key in weights}
    tables = {prefix + key for prefix, bag in bags_of(model) for key in bag.table_keys}
    missing = [key for key, one in tensors.items() if id(one) not in there]
    empty = [key for key in missing if tensors[key].is_meta]
    if empty:
        _refuse(f"a checkpoint without {_names(empty)}", "one with all that has no memory yet")
    nowhere = [name for name, one in model.named_buffers() if one.is_meta and name not in tensors]
    if nowhere:
        must = "made under ut.nn.without_weights(), which leaves buffers as they are"
        raise InvalidArgument(argument="model", was=f"one without memory for {_names(nowhere)}", must=must)
    missing += sorted(tables - weights.names)
    unknown = sorted(weights.names - tensors.keys() - tables)
    must = "one of this model; strict=False takes what there is"
    if strict and missing:
        _refuse(f"a checkpoint without {_names(missing)}", must)
    if strict and unknown:
        _refuse(f"a checkpoint with {_names(unknown)}, which the model has not", must)


def _refuse(was: str, must: str) -> None:
    raise InvalidArgument(argument="path", was=was, must=must)


def _names(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _TOLD} more" if len(keys) > _TOLD else ""
    return ", ".join(keys[:_TOLD]) + more


Holder = tuple[dict[str, Any], str]


def _holders(model: torch.nn.Module) -> dict[int, list[Holder]]:
    """Where modules hold each of their tensors."""
    found: dict[int, list[Holder]] = {}
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            for name, one in place.items():
                found.setdefault(id(one), []).append((place, name))
    return found


def _hold(holders: list[Holder], before: torch.Tensor, tensor: torch.Tensor) -> None:
    """In every place of one that had no memory: what several modules shared they share."""
    is_parameter = isinstance(before, torch.nn.Parameter)
    now = torch.nn.Parameter(tensor, requires_grad=before.requires_grad) if is_parameter else tensor
    for place, name in holders:
        place[name] = now


# -- writing -----------------------------------------------------------------------------------------------------------


def save_checkpoint(model: torch.nn.Module, path: str | os.PathLike[str], *, file_bytes: int = FILE_BYTES) -> None:
    """Write what the ordinary model would have to a folder: safetensors files of about `file_bytes`, and their index.

    Rank 0 of the job writes; no rank holds more than one whole tensor. What modules share is written once, under its
    first name. Collective over the groups of the model's layers; those of rank 0 are told when all is written.
    """
    groups, folder = _groups(model), Path(path)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    listed: dict[Listed, Callable[[], torch.Tensor]] = {}
    with _by_all(groups, "write"):
        if file_bytes < 1:
            raise InvalidArgument(argument="file_bytes", was=file_bytes, must="at least 1")
        listed = dict(_listed(model))
        weights_file.refuse_unwritable(listed)
        if writes:
            weights_file.refuse_folder(folder)
    left = iter(listed)
    with _by_all(groups, "write"):
        try:
            if writes:
                weights_file.write(folder, list(listed), lambda _: listed[next(left)](), file_bytes)
        finally:  # also where the disk is full: the others wait for this rank's part of each tensor
            for one in left:
                listed[one]()


def _listed(model: torch.nn.Module) -> Iterator[tuple[Listed, Callable[[], torch.Tensor]]]:
    """All that is written, in one order on all ranks, and what puts each together. Collective when it is called."""
    state, shards = state_and_shards(model)
    seen = set[int]()
    for key, one in state.items():
        if isinstance(one, torch.Tensor) and id(one) not in seen:
            seen.add(id(one))
            shape = shards[id(one)].whole_shape(one) if id(one) in shards else tuple(one.shape)
            yield Listed(key, one.dtype, shape), partial(put_together, one, shards.get(id(one)))
    for prefix, bag in bags_of(model):
        dtype = getattr(torch, bag.layout.dtype)
        for number, (table, key) in enumerate(zip(bag.tables, bag.table_keys, strict=True)):
            yield Listed(prefix + key, dtype, (table.rows, table.dim)), partial(bag.whole_table, number)


# -- all ranks ---------------------------------------------------------------------------------------------------------


def _groups(model: torch.nn.Module) -> list[str]:
    """Of the model's layers, in the order of its modules."""
    kinds = (Sharded, ShardedEmbeddingBag)
    return list(dict.fromkeys(module.group_name for module in model.modules() if isinstance(module, kinds)))


@contextlib.contextmanager
def _by_all(groups: Sequence[str], what: str) -> Iterator[None]:
    """What fails inside on one rank fails on all of its groups: none may go on alone."""
    failure: Exception | None = None
    try:
        yield
    except (InvalidArgument, OSError) as error:
        failure = error
    for name in groups:
        group = named(name)
        for rank, reason in enumerate(
            group.exchange("" if failure is None else str(failure), f"to {what} a checkpoint")
        ):
            if reason and failure is None:
                failure = CheckpointFailed(rank=rank, what=what, reason=reason)
    if failure is not None:
        raise failure
