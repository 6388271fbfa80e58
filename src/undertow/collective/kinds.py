"""Calls that are alike: which program they run, and its executable, made once for each kind."""

from __future__ import annotations

import functools
import threading
import zlib
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from ..errors import InvalidArgument
from ..fabric.group import Group
from ..fabric.placement import Placement
from .algorithms import LIBRARY
from .copies import Copies
from .language import Program
from .runtime import Executable, executable, in_common_memory
from .selection import Choice, choose, most_ctas
from .tables import Table
from .topology import Topology


class Kind(NamedTuple):
    """Calls that are alike: the program they run, the words for their flight records, and their executable's number."""

    collective: str
    program: Program
    choice: Choice
    in_place: bool
    root: int
    shape: str
    plan: str
    number: int
    lane: str | None = None
    ctas: int | None = None
    copies: bool = False  # by `Copies`, without the program
    named: bool = True  # whether the program was given, or measured to be the best: it is then what runs


_numbers: dict[tuple[object, ...], int] = {}
_numbers_lock = threading.Lock()


@functools.lru_cache(maxsize=1024)
def kind_of(
    collective: str,
    spans: tuple[int, ...],
    dtype: torch.dtype,
    in_place: bool,
    op: str,
    program: Program | None,
    root: int,
    device: str,
    nodes: list[int] | tuple[int, ...],
    table: Table | None,
    where: Placement,
) -> Kind:
    """The words say all that ranks must agree on: they compare them, and one that means something else is told so."""
    nbytes = sum(spans) * dtype.itemsize
    choice = choose(collective, nbytes, device, Topology(tuple(nodes)))
    chosen = LIBRARY[choice.program] if program is None else program
    measured = table.find(collective, nbytes) if table is not None else None
    if measured is not None:
        choice, chosen = measured
    copies = where.lane in ("dma", "net") and program is None
    if where.ctas is not None and not copies:
        choice = replace(choice, instances=max(1, min(choice.instances, where.ctas // choice.workers)))
    lane = where.lane if where.lane in ("dma", "net") else None
    key: tuple[object, ...] = (chosen, replace(choice, up_to=0), in_place, root)
    if lane is not None:
        key = (collective, root, lane, where.ctas) if copies else (*key, lane)
    with _numbers_lock:
        number = _numbers.setdefault(key, len(_numbers))
    cut = zlib.crc32(repr(spans).encode())
    shape = f"{nbytes} bytes cut {cut:08x}, {str(dtype).removeprefix('torch.')}, {'in place' if in_place else 'apart'}"
    # Gloo ends a process whose messages differ from what it expects, so there ranks compare more often.
    wire = ":net" if len(set(nodes)) > 1 or lane == "net" else ""
    plan = f"{'copies' if copies else f'{chosen.name} {chosen.signature}'} {op} to {root}{wire}"
    if where != Placement():
        plan += f" over {where.lane} by {where.ctas} CTAs"
    ctas, named = where.ctas if copies else None, program is not None or measured is not None
    return Kind(collective, chosen, choice, in_place, root, shape, plan, number, lane, ctas, copies, named)


def executable_of(on: Group, kind: Kind) -> Executable:
    """Made at the first call of a kind, collectively. GPUs of one node that cannot address each other's memory copy
    through the host."""
    fabric = on.fabric
    found = cast("Executable | None", fabric.kept.get(kind.number))
    is_one_node = len(on.local_ranks) == on.size
    if found is None and kind.lane is None and is_one_node and not in_common_memory(fabric, "peer"):
        kind = kind._replace(lane="dma", copies=not kind.named)
    if found is None and kind.copies:
        assert kind.lane is not None
        made = Copies(fabric, kind.lane, kind.collective, kind.root, kind.ctas)
        fabric.kept[kind.number] = found = cast("Executable", made)  # all but a schedule, which nobody asks it for
    if found is None:
        if kind.program.collective != kind.collective:
            was, must = f"{kind.program.name}, for {kind.program.collective}", f"a program for {kind.collective}"
            raise InvalidArgument(argument="program", was=was, must=must)
        choice, lane = kind.choice, kind.lane or "peer"
        instances = choice.instances
        interpreted = in_common_memory(fabric, lane)  # a lane signals by itself, and walks instances as one
        if not interpreted:
            instances = 1
        elif on.device.type == "cuda":
            most = most_ctas(fabric.multiprocessors)
            seen = on.exchange(most, "how many CTAs a rank may take")
            instances = max(1, min(instances, min(seen) // choice.workers))
        schedule = kind.program.compile(
            topology=Topology.of(on.nodes), root=kind.root, in_place=kind.in_place, target="staged",
            slots=choice.slots, depth=choice.depth, workers=choice.workers, instances=instances,
            packets=choice.packets and interpreted, publish=interpreted and on.device.type == "cpu",
        )  # fmt: skip
        found = fabric.kept[kind.number] = executable(
            fabric, schedule, choice.stride if kind.lane is None else None, lane=lane, warps=choice.warps
        )
    return found
