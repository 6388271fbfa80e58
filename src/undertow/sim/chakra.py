"""Chakra execution traces (mlcommons/chakra, schema/protobuf/et_def.proto), in and out, and their simulation.

A file is a stream of messages, each behind its length: a GlobalMetadata, then Nodes. One file is one rank, named
PREFIX.RANK.et. Of a node these count: id, name, type, ctrl_deps, data_deps, duration_micros, and of its attributes
comm_type, comm_size, comm_src, comm_dst, comm_tag, pg_name, num_ops, tensor_size, is_cpu_op, and one of our own:
stream, the engine that a collective runs on.

comm_size follows ASTRA-sim: the shard of a rank for ALL_GATHER, the whole buffer for the others. The k-th collective of
a process group on one rank is the k-th on all of them; a send meets the receive with the same ends and tag. Messages of
one pair of ranks follow each other. Nodes are issued as they become ready, whatever their order in the file.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import SimulationRefused
from . import protobuf as wire
from .cluster import Cluster
from .collectives import GROUPS, Collectives
from .tasks import COMPUTE, Outcome, Task, Tasks

MOST_BYTES = 1 << 30
MOST_NODES = 2_000_000
COMP, SEND, RECV, COLL = 4, 5, 6, 7
TYPES = 11  # METADATA, MEM_LOAD, ... up to here are known
COLLECTIVE_TYPES = {0: "all_reduce", 2: "all_gather", 6: "all_to_all", 7: "reduce_scatter"}
_NAMES = {name: number for number, name in COLLECTIVE_TYPES.items()}
_SCHEMA = "1.0.0"
Value = int | float | str | bool


@dataclass(frozen=True)
class Node:
    """One node of a trace; `micros` its recorded duration."""

    id: int
    name: str
    type: int
    after: tuple[int, ...] = ()
    micros: int = 0
    attributes: dict[str, Value] = field(default_factory=dict)


def read(path: str | Path) -> list[Node]:
    """The nodes of a file; what is damaged is refused with one sentence that says where."""
    name = Path(path).name
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise SimulationRefused(reason=f"trace {name} is larger than {MOST_BYTES} bytes")
        data = Path(path).read_bytes()
    except OSError as error:
        raise SimulationRefused(reason=f"trace {path} cannot be read ({error.strerror})") from error
    nodes: list[Node] = []
    at, first = 0, True
    while at < len(data):
        size, begin = wire.read_varint(data, at, f"trace {name}")
        if size > len(data) - begin:
            raise SimulationRefused(
                reason=f"trace {name} is truncated: a message of {size} bytes begins at byte {begin} of {len(data)}"
            )
        if not first:
            nodes.append(_node(data[begin : begin + size], f"trace {name}, node {len(nodes)},"))
            if len(nodes) > MOST_NODES:
                raise SimulationRefused(reason=f"trace {name} has more than {MOST_NODES} nodes")
        at, first = begin + size, False
    if not nodes:
        raise SimulationRefused(reason=f"trace {name} has no nodes")
    return nodes


def _node(data: bytes, what: str) -> Node:
    number = kind = micros = 0
    name = ""
    after: list[int] = []
    attributes: dict[str, Value] = {}
    for entry, wire_type, value in wire.fields(data, what):
        if entry == 1 and isinstance(value, int):
            number = value
        elif entry == 2:
            name = wire.text(value, what)
        elif entry == 3 and isinstance(value, int):
            kind = value
        elif entry in (4, 5):
            after += wire.numbers(wire_type, value, what)
        elif entry == 7 and isinstance(value, int):
            micros = value
        elif entry == 10 and isinstance(value, bytes):
            attributes.update(_attribute(value, what))
    if kind >= TYPES:
        raise SimulationRefused(reason=f"{what} has the unknown type {kind}")
    return Node(number, name, kind, tuple(dict.fromkeys(after)), micros, attributes)


def _attribute(data: bytes, what: str) -> dict[str, Value]:
    """Name and scalar value; lists are not looked at."""
    name = ""
    found: Value | None = None
    for entry, _, value in wire.fields(data, what):
        if entry == 1:
            name = wire.text(value, what)
        elif isinstance(value, int):
            if entry in (7, 9):
                found = wire.signed(value)
            elif entry in (11, 13):
                found = value
            elif entry in (15, 17):
                found = (value >> 1) ^ -(value & 1)
            elif entry == 27:
                found = bool(value)
        elif entry == 3 and len(value) == 8:
            found = wire.double(value)
        elif entry == 5 and len(value) == 4:
            found = wire.single(value)
        elif entry in (19, 21, 23, 25):
            found = int.from_bytes(value, "little", signed=entry in (23, 25))
        elif entry == 29:
            found = wire.text(value, what)
    return {} if found is None else {name: found}


def write(path: str | Path, nodes: Sequence[Node]) -> None:
    """A trace of these nodes: integers as int64, which is what ASTRA-sim reads."""
    parts = [wire.field_bytes(1, _SCHEMA.encode())]
    for node in nodes:
        body = wire.field_number(1, node.id) + wire.field_bytes(2, node.name.encode()) + wire.field_number(3, node.type)
        for other in node.after:
            body += wire.field_number(5, other)
        if node.micros:
            body += wire.field_number(7, node.micros)
        for name, value in node.attributes.items():
            told = wire.field_bytes(1, name.encode())
            if isinstance(value, bool):
                told += wire.field_number(27, int(value))
            elif isinstance(value, int):
                told += wire.field_number(9, value)
            elif isinstance(value, str):
                told += wire.field_bytes(29, value.encode())
            else:
                raise SimulationRefused(
                    reason=f"attribute {name!r} of node {node.id} is {value!r}, which is not written"
                )
            body += wire.field_bytes(10, told)
        parts.append(body)
    Path(path).write_bytes(b"".join(wire.varint(len(part)) + part for part in parts))


def from_outcome(outcome: Outcome, cluster: Cluster, stage: int = 0) -> list[Node]:
    """The tasks of one stage as nodes; durations in whole microseconds, at least one, for the format has no finer.

    `pg_name` is the group of a collective: all, node or across, which `simulate` understands. So it does `stream` and
    `multiprocessors`, which other readers pass over: without the latter a trace knows no interference, for durations
    that were measured have it in them already.
    """
    known = Collectives(cluster)
    sizes = {group: known.ranks(group) for group in GROUPS}
    nodes = []
    for number, task in enumerate(outcome.tasks):
        if stage not in task.ranks:
            continue
        collective, nbytes = task.details.get("collective"), task.details.get("bytes")
        after = tuple(one for one in task.after if stage in outcome.tasks[one].ranks)
        if isinstance(collective, str) and isinstance(nbytes, int):
            members = sizes[str(task.details.get("group", "all"))]
            size = nbytes // members if collective == "all_gather" else nbytes
            about: dict[str, Value] = {"is_cpu_op": False, "comm_type": _NAMES[collective], "comm_size": size}
            about |= {"pg_name": str(task.details.get("group", "all")), "stream": task.engine}
            nodes.append(Node(number, task.name, COLL, after, 0, about))
        else:
            about = {"is_cpu_op": False}
            nodes.append(Node(number, task.name, COMP, after, max(1, round(task.seconds * 1e6)), about))
        if task.multiprocessors:
            about["multiprocessors"] = task.multiprocessors
    return nodes


def find(prefix: str | Path) -> list[Path]:
    """The files PREFIX.0.et, PREFIX.1.et, ..., or the one that was named."""
    path = Path(prefix)
    if path.is_file():
        return [path]
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)\.et")
    found = {int(match[1]): one for one in path.parent.glob("*.et") if (match := pattern.fullmatch(one.name))}
    if not found or sorted(found) != list(range(len(found))):
        raise SimulationRefused(reason=f"there are no traces {path}.0.et, {path}.1.et, ... without a gap")
    return [found[rank] for rank in range(len(found))]


def simulate(traces: Sequence[Sequence[Node]], cluster: Cluster, collectives: Collectives | None = None) -> Outcome:
    """Run the traces of all ranks, or that of one which stands for all, on a cluster."""
    if len(traces) not in (1, cluster.ranks):
        reason = f"{len(traces)} traces are neither one nor as many as the {cluster.ranks} ranks of {cluster.name}"
        raise SimulationRefused(reason=reason)
    return _Replay(traces, collectives or Collectives(cluster)).tasks.run()


class _Replay:
    """Nodes of all ranks as tasks; those that several ranks share become one."""

    def __init__(self, traces: Sequence[Sequence[Node]], collectives: Collectives) -> None:
        self.traces, self.collectives = traces, collectives
        self.tasks = Tasks(collectives.cluster.interference)
        places, shared = self._shared()
        missing: dict[object, int] = {}
        followers: dict[object, list[object]] = {}
        for rank, nodes in enumerate(traces):
            for node in nodes:
                key = places[rank, node.id]
                missing.setdefault(key, 0)
                for other in node.after:
                    if (rank, other) not in places:
                        raise SimulationRefused(
                            reason=f"node {node.id} of rank {rank} waits for {other}, which is none"
                        )
                    followers.setdefault(places[rank, other], []).append(key)
                    missing[key] += 1
        order = {one: number for number, one in enumerate(missing)}
        ready = [number for one, number in order.items() if missing[one] == 0]
        keys = list(order)
        made: dict[object, int] = {}
        heapq.heapify(ready)
        while ready:
            key = keys[heapq.heappop(ready)]
            made[key] = self.tasks.add(self._task(shared[key], made, places))
            for follower in followers.get(key, ()):
                missing[follower] -= 1
                if missing[follower] == 0:
                    heapq.heappush(ready, order[follower])
        if len(made) < len(order):
            raise SimulationRefused(reason="the trace's dependences form a circle, maybe across ranks")

    def _shared(self) -> tuple[dict[tuple[int, int], object], dict[object, list[tuple[int, Node]]]]:
        """The key of each (rank, node), and the nodes of each key."""
        places: dict[tuple[int, int], object] = {}
        shared: dict[object, list[tuple[int, Node]]] = {}
        counts: dict[tuple[object, ...], int] = {}
        for rank, nodes in enumerate(self.traces):
            for node in nodes:
                about = node.attributes
                met: tuple[object, ...] = (rank, node.id, "alone")
                if len(self.traces) > 1 and node.type == COLL:
                    met = ("collective", rank, about.get("pg_name", ""))
                elif len(self.traces) > 1 and node.type in (SEND, RECV):
                    ends = (about.get("comm_src", rank), about.get("comm_dst", rank), about.get("comm_tag", 0))
                    met = ("message", node.type, *ends)
                key: tuple[object, ...] = met
                if met[0] in ("collective", "message"):
                    turn = counts.get(met, 0)
                    counts[met] = turn + 1
                    key = (met[0], *met[2:], turn)
                if (rank, node.id) in places:
                    raise SimulationRefused(reason=f"node {node.id} of rank {rank} exists twice")
                places[rank, node.id] = key
                shared.setdefault(key, []).append((rank, node))
        return places, shared

    def _group(self, node: Node, ranks: tuple[int, ...]) -> str:
        """Which of the groups that can be timed a collective's ranks are; one rank's trace may name it."""
        named = node.attributes.get("pg_name")
        if len(self.traces) == 1:
            return named if isinstance(named, str) and named in GROUPS else "all"
        cluster = self.collectives.cluster
        size = cluster.shape.per_node
        members = {
            "all": set(range(cluster.ranks)),
            "node": set(range(ranks[0] // size * size, (ranks[0] // size + 1) * size)),
            "across": set(range(ranks[0] % size, cluster.ranks, size)),
        }
        for group, found in members.items():
            if set(ranks) == found:
                return group
        reason = (
            f"node {node.id} is a collective of {len(ranks)} ranks that are neither all, nor a node, nor one of each"
        )
        raise SimulationRefused(reason=reason)

    def _task(
        self, nodes: list[tuple[int, Node]], made: dict[object, int], places: dict[tuple[int, int], object]
    ) -> Task:
        node, about = nodes[0][1], nodes[0][1].attributes
        ranks = tuple(dict.fromkeys(rank for rank, _ in nodes))
        after = tuple({made[places[rank, other]] for rank, one in nodes for other in one.after})
        size = about.get("comm_size", 0)
        if node.type in (COLL, SEND, RECV) and (not isinstance(size, int) or not 0 <= size < 1 << 50):
            raise SimulationRefused(reason=f"node {node.id} has the comm_size {size!r}, which is no number of bytes")
        held, most = about.get("multiprocessors", 0), self.collectives.cluster.device.multiprocessors
        if not isinstance(held, int) or not 0 <= held <= most:
            raise SimulationRefused(reason=f"node {node.id} has {held!r} multiprocessors, of a device with {most}")
        if node.type == COLL:
            number = about.get("comm_type", -1)
            name = COLLECTIVE_TYPES.get(number) if isinstance(number, int) else None
            if name is None:
                known = ", ".join(f"{one} ({title})" for one, title in COLLECTIVE_TYPES.items())
                raise SimulationRefused(reason=f"node {node.id} is a collective of type {number}; known are {known}")
            group = self._group(node, ranks)
            nbytes = int(size) * (self.collectives.ranks(group) if name == "all_gather" else 1)
            timing = self.collectives.time(name, nbytes, group)
            return Task(
                node.name, ranks, str(about.get("stream", f"net {group}")), timing.seconds, after, 0.0,
                self.collectives.cluster.lane, timing.bytes_per_second, int(held), f"{name} over {timing.link}",
                {"bytes": nbytes, "collective": name, "group": group}, timing.link, ordered=False,
            )  # fmt: skip
        if node.type in (SEND, RECV):
            return self._message(nodes, int(size), after)
        seconds = node.micros * 1e-6
        operations, touched = about.get("num_ops", 0), about.get("tensor_size", 0)
        if not seconds and isinstance(operations, int) and isinstance(touched, int) and node.type == COMP:
            device = self.collectives.cluster.device
            seconds = max(operations / device.peak, touched / device.memory_bandwidth, 0.0)
        engine = "host" if about.get("is_cpu_op") is True else COMPUTE
        resource = "computing" if engine == COMPUTE else "host"
        return Task(
            node.name, ranks, engine, seconds, after, multiprocessors=int(held), resource=resource, ordered=False
        )

    def _message(self, nodes: list[tuple[int, Node]], nbytes: int, after: tuple[int, ...]) -> Task:
        """A send and its receive. In the trace of one rank, which stands for all, each stands alone."""
        rank, node = nodes[0]
        if len(self.traces) > 1 and sorted(one.type for _, one in nodes) != [SEND, RECV]:
            what, missing = ("send", "receive") if node.type == SEND else ("receive", "send")
            raise SimulationRefused(reason=f"node {node.id} of rank {rank} is a {what} that no {missing} meets")
        timing = self.collectives.message(nbytes)
        seconds = timing.seconds if any(one.type == SEND for _, one in nodes) else 0.0
        ends = [node.attributes.get(key, rank) for key in ("comm_src", "comm_dst")]
        return Task(
            node.name, tuple(dict.fromkeys(one for one, _ in nodes)), f"message {ends[0]} to {ends[1]}", seconds, after,
            0.0, "net", timing.bytes_per_second, 0, f"messages over {timing.link}", {"bytes": nbytes}, timing.link,
            ordered=False,
        )  # fmt: skip
