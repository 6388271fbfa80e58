"""What ranks do in the tests of the collectives: each function runs on every rank and returns what it found."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import undertow as ut
from undertow import collective as co
from undertow.collective import selection
from undertow.collective.cpu_runtime import CpuExecutable
from undertow.collective.language import Trace
from undertow.errors import RankLost, UndertowError
from undertow.fabric import timeline
from undertow.fabric.atomics import load, signal_add

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8)


def data(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, different on every rank and place."""
    return ((torch.arange(count) * 7 + rank * 3) % 5 - 2).to(dtype)


def reduced(ranks: int, count: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    parts = torch.stack([data(rank, count, torch.float64 if op == "avg" else dtype) for rank in range(ranks)])
    if op == "avg":
        total = parts.to(dtype).sum(0)
        return total / ranks
    return {"sum": parts.sum(0, dtype=dtype), "max": parts.max(0).values, "min": parts.min(0).values}[op]


def all_reduces() -> list[str]:
    group = ut.init()
    wrong = []
    for count in (1, 5, 64, 1000, 40_003, 300_000):
        for dtype in DTYPES if count == 1000 else (torch.float32, torch.bfloat16):
            for op in ("sum", "max", "min", "avg") if count in (5, 1000) else ("sum",):
                if op == "avg" and dtype not in (torch.float32, torch.float64):
                    continue  # refused for integers; rounded, so not exact, for others
                expected = reduced(group.size, count, dtype, op)
                mine = data(group.rank, count, dtype)
                out = torch.full_like(mine, 77)
                co.all_reduce(mine, out=out, op=op)
                kept = mine.equal(data(group.rank, count, dtype))
                co.all_reduce(mine, op=op)
                if not (out.equal(expected) and mine.equal(expected) and kept):
                    wrong.append(f"{count} {dtype} {op}")
    strided = data(group.rank, 12, torch.float32).view(3, 4).t()
    co.all_reduce(strided)
    if not strided.equal(reduced(group.size, 12, torch.float32, "sum").view(3, 4).t()):
        wrong.append("a transposed tensor")
    empty = torch.empty(0)
    co.all_reduce(empty)
    return wrong


def the_others() -> list[str]:
    group = ut.init()
    rank, size = group.rank, group.size
    wrong = []

    def expect(name: str, found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
        if (found is None) != (expected is None) or (found is not None and not found.equal(expected)):
            wrong.append(name)

    for rows, width in ((1, 3), (5, 7), (64, 1000)):
        mine = data(rank, rows * width, torch.float32).view(rows, width)
        every = torch.cat([data(one, rows * width, torch.float32).view(rows, width) for one in range(size)])
        expect(f"all_gather {rows}", co.all_gather(mine), every)
        total = reduced(size, rows * width, torch.float32, "sum").view(rows, width)
        expect(f"reduce_scatter {rows}", co.reduce_scatter(mine), total.tensor_split(size)[rank])
        parts = data(rank, size * rows * width, torch.float32).view(size * rows, width)
        swapped = torch.cat(
            [data(one, size * rows * width, torch.float32).view(size, rows, width)[rank] for one in range(size)]
        )
        expect(f"all_to_all {rows}", co.all_to_all(parts), swapped)
        within = parts.clone()
        expect(f"all_to_all in place {rows}", co.all_to_all(within, out=within), swapped)
        for root in range(size):
            sent = mine.clone()
            expect(f"broadcast {rows} {root}", co.broadcast(sent, root=root), every.view(size, rows, width)[root])
            at_root = rank == root
            expect(f"reduce {rows} {root}", co.reduce(mine, root=root), total if at_root else None)
            expect(f"gather {rows} {root}", co.gather(mine, root=root), every if at_root else None)
            kept = co.reduce(mine, root=root, out=mine.clone() if at_root else None)
            own = mine.clone()
            expect(
                f"reduce into the input {rows} {root}", co.reduce(own, root=root, out=own if at_root else None), kept
            )
            out = torch.full((rows, width), 9.0)
            scattered = co.scatter(every if at_root else None, out=out, root=root)
            expect(f"scatter {rows} {root}", scattered, mine)
    uneven = [one % 3 for one in range(size)]
    mine = data(rank, uneven[rank] * 4, torch.int32).view(-1, 4)
    every = torch.cat([data(one, uneven[one] * 4, torch.int32).view(-1, 4) for one in range(size)])
    expect("uneven all_gather", co.all_gather(mine, rows=uneven), every)
    table = [[(3 * source + to) % 4 for to in range(size)] for source in range(size)]
    mine = torch.cat([torch.full((count, 2), 10 * rank + to) for to, count in enumerate(table[rank])])
    theirs = torch.cat([torch.full((table[one][rank], 2), 10 * one + rank) for one in range(size)])
    expect("uneven all_to_all", co.all_to_all(mine, rows=table[rank]), theirs)
    marks = torch.zeros(size, dtype=torch.bool)
    marks[rank] = True
    expect("bool all_gather", co.all_gather(marks), torch.eye(size, dtype=torch.bool).view(-1))
    return wrong


def every_library_program() -> list[str]:
    """All of them through the call that takes a program, in and out of place."""
    group = ut.init()
    wrong = []
    for name in ("ring", "one_shot", "two_shot", "all_pairs_chunks", "halving_doubling", "double_binary_tree"):
        for count in (3, 1000):
            mine = data(group.rank, count, torch.float32)
            out = torch.full_like(mine, 77)
            expected = reduced(group.size, count, torch.float32, "sum")
            co.all_reduce(mine, out=out, program=co.LIBRARY[name])
            co.all_reduce(mine, program=co.LIBRARY[name])
            if not (out.equal(expected) and mine.equal(expected)):
                wrong.append(f"{name} {count}")
    return wrong


def without_peers() -> tuple[list[str], set[str], set[str]]:
    """As on a node of GPUs that cannot address each other's memory, with the choices of GPUs: what was wrong, and what
    ran calls that named no program, and others."""
    group = ut.init()
    fabric: Any = group.fabric
    fabric.lanes = lambda: {"net": "", "peer": "the GPUs have no peer access", "dma": ""}
    for name, choices in selection.CPU.items():
        selection.CPU[name] = tuple(replace(one, packets=True, instances=4) for one in choices)
    wrong, ran = [], []
    for program in (None, co.LIBRARY["one_shot"]):
        mine = data(group.rank, 1000, torch.bfloat16)
        if not co.all_reduce(mine, program=program).equal(reduced(group.size, 1000, torch.bfloat16, "sum")):
            wrong.append(f"all_reduce by {program}")
        if program is None:
            every = torch.cat([data(one, 6, torch.float32) for one in range(group.size)])
            mine = data(group.rank, 6, torch.float32)
            if not co.all_gather(mine).equal(every):
                wrong.append("all_gather")
            if not co.broadcast(mine.clone(), root=1).equal(data(1, 6, torch.float32)):
                wrong.append("broadcast")
            total = reduced(group.size, 6, torch.float32, "sum")
            if not co.reduce_scatter(mine).equal(total.tensor_split(group.size)[group.rank]):
                wrong.append("reduce_scatter")
        ran.append({type(one).__name__ for one in fabric.kept.values() if hasattr(one, "poisons")})
        fabric.kept.clear()
    return wrong, ran[0], ran[1]


@co.program("all_reduce", chunks=2)
def my_own(c: Trace) -> None:
    """Sums at rank 0 and sends back, with a worker of its own for each half."""
    for half in range(2):
        total = c.rank(0).input[half].copy(c.rank(0).output[half], channel=half)
        for other in c.others(0):
            total.reduce(c.rank(other).input[half], channel=half)
        for other in c.others(0):
            total.copy(other, channel=half)


def a_user_program() -> bool:
    group = ut.init()
    mine = data(group.rank, 999, torch.float32)
    co.all_reduce(mine, program=my_own)
    return mine.equal(reduced(group.size, 999, torch.float32, "sum"))


def interrupted_into_strided_outputs() -> list[bool]:
    """Whether all of a strided output, and of a strided tensor reduced in place, is poison after a call that failed."""
    group = ut.init()
    run = CpuExecutable.run

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise ArithmeticError("made by a test")  # an interrupt would end the group

    CpuExecutable.run = interrupted  # type: ignore[method-assign]
    outs = [torch.zeros(4, 3 * group.size).t(), torch.zeros(4, 3).t()]
    try:
        for call in (lambda: co.all_gather(torch.ones(3, 4), out=outs[0]), lambda: co.all_reduce(outs[1])):
            try:
                call()
            except ArithmeticError:
                continue
            raise AssertionError("nothing was raised")
    finally:
        CpuExecutable.run = run  # type: ignore[method-assign]
    return [bool(one.isnan().all()) for one in outs]


def sizes_of_all_reduce() -> list[int]:
    """Sizes around those at which another program or another staging is taken, in the same order on all ranks, several
    calls of each: what is wrong."""
    group = ut.init()
    bounds = (4 << 10, 16 << 10, 96 << 10, 192 << 10, 512 << 10)
    sizes = [bound // 4 + step for bound in bounds for step in (-1, 0, 1)]
    wrong = []
    for count in [*sizes, *reversed(sizes)]:
        for _ in range(20 if count < 10_000 else 6):
            mine = data(group.rank, count, torch.float32)
            co.all_reduce(mine)
            if not mine.equal(reduced(group.size, count, torch.float32, "sum")):
                wrong.append(count)
    return wrong


def repeated_after_a_failure() -> list[object]:
    """What a call that was made before says once the group has failed, and whether it left its tensor alone."""
    group = ut.init()
    mine = torch.zeros(64)
    for _ in range(3):
        co.all_reduce(mine)
    calls = group.calls
    group.fail(RankLost(rank=group.rank, group=group.name, reason="it was told to"))
    try:
        co.all_reduce(mine)
    except RankLost as error:
        return ["told to" in str(error), bool((mine == 0).all()), group.calls - calls <= 1]
    return ["nothing was raised"]


def refusals() -> list[str]:
    ut.init()
    said = []
    for attempt in (
        lambda: co.all_reduce(torch.ones(3), op="product"),
        lambda: co.all_reduce(torch.ones(3, dtype=torch.bool)),
        lambda: co.all_reduce(torch.ones(3, dtype=torch.int32), op="avg"),
        lambda: co.all_reduce(torch.ones(3, requires_grad=True)),
        lambda: co.all_reduce(torch.ones(3), out=torch.ones(4)),
        lambda: co.all_to_all(torch.ones(2 * ut.init().size + 1, 2)),
        lambda: co.broadcast(torch.ones(3), root=9),
        lambda: co.all_gather(torch.ones(3), program=co.LIBRARY["ring"]),
        lambda: co.all_reduce(torch.ones(3), program="ring"),  # type: ignore[arg-type]
        lambda: co.all_gather(torch.ones(3), rows=[1]),
    ):
        try:
            attempt()
            said.append("not refused")
        except UndertowError as error:
            said.append(str(error))
    return said


def kernels_hooked() -> dict[str, Any]:
    """A producer signals parcels one by one, a consumer waits for tiles; the program runs in between on a stream."""
    group = ut.init()
    rank, size = group.rank, group.size
    schedule = co.LIBRARY["all_gather_ring"].compile(size, ready=True, needed=True)
    executable = CpuExecutable(group.fabric, schedule)
    mine, out = torch.zeros(1000), torch.full((size * 1000,), float("nan"))
    parcels, tiles = np.zeros(32, np.int32), np.zeros(32 * size, np.int32)
    arrived: list[bool] = []

    def consume() -> None:
        for step in range(size):
            shard = (rank + step) % size
            while load(tiles.ctypes.data + 128 * shard) < 1:
                time.sleep(0.0005)
            arrived.append(bool((out[shard * 1000 : (shard + 1) * 1000] == shard + 1).all()))

    stream = group.fabric.stream("collective")
    consumer = threading.Thread(target=consume)
    consumer.start()
    stream.run(
        lambda: executable.run(mine, out, [1000] * size, parcels=(parcels.ctypes.data, 1), tiles=tiles.ctypes.data)
    )
    group.barrier()
    early = bool(torch.isfinite(out).any())
    mine.fill_(rank + 1)
    signal_add(parcels.ctypes.data, 1)
    stream.join()
    consumer.join()
    return {"early": early, "arrived": arrived, "tiles": [int(one) for one in tiles[::32]]}


@co.program("all_reduce", chunks=4)
def chunkwise(c: Trace) -> None:
    """Chunk by chunk at rank 0: chunk 0 can be summed long before chunk 3 exists."""
    for chunk in range(4):
        total = c.rank(0).input[chunk].copy(c.rank(0).output[chunk])
        for other in c.others(0):
            total.reduce(c.rank(other).input[chunk])
        for other in c.others(0):
            total.copy(other)


def parcels_overlap() -> dict[str, Any]:
    """The first chunk's sum is everywhere before the last parcel is made: the point of the hook."""
    group = ut.init()
    executable = CpuExecutable(group.fabric, chunkwise.compile(group.size, ready=True, needed=True, in_place=True))
    tensor = torch.full((400,), float("nan"))
    parcels, tiles = np.zeros(4 * 32, np.int32), np.zeros(4 * 32, np.int32)
    stream = group.fabric.stream("collective")
    stream.run(lambda: executable.run(tensor, tensor, [400], parcels=(parcels.ctypes.data, 1), tiles=tiles.ctypes.data))
    order = []
    for chunk in range(4):
        tensor[chunk * 100 : (chunk + 1) * 100] = group.rank + 1 + chunk
        signal_add(parcels.ctypes.data + 128 * chunk, 1)
        deadline = time.monotonic() + 20
        while load(tiles.ctypes.data + 128 * chunk) < 1 and time.monotonic() < deadline:
            time.sleep(0.0005)
        order.append([int(one) for one in tiles[::32]])
    stream.join()
    ranks = group.size
    expected = torch.cat([torch.full((100,), ranks * (ranks + 1) / 2 + ranks * chunk) for chunk in range(4)])
    return {"order": order, "right": tensor.equal(expected)}


def lost_in_a_collective() -> str:
    """Rank 1 dies while the others are inside; what they hear."""
    group = ut.init()
    tensor = torch.ones(1000)
    co.all_reduce(tensor)
    if group.rank == 1:
        os.kill(os.getpid(), 9)
    try:
        while True:
            co.all_reduce(tensor)
    except UndertowError as error:
        return str(error)


@co.program("all_reduce", chunks=2)
def two_ways(c: Trace) -> None:
    """Two halves, each with a worker of its own, that meet different ranks first."""
    for half, start in enumerate((0, c.ranks - 1)):
        total = c.rank(start).input[half].copy(c.rank(start).output[half], channel=half)
        for step in range(1, c.ranks):
            here = c.rank((start + step) % c.ranks if half == 0 else (start - step) % c.ranks)
            own = here.input[half].copy(here.output[half], channel=half)
            total = own.reduce(total, channel=half)
        for other in c.others(total.rank):
            total.copy(other, channel=half)


def workers_apart() -> tuple[bool, list[tuple[str, int, int, int]]]:
    """When each worker did which step: (engine, step, start, end)."""
    group = ut.init()
    executable = CpuExecutable(group.fabric, two_ways.compile(group.size, in_place=True))
    tensor = data(group.rank, 400_000, torch.float32)
    with timeline.recording() as recorder:
        executable.run(tensor, tensor, [tensor.numel()])
    right = tensor.equal(reduced(group.size, 400_000, torch.float32, "sum"))
    events = recorder.timeline().events
    return right, [(one.engine, one.details["step"], one.start_ns, one.end_ns) for one in events]


def across_named_nodes() -> tuple[list[int], list[str], list[str]]:
    """Ranks told to stand on two nodes share no memory: the same calls then go by messages."""
    os.environ["UNDERTOW_NODE"] = f"node {int(os.environ['RANK']) // 2}"
    group = ut.init()
    return list(group.nodes), all_reduces(), the_others()


def disagreements() -> list[str]:
    """Calls that look alike but are not: told to all ranks, before anything moves."""
    group = ut.init()
    said = []
    for attempt in (
        lambda: co.broadcast(torch.ones(3), root=group.rank),
        lambda: co.reduce_scatter(torch.ones((4, 3) if group.rank else (3, 4))),
        lambda: co.all_reduce(torch.ones(3), out=torch.ones(3) if group.rank else None),
        lambda: co.all_gather(torch.ones(2), rows=[2, 2 + group.rank] if group.rank == 0 else [1, 2]),
    ):
        try:
            attempt()
            said.append("nothing")
        except UndertowError as error:
            said.append(type(error).__name__)
    return said


def largest_with_nan() -> list[bool]:
    """NaN wins in max and min wherever it stands, as in torch."""
    group = ut.init()
    found = []
    for op in ("max", "min"):
        for nan_rank in range(group.size):
            tensor = torch.full((64,), float("nan") if group.rank == nan_rank else 1.0)
            found.append(bool(co.all_reduce(tensor, op=op).isnan().all()))
    return found


def remade_group() -> list[bool]:
    """torch.distributed made anew under the same name: nothing of the old group is used."""
    found = []
    for _ in range(2):
        group = ut.init()
        for _ in range(3):
            tensor = data(group.rank, 500, torch.float32)
            co.all_reduce(tensor)
            found.append(tensor.equal(reduced(group.size, 500, torch.float32, "sum")))
        ut.shutdown()
    return found


def made_again() -> list[str]:
    """Flat calls into a given result, three times each: the first goes the long way, the others need not.

    A rank's shard may lie in the result where it belongs, on some ranks or all; anywhere else it is in the way.
    """
    group = ut.init()
    rank, size = group.rank, group.size
    wrong = []
    for count in (1, 1000, 70_000):
        every = torch.cat([data(one, count, torch.float32) for one in range(size)])
        for form in ("apart", "at home", "at home on one", "elsewhere"):
            for turn in range(3):
                room = torch.full((size * count + 1,), float("nan"))
                out = room[:-1]
                mine = data(rank, count, torch.float32)
                begin = {"at home": rank * count, "elsewhere": rank * count + 1}.get(form)
                if form == "at home on one" and rank == 0:
                    begin = 0
                if begin is not None:
                    room[begin : begin + count] = mine
                    mine = room[begin : begin + count]
                found = co.all_gather(mine, out=out)
                if found is not out or not out.equal(every):
                    wrong.append(f"all_gather {count} {form} {turn}")
        for op in ("sum", "max", "avg"):
            for turn in range(3):
                mine, out = data(rank, size * count, torch.float32), torch.full((count,), float("nan"))
                kept = mine.clone()
                co.reduce_scatter(mine, out=out, op=op)
                wanted = reduced(size, size * count, torch.float32, op)[rank * count : (rank + 1) * count]
                if not out.equal(wanted.to(torch.float32)) or not mine.equal(kept):
                    wrong.append(f"reduce_scatter {count} {op} {turn}")
                inside = kept.clone()
                co.reduce_scatter(inside, out=inside[:count], op=op)
                if not inside[:count].equal(wanted.to(torch.float32)):
                    wrong.append(f"reduce_scatter {count} {op} {turn} into its input")
        uneven = data(rank, size * count + 1, torch.float32)
        shares = reduced(size, size * count + 1, torch.float32, "sum").tensor_split(size)
        for turn in range(2):
            out = torch.full_like(shares[rank], float("nan"))
            if not co.reduce_scatter(uneven, out=out).equal(shares[rank]):
                wrong.append(f"reduce_scatter {count} uneven {turn}")
        mean = data(rank, count, torch.float32)
        twice = co.all_reduce(mean, op="avg", out=torch.full_like(mean, float("nan")))
        if not (
            twice.equal(reduced(size, count, torch.float32, "avg").to(torch.float32))
            and mean.equal(data(rank, count, torch.float32))
        ):
            wrong.append(f"all_reduce {count} avg")
    complex_one = torch.tensor([1 + 2j, 3 + 4j]) * (rank + 1)
    wanted = torch.cat([torch.tensor([1 - 2j, 3 - 4j]) * (one + 1) for one in range(size)])
    for turn in range(2):  # views whose bytes are not their values, in and out
        co.all_gather(complex_one, out=torch.empty(2 * size, dtype=complex_one.dtype))
        if not co.all_gather(complex_one.conj(), out=torch.empty_like(wanted)).equal(wanted):
            wrong.append(f"all_gather of a conjugate {turn}")
        out = torch.empty_like(wanted)
        co.all_gather(complex_one, out=out.conj())
        if not out.equal(wanted):
            wrong.append(f"all_gather into a conjugate {turn}")
    try:
        co.all_gather(torch.ones(1000), out=torch.ones(3))
        wrong.append("a result that is too short")
    except UndertowError:
        pass
    return wrong
