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
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..errors import CheckpointFailed, InvalidArgument
from ..fabric.logs import get_logger
from ..fabric.registry import as_group, named
from ..fabric.works import InThread
from . import stored, weights_file
from .checkpoint import put_together, state_and_shards
from .embedding import ShardedEmbeddingBag, bags_of
from .sharded import Sharded
from .stored import Below, Stored, told
from .weights_file import Listed, Weights

FILE_BYTES = 5 << 30
_SLICE = 0.2  # seconds between two looks at whether a tensor still comes


# -- reading -----------------------------------------------------------------------------------------------------------


Holder = tuple[dict[str, Any], str]
"""Where a module holds a tensor: its parameters or buffers, and the name there."""


class _Part(NamedTuple):
    """What this rank holds of a tensor, which names that may have, and what finds it in the whole."""

    keys: tuple[str, ...]
    held: torch.Tensor
    shape: tuple[int, ...]
    take: Callable[[Any], torch.Tensor]
    together: bool = False  # it is in no checkpoint in pieces


def load_checkpoint(model: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Fill `model` with the weights of a safetensors file, or of a folder of them.

    They are named as the ordinary model has them, or as such models are published (`stored`). Each rank reads what it
    holds of them. Parameters without memory (`without_weights`) get it on their group's device.
    `strict`: all that the model has must be there, and nothing else. What is refused leaves the model as it was, on all
    ranks. Collective over the groups of the model's layers.
    """
    groups, holders = _groups(model), _holders(model)
    seen = ""
    with _by_all(groups, "read"):
        weights = Weights(path)
        parts = list(_parts(model, holders))
        found = [(stored.find(weights, one.keys, one.shape, together=one.together), one) for one in parts]
        _refuse_others(model, found, weights, strict)
        seen = weights.digest
    with _by_all(groups, "read"):
        told = [named(name).exchange(seen, "which checkpoint") for name in groups]  # all of them, whatever they say
        if any(set(one) != {seen} for one in told):
            must = "the same on all ranks"
            raise InvalidArgument(argument="path", was="a checkpoint that other ranks see otherwise", must=must)
    device = named(groups[0]).device if groups else torch.device("cpu")

    def fill() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.no_grad():
            for one, part in found:
                if one is None:
                    continue
                mine = part.take(one.read(weights))
                if part.held.is_meta:
                    _hold(holders[id(part.held)], part.held, mine.to(device, part.held.dtype, copy=True))
                else:
                    part.held.copy_(mine)

    with _by_all(groups, "read"):
        filling = InThread(fill)
        _while_alive(groups, filling.await_completion)
        filling.wait()


def _parts(model: torch.nn.Module, holders: dict[int, list[Holder]]) -> Iterator[_Part]:
    state, shards = state_and_shards(model)
    keys, together = _keys(state), stored.never_apart(model)
    for key, held in state.items():
        if not isinstance(held, torch.Tensor) or keys[id(held)][0] != key:
            continue
        if isinstance(held, DTensor):
            raise InvalidArgument(argument=key, was="a DTensor", must="no such yet: load before fully_shard")
        if id(held) not in holders:
            must = "a parameter or a buffer of a module, to be filled"
            raise InvalidArgument(argument=key, was="what a hook or a module's extra state tells of it", must=must)
        in_one = id(held) in together
        if id(held) in shards:
            yield _Part(keys[id(held)], held, shards[id(held)].whole_shape(held), shards[id(held)].take, in_one)
        else:
            yield _Part(keys[id(held)], held, tuple(held.shape), _all_of_it, in_one)
    for prefix, bag in bags_of(model):
        for number, piece, take in bag.parts():
            table = bag.tables[number]
            yield _Part((prefix + bag.table_keys[number],), piece, (table.rows, table.dim), take)


def _keys(state: dict[str, Any]) -> dict[int, tuple[str, ...]]:
    """The names of each tensor: modules may share one."""
    found: dict[int, tuple[str, ...]] = {}
    for key, held in state.items():
        found[id(held)] = (*found.get(id(held), ()), key)
    return found


def _all_of_it(whole: torch.Tensor | Below) -> torch.Tensor:
    return whole.whole() if isinstance(whole, Below) else whole


def _refuse_others(
    model: torch.nn.Module, found: Sequence[tuple[Stored | None, _Part]], weights: Weights, strict: bool
) -> None:
    """What the model has and the checkpoint has not, and the other way round."""
    empty = [part.keys[0] for one, part in found if one is None and part.held.is_meta]
    if empty:
        _refuse(f"a checkpoint without {told(empty)}", "one with all that has no memory yet")
    known = {key for one, part in found for key in (*part.keys, *(one.names if one is not None else ()))}
    nowhere = [name for name, one in model.named_buffers() if one.is_meta and name not in known]
    if nowhere:
        must = "made under ut.nn.without_weights(), which leaves buffers as they are"
        raise InvalidArgument(argument="model", was=f"one without memory for {told(nowhere)}", must=must)
    tables = [prefix + key for prefix, bag in bags_of(model) for key in bag.table_keys]  # of other ranks, too
    missing = [part.keys[0] for one, part in found if one is None]
    missing += [key for key in tables if key not in weights and key not in missing]
    unknown = sorted(weights.names - known - set(tables))
    must = "one of this model; strict=False takes what there is"
    if strict and missing:
        _refuse(f"a checkpoint without {told(missing)}", must)
    if strict and unknown:
        _refuse(f"a checkpoint with {told(unknown)}, which the model has not", must)


def _refuse(was: str, must: str) -> None:
    raise InvalidArgument(argument="path", was=was, must=must)


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


def save_checkpoint(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    file_bytes: int = FILE_BYTES,
    writer: int = 0,
    like: str | os.PathLike[str] | None = None,
) -> None:
    """Write what the ordinary model would have to a folder: safetensors files of about `file_bytes`, and their index.

    `like`: a checkpoint that the writer sees; what it has otherwise than the model (`stored`) is written as there.
    Rank `writer` of the job writes, and must call this; one tensor at a time is whole, on the ranks that put it
    together. What modules share is written once, under its first name. Collective over the groups of the model's
    layers, and of what FSDP has cut; those of the writer are told when all is written.
    """
    groups, folder = _groups(model), Path(path)
    writes = (dist.get_rank() if dist.is_initialized() else 0) == writer
    wholes: list[_Whole] = []
    ways: list[Stored] = []  # of the one that writes
    with _by_all(groups, "write"):
        if file_bytes < 1:
            raise InvalidArgument(argument="file_bytes", was=file_bytes, must="at least 1")
        wholes = list(_wholes(model))
        weights_file.refuse_unwritable(Listed(one.keys[0], one.dtype, one.shape) for one in wholes)
        if writes:
            weights_file.refuse_folder(folder)
            ways = list(_ways(wholes, like))
    writing = _Writing(folder, _pieces(wholes, ways), file_bytes) if writes else None
    with _by_all(groups, "write"):  # where the disk is full, too, the others wait for this rank's part of each tensor
        try:
            for number, one in enumerate(wholes):
                whole = one.make()
                hand_over = _done
                if writing is not None:
                    hand_over = partial(writing.take, deque(part for _, part in ways[number].pieces(whole.cpu())))
                _while_alive(groups, hand_over)
            if writing is not None:
                writing.given = True
        finally:
            if writing is not None:
                writing.over.set()
        _while_alive(groups, _done if writing is None else writing.work.await_completion)
        if writing is not None:
            writing.work.wait()


class _Whole(NamedTuple):
    """A tensor that is written, the names that the model has for it, and what puts it together. That is collective."""

    keys: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]
    together: bool = False  # it is written in one piece


def _ways(wholes: Sequence[_Whole], like: str | os.PathLike[str] | None) -> Iterator[Stored]:
    """How each is written: as `like` has it, or as the model has it."""
    weights = None if like is None else Weights(like)
    for one in wholes:
        found = None if weights is None else stored.find(weights, one.keys, one.shape, together=one.together)
        yield Stored(one.keys[:1]) if found is None else found


def _pieces(wholes: Sequence[_Whole], ways: Sequence[Stored]) -> list[Listed]:
    return [
        Listed(name, one.dtype, shape)
        for one, way in zip(wholes, ways, strict=True)
        for name, shape in zip(way.names, way.shapes(one.shape), strict=True)
    ]


class _Writing:
    """Files that are written on another thread, of tensors that are handed to it one by one."""

    def __init__(self, folder: Path, listed: Sequence[Listed], file_bytes: int) -> None:
        self.over = threading.Event()  # nothing more is handed over
        self.given = False  # all of it was
        self._made: queue.Queue[torch.Tensor] = queue.Queue(1)
        self.work = InThread(lambda: weights_file.write(folder, listed, self._next, file_bytes))

    def take(self, tensors: deque[torch.Tensor], seconds: float) -> bool:
        """Whether the files have all of them, or need them no more."""
        until = time.monotonic() + seconds
        while tensors and not self.work.is_completed():
            try:
                self._made.put(tensors[0], timeout=max(0.0, until - time.monotonic()))
            except queue.Full:
                return self.work.is_completed()
            tensors.popleft()
        return True

    def _next(self, _: object) -> torch.Tensor:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._made.get(timeout=_SLICE)
            if self.over.is_set() and not self.given:
                raise RuntimeError("a tensor of it was not put together")


def _done(_: float) -> bool:
    return True


def _wholes(model: torch.nn.Module) -> Iterator[_Whole]:
    """All that is written, in one order on all ranks."""
    state, shards = state_and_shards(model)
    keys, together = _keys(state), stored.never_apart(model)
    for key, one in state.items():
        if not isinstance(one, torch.Tensor):
            get_logger().warning("%s is no tensor and is not written: full_state_dict has it.", key)
        elif keys[id(one)][0] == key:
            if one.is_meta or one.layout != torch.strided:
                was = "without memory" if one.is_meta else f"of layout {one.layout}"
                raise InvalidArgument(argument=key, was=was, must="dense, and filled, to be written")
            shape = shards[id(one)].whole_shape(one) if id(one) in shards else tuple(one.shape)
            make = partial(put_together, one, shards.get(id(one)))
            yield _Whole(keys[id(one)], one.dtype, shape, make, id(one) in together)
    for prefix, bag in bags_of(model):
        dtype = getattr(torch, bag.layout.dtype)
        for number, (table, key) in enumerate(zip(bag.tables, bag.table_keys, strict=True)):
            yield _Whole((prefix + key,), dtype, (table.rows, table.dim), partial(bag.whole_table, number))


# -- all ranks ---------------------------------------------------------------------------------------------------------


def _groups(model: torch.nn.Module) -> list[str]:
    """Of the model's layers, in the order of its modules; and those over which FSDP has cut it."""
    kinds = (Sharded, ShardedEmbeddingBag)
    found = dict.fromkeys(module.group_name for module in model.modules() if isinstance(module, kinds))
    for one in model.parameters():
        if isinstance(one, DTensor):
            mesh = one.device_mesh
            found |= dict.fromkeys(as_group(mesh.get_group(dim)).name for dim in range(mesh.ndim))
    return list(found)


@contextlib.contextmanager
def _by_all(groups: Sequence[str], what: str) -> Iterator[None]:
    """What fails inside on one rank fails on all of its groups: none may go on alone."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is: it is raised below, when the others know
        failure = error
    for name in groups:
        reasons = named(name).exchange(
            "" if failure is None else str(failure) or type(failure).__name__, f"whether all could {what} a checkpoint"
        )
        for rank, reason in enumerate(reasons):
            if reason and failure is None:
                failure = CheckpointFailed(rank=rank, what=what, reason=reason)
    if failure is not None:
        raise failure


def _while_alive(groups: Sequence[str], step: Callable[[float], bool]) -> None:
    """`step(seconds)` until it says that it is done, on all ranks of the first group. They tell each other meanwhile,
    so files may take longer than a deadline."""
    done = False
    group = named(groups[0]) if groups else None
    patience = 1.0 if group is None else min(5.0, group.deadline / 4)
    while True:
        done = done or step(patience)
        if all([done] if group is None else group.exchange(done, "whether files are read or written")):
            return
