"""What runs inside ranks for the tests of LaneExecutable: every result is compared with what the contract promises."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import undertow as ut
from undertow.collective.algorithms import LIBRARY, OUT_OF_PLACE_ONLY
from undertow.collective.contract import Contract
from undertow.collective.lane_runtime import LaneExecutable
from undertow.collective.language import INPUT, Trace, program
from undertow.collective.schedule import Schedule
from undertow.collective.topology import Topology
from undertow.errors import InvalidArgument, RankLost

SMALL = 4096  # bytes of a tile: a few KB make several iterations
BY_NODE = (
    "hierarchical", "all_gather_hierarchical", "all_to_all_two_step", "all_to_all_three_step", "all_to_next", "ring",
)  # fmt: skip
SECONDS = 60  # should a rank hang after all: where


def values(rank: int, count: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    """Small integers, the same on every rank that asks; sums of them are exact in every type."""
    made = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(-3 if dtype.is_signed else 0, 4, (count,), generator=made).to(dtype)


def shards(lengths: Sequence[int], classes: Sequence[int], whole: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(whole, [lengths[one] for one in classes]))


class Case:
    """One call: inputs of all ranks, my buffers, what must come out."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        spans: Sequence[int],
        dtype: torch.dtype,
        operation: str = "sum",
        salt: int = 1,
    ) -> None:
        contract: Contract = schedule.contract
        self.spans = list(spans)
        lengths = contract.class_lengths(spans, max(1, 16 // dtype.itemsize)).tolist()
        items: list[torch.Tensor] = []
        for one in range(contract.ranks):
            classes = contract.item_class[contract.first_item[one] : contract.first_item[one + 1]].tolist()
            whole = values(one, sum(lengths[other] for other in classes), dtype, salt)
            items += shards(lengths, classes, whole)
            if one == rank:
                mine = whole
        first, last = contract.first_output[rank], contract.first_output[rank + 1]
        combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[operation]
        self.wanted: list[torch.Tensor | None] = []
        for total in contract.after[first:last].tolist():
            if total < 0:
                self.wanted.append(None)
                continue
            parts = contract.total_items[contract.total_start[total] : contract.total_start[total + 1]].tolist()
            value = items[parts[0]].clone()
            for part in parts[1:]:
                value = combine(value, items[part])
            self.wanted.append(value)
        self.classes = [lengths[one] for one in contract.output_class[first:last].tolist()]
        poison = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
        self.out = torch.full((sum(self.classes),), poison, dtype=dtype)
        self.source, self.before = mine.clone(), mine
        self.in_place = schedule.in_place
        if schedule.in_place:
            assert contract.in_place is not None
            start = contract.in_place[rank]
            if contract.holder(rank) == INPUT:
                classes = contract.item_class[contract.first_item[rank] :][:start].tolist()
                begin = sum(lengths[one] for one in classes)
                self.out = self.source[begin : begin + sum(self.classes)]
            else:
                begin = sum(self.classes[:start])
                self.out[begin : begin + mine.numel()] = mine
                self.source = self.out[begin : begin + mine.numel()]

    def check(self, what: object) -> None:
        for chunk, (found, wanted) in enumerate(zip(torch.split(self.out, self.classes), self.wanted, strict=True)):
            assert wanted is None or torch.equal(found, wanted), (what, chunk, found, wanted)
        assert self.in_place or torch.equal(self.source, self.before), f"{what} changed its input"


def spans_of(contract: Contract, size: int, even: bool = False) -> list[int]:
    """Spans that add up to about `size`; uneven, some of them empty, unless `even`."""
    if contract.spans == 1 or even:
        return [size // contract.spans] * contract.spans
    return [size // contract.spans * (one * 5 % 7) // 3 + one % 3 * (one % 5) for one in range(contract.spans)]


def library(lanes: Sequence[str], nodes: int = 1) -> None:
    """Every program over every lane, two calls of different sizes one right after the other; in place over one lane."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    group = ut.init()
    topology = Topology.grid(nodes, group.size // nodes)
    for number, (name, one) in enumerate(LIBRARY.items()):
        if nodes > 1 and name not in BY_NODE:
            continue
        schedule = one.compile(topology=topology, target="staged", workers=1)
        for lane in lanes:
            call(group, schedule, lane, torch.float32)
        if schedule.contract.in_place and name not in OUT_OF_PLACE_ONLY:
            schedule = one.compile(topology=topology, target="staged", workers=1, in_place=True)
            call(group, schedule, lanes[number % len(lanes)], torch.bfloat16)
    faulthandler.cancel_dump_traceback_later()


def call(group: ut.Group, schedule: Schedule, lane: str, dtype: torch.dtype) -> None:
    run = LaneExecutable(group.fabric, schedule, lane, SMALL)
    cases = [
        Case(schedule, group.rank, spans_of(schedule.contract, size, schedule.in_place), dtype, salt=size)
        for size in (5 * group.size * 1031, 37, 4 * group.size)
    ]
    for case in cases:
        run.run(case.source, case.out, case.spans)
    for case in cases:
        case.check((lane, schedule.name, schedule.in_place, case.spans))
    run.close()


def library_on_nodes(names: Sequence[str]) -> None:
    """As `library`, where ranks stand on nodes of these names and share no memory with those of another."""
    os.environ["UNDERTOW_NODE"] = names[int(os.environ["RANK"])]
    library(["dma", "peer"], len(set(names)))


@program("all_gather", ranks=4)
def in_channels(c: Trace) -> None:
    """Several workers a rank, and several connections of one pair."""
    for rank in range(4):
        c.rank(rank).input[0].copy(c.rank(rank).output[rank])
        with c.parallel(2):
            for other in c.others(rank):
                c.rank(rank).input[0].copy(c.rank(other).output[rank], channel=other % 3)


def odds_and_ends(folder: str) -> None:
    """Types, operations, workers, instances, several executables at once; what is refused; a fabric that goes first."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    group = ut.init()
    fabric, size, rank = group.fabric, group.size, group.rank
    ring = LIBRARY["ring"].compile(size, target="staged", in_place=True)
    shot = LIBRARY["two_shot"].compile(size, target="staged", workers=3, instances=2, slots=1, depth=1)
    one_shot = LIBRARY["one_shot"].compile(size, target="staged", depth=3)
    runs = [
        LaneExecutable(fabric, one, lane, SMALL)
        for one, lane in ((ring, "dma"), (shot, "peer"), (one_shot, "net"), (one_shot, "dma"), (shot, "net"))
    ]
    assert runs[2].describe() == "torch.distributed (gloo) between all ranks"
    kinds = (torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bfloat16)
    for salt, dtype in enumerate(kinds):
        for run in runs:
            for operation in ("sum", "max", "min"):
                case = Case(run.schedule, rank, [3001], dtype, operation, salt)
                run.run(case.source, case.out, case.spans, operation)
                case.check((dtype, operation, run.schedule.name))
    if size == 4:
        merged = LaneExecutable(fabric, in_channels.compile(target="staged"), "dma", SMALL)
        assert len(merged.schedule.workers_of(0)) > 1
        case = Case(merged.schedule, rank, [2500, 0, 7, 9001], torch.float32)
        merged.run(case.source, case.out, case.spans)
        case.check("channels")
    buffers = [fabric.buffer(999, torch.float32) for _ in range(2)]
    case = Case(shot, rank, [999], torch.float32)
    buffers[0].local.copy_(case.source)
    runs[1].run(buffers[0], buffers[1], [999])
    case.out.copy_(buffers[1].local)
    case.check("symmetric buffers")

    refused = []
    for make in (
        lambda: LaneExecutable(fabric, LIBRARY["ring"].compile(size, target="direct")),
        lambda: LaneExecutable(fabric, LIBRARY["ring"].compile(size + 1)),
        lambda: LaneExecutable(fabric, ring, "pigeon"),
        lambda: LaneExecutable(fabric, ring, stride=1 << 30),
        lambda: runs[1].run(torch.zeros(8, 8).t(), torch.zeros(64), [64]),
        lambda: runs[1].run(torch.zeros(64), torch.zeros(63), [64]),
        lambda: runs[1].run(torch.zeros(64), torch.zeros(64).int(), [64]),
        lambda: runs[1].run(torch.zeros(64), torch.zeros(64), [64], "product"),
    ):
        try:
            make()
        except InvalidArgument as error:
            refused.append(str(error))
    Path(folder, f"refused-{rank}").write_text("\n".join(refused))
    runs[0].close()
    group.barrier()
    faulthandler.cancel_dump_traceback_later()


def lose_a_rank(folder: str, lane: str) -> None:
    """A rank dies between two calls; the others are told, whatever they wait for."""
    group = ut.init()
    run = LaneExecutable(group.fabric, LIBRARY["ring"].compile(group.size, target="staged"), lane, SMALL)
    source, out = torch.ones(50_000), torch.empty(50_000)
    run.run(source, out, [50_000])
    if group.rank == 1:
        Path(folder, "death").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            run.run(source, out, [50_000])
    except RankLost as error:
        Path(folder, f"lost-{group.rank}").write_text(f"{time.time()} {error}")
        raise
