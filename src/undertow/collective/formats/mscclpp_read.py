"""MSCCL++'s JSON plans, read. Sizes are bounded before anything is parsed, and every field is looked at by its type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from .lanes import MOST_STEPS
from .mscclpp import (
    CHANNEL_TYPES,
    EARLIER,
    KNOWN,
    MULTICAST,
    NEEDS_MULTICAST,
    SUMS,
    Gpu,
    Operand,
    Operation,
    Plan,
)
from .text import LONGEST_WORD, MOST_RANKS, damaged, read_bytes, shown

_MOST_CONTAINERS, _MOST_VALUES = 1 << 20, 1 << 22
_MOST_NUMBER = 1 << 31
_OURS = frozenset({"name", "collective", "protocol", "inplace", "use_double_scratch_buffer", "gpus"})
_DEEPEST_PIPELINE = 4


def read(path: str | Path) -> Plan:
    """The plan in a file."""
    return parse(read_bytes(path), str(path))


def parse(data: bytes, path: str = "<bytes>") -> Plan:
    """The plan in the bytes of a file; `path` is for complaints."""
    if data.count(b"{") + data.count(b"[") > _MOST_CONTAINERS or data.count(b",") > _MOST_VALUES:
        damaged(path, 0, f"it has more than {_MOST_CONTAINERS} lists and objects, or {_MOST_VALUES} values")
    try:
        whole = json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        damaged(path, error.lineno, f"this is no JSON: {error.msg.lower()}")
    except UnicodeDecodeError:
        damaged(path, 0, "it is not text in UTF-8")
    except RecursionError:
        damaged(path, 0, "it is nested too deeply")
    except ValueError as error:
        damaged(path, 0, f"this is no JSON: {shown(str(error))}")
    return _Reader(path).plan(whole)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


class _Reader:
    def __init__(self, path: str) -> None:
        self._path = path
        self.operations = 0

    def plan(self, whole: Any) -> Plan:
        fields = self._object(whole, "the file")
        if fields.get("format") == "undertow schedules":
            self._damaged("it is a listing of Undertow's own, which is written for people and not read")
        gpus = self._list(fields, "gpus", "the plan")
        if not 1 <= len(gpus) <= MOST_RANKS:
            self._damaged(f"there are {len(gpus)} gpus, but must be 1 to {MOST_RANKS}")
        if any(isinstance(one, dict) and "inputChunks" in one for one in gpus):
            self._damaged("it is a plan of MSCCL++'s first format (inputChunks), which its executor no longer reads")
        self._ranks = len(gpus)
        made = []
        for rank, one in enumerate(gpus):
            of_gpu = self._object(one, f"gpu {rank}")
            if self._number(of_gpu, "id", f"gpu {rank}") != rank:
                self._damaged(f"the id of gpu {rank} is {shown(of_gpu['id'])}, but must be its place in the list")
            made.append(self._gpu(of_gpu, f"gpu {rank}"))
        return Plan(
            self._text(fields, "name", "the plan"),
            self._text(fields, "collective", "the plan"),
            self._flag(fields, "inplace"),
            self._flag(fields, "use_double_scratch_buffer"),
            tuple(made),
            self._text(fields, "protocol", "the plan") if "protocol" in fields else "Simple",
            {name: value for name, value in fields.items() if name not in _OURS},
        )

    def _gpu(self, fields: dict[str, Any], where: str) -> Gpu:
        sizes = [self._number(fields, name, where) for name in ("input_chunks", "output_chunks", "scratch_chunks")]
        channels: dict[str, tuple[int, ...]] = {}
        for one in self._objects(fields, "channels", where):
            kind = self._text(one, "channel_type", where)
            if kind not in CHANNEL_TYPES:
                why = "which needs multicast hardware" if kind == MULTICAST else "which is not known"
                self._damaged(f"{where} has a channel of type {shown(kind)}, {why}")
            peers = tuple(self._numbers(one, "connected_to", where))
            if any(peer >= self._ranks for peer in peers):
                self._damaged(f"{where} has a channel to gpu {max(peers)}, which is not there")
            channels[kind] = channels.get(kind, ()) + peers
        remote = []
        for one in self._objects(fields, "remote_buffers", where, optional=True):
            rank = self._number(one, "rank", where)
            if rank >= self._ranks:
                self._damaged(f"{where} has a remote buffer on gpu {rank}, which is not there")
            remote.append((rank, self._buffer(one, where)))
        semaphores = tuple(
            self._number(one, "init_value", where) for one in self._objects(fields, "semaphores", where, optional=True)
        )
        blocks = []
        for number, one in enumerate(self._objects(fields, "threadblocks", where)):
            inside = f"threadblock {number} of {where}"
            if self._number(one, "id", inside) != number:
                self._damaged(f"the id of {inside} is {shown(one['id'])}, but must be its place in the list")
            blocks.append(_Block(self, one, inside, channels, remote, len(semaphores)).operations())
        return Gpu(sizes[0], sizes[1], sizes[2], channels, semaphores, tuple(blocks))

    # -- fields --------------------------------------------------------------------------------------------------------

    def _damaged(self, reason: str) -> NoReturn:
        damaged(self._path, 0, reason)

    def _object(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._damaged(f"{where} is {shown(value)}, but must be an object")
        return value

    def _list(self, fields: dict[str, Any], name: str, where: str, optional: bool = False) -> list[Any]:
        if name not in fields and optional:
            return []
        value = fields.get(name)
        if not isinstance(value, list):
            self._damaged(f"{name} of {where} is {shown(value)}, but must be a list")
        return value

    def _objects(self, fields: dict[str, Any], name: str, where: str, optional: bool = False) -> list[dict[str, Any]]:
        return [
            self._object(one, f"an entry of {name} of {where}") for one in self._list(fields, name, where, optional)
        ]

    def _numbers(self, fields: dict[str, Any], name: str, where: str, optional: bool = False) -> list[int]:
        return [self._whole(one, f"an entry of {name} of {where}") for one in self._list(fields, name, where, optional)]

    def _number(self, fields: dict[str, Any], name: str, where: str) -> int:
        return self._whole(fields.get(name), f"{name} of {where}")

    def _whole(self, value: Any, what: str) -> int:
        if type(value) is not int or not 0 <= value < _MOST_NUMBER:
            self._damaged(f"{what} is {shown(value)}, but must be a whole number of at least 0")
        return value

    def _text(self, fields: dict[str, Any], name: str, where: str) -> str:
        value = fields.get(name)
        if not isinstance(value, str) or len(value) > LONGEST_WORD or not value.isprintable():
            self._damaged(f"{name} of {where} is {shown(value)}, but must be a word")
        return value

    def _flag(self, fields: dict[str, Any], name: str) -> bool:
        value = fields.get(name, False)
        if not isinstance(value, bool):
            self._damaged(f"{name} of the plan is {shown(value)}, but must be true or false")
        return value

    def _buffer(self, fields: dict[str, Any], where: str) -> str:
        value = self._text(fields, "type", where)
        if value not in ("i", "o", "s"):
            self._damaged(f"a buffer of {where} has the type {shown(value)}, but must have i, o or s")
        return value


class _Block:
    """The operations of one threadblock: numbers that mean something inside it only become the rank's."""

    def __init__(
        self,
        reader: _Reader,
        fields: dict[str, Any],
        where: str,
        channels: dict[str, tuple[int, ...]],
        remote: list[tuple[int, str]],
        semaphores: int,
    ) -> None:
        self._reader, self._fields, self._where, self._semaphores = reader, fields, where, semaphores
        self._channels: dict[str, list[int]] = {}
        for one in reader._objects(fields, "channels", where, optional=True):
            kind = reader._text(one, "channel_type", where)
            chosen = reader._numbers(one, "channel_ids", where)
            if any(number >= len(channels.get(kind, ())) for number in chosen):
                reader._damaged(f"{where} uses {kind} channel {max(chosen)}, which its gpu does not have")
            self._channels.setdefault(kind, []).extend(chosen)
        self._remote: dict[str, list[tuple[int, str]]] = {}
        for one in reader._objects(fields, "remote_buffer_refs", where, optional=True):
            numbers = reader._numbers(one, "remote_buffer_ids", where)
            if any(number >= len(remote) for number in numbers):
                reader._damaged(f"{where} uses remote buffer {max(numbers)}, which its gpu does not have")
            kind = reader._text(one, "access_channel_type", where)
            self._remote.setdefault(kind, []).extend(remote[number] for number in numbers)

    def operations(self) -> tuple[Operation, ...]:
        return tuple(self._operation(one, 0) for one in self._reader._objects(self._fields, "ops", self._where))

    def _operation(self, fields: dict[str, Any], depth: int) -> Operation:
        reader, where = self._reader, self._where
        reader.operations += 1
        if reader.operations > MOST_STEPS:
            reader._damaged(f"there are more than {MOST_STEPS} operations")
        name = reader._text(fields, "name", f"an operation of {where}")
        if name in NEEDS_MULTICAST:
            reader._damaged(f"{where} has the operation {name}, which needs multicast hardware")
        if name in EARLIER:
            reason = "which only earlier releases of MSCCL++ read, where other names meant other things, too"
            reader._damaged(f"{where} has the operation {name}, {reason}")
        if name not in KNOWN:
            reader._damaged(f"{where} has the operation {shown(name)}, which is not known")
        if name in SUMS and fields.get("reduce_op", "sum") != "sum":
            reader._damaged(f"{name} of {where} reduces by {shown(fields['reduce_op'])}, but only sum can be meant")
        where = f"{name} of {where}"
        kind = reader._text(fields, "channel_type", where) if "channel_type" in fields else ""
        mine = self._channels.get(kind, [])
        numbers = reader._numbers(fields, "channel_ids", where, optional=True)
        if any(number >= len(mine) for number in numbers):
            reader._damaged(f"{where} uses its {kind} channel {max(numbers)}, but there are {len(mine)}")
        semaphores = tuple(reader._numbers(fields, "semaphore_ids", where, optional=True))
        if any(number >= self._semaphores for number in semaphores):
            reader._damaged(f"{where} uses semaphore {max(semaphores)}, but there are {self._semaphores}")
        barrier = None
        if name == "barrier":
            barrier = (
                reader._number(fields, "barrier_id", where), reader._number(fields, "num_threadblocks", where)
            )  # fmt: skip
        share = (0, 1)
        if "tbg_info" in fields:
            group = reader._object(fields["tbg_info"], f"tbg_info of {where}")
            share = reader._number(group, "tb_id", where), reader._number(group, "tbg_size", where)
            if not 0 <= share[0] < share[1] <= MOST_RANKS:
                reader._damaged(f"tbg_info of {where} is part {share[0]} of {share[1]}, which cannot be")
        inner: tuple[Operation, ...] = ()
        unit = (0, 0)
        if name == "pipeline":
            if depth == _DEEPEST_PIPELINE:
                reader._damaged(f"{where} has pipelines nested deeper than {_DEEPEST_PIPELINE}")
            inner = tuple(self._operation(one, depth + 1) for one in reader._objects(fields, "ops", where))
            context = reader._object(fields.get("iter_context"), f"iter_context of {where}")
            unit = reader._number(context, "unit_size", where), reader._number(context, "num_chunks", where)
        return Operation(
            name, self._operands(fields, "src_buff", kind, where), self._operands(fields, "dst_buff", kind, where),
            kind, tuple(mine[number] for number in numbers), semaphores, barrier, share, inner, unit,
        )  # fmt: skip

    def _operands(self, fields: dict[str, Any], name: str, kind: str, where: str) -> tuple[Operand, ...]:
        reader, found = self._reader, []
        for one in reader._objects(fields, name, where, optional=True):
            index, size = reader._number(one, "index", where), reader._number(one, "size", where)
            if "switch_channel_id" in one:
                reader._damaged(f"{where} uses a switch channel, which needs multicast hardware")
            if "buffer_id" in one:
                number = reader._number(one, "buffer_id", where)
                known = self._remote.get(kind, [])
                if number >= len(known):
                    reader._damaged(f"{where} uses its {kind} remote buffer {number}, but there are {len(known)}")
                found.append(Operand(known[number][1], index, size, known[number][0]))
            else:
                found.append(Operand(reader._buffer(one, where), index, size))
        return tuple(found)
