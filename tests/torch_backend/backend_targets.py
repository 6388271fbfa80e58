"""What ranks do in the tests of the backend: each function runs on every rank and returns what it found."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

import undertow.torch_backend  # noqa: F401  # registers it
from undertow.errors import UndertowError
from undertow.fabric import registry
from undertow.fabric.group import Group
from undertow.torch_backend import fallback

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


@contextmanager
def world(backend: str = "undertow") -> Iterator[tuple[int, int]]:
    dist.init_process_group(backend)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


class Findings:
    """Names of what was not as it should be."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def expect(self, name: str, found: object, expected: object) -> None:
        if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
            same = found.dtype == expected.dtype and found.shape == expected.shape and found.equal(expected)
        else:
            same = found == expected
        if not same:
            self.wrong.append(f"{name}: {found}, not {expected}")


def data(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, different on every rank and place."""
    return ((torch.arange(count) * 7 + rank * 3) % 5).to(dtype)


def reduced(ranks: int, count: int, dtype: torch.dtype, operation: str) -> torch.Tensor:
    parts = torch.stack([data(rank, count, dtype) for rank in range(ranks)])
    if dtype == torch.bool:
        return parts.all(0) if operation == "min" else parts.any(0)
    if operation == "avg":
        return (parts.double().sum(0) / ranks).to(dtype)
    return {"sum": parts.sum(0, dtype=dtype), "max": parts.max(0).values, "min": parts.min(0).values}[operation]


@contextmanager
def fallbacks() -> Iterator[list[str]]:
    """What the fallback is said to carry meanwhile."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    keep = Keep()
    logger = logging.getLogger("undertow")
    logger.addHandler(keep)
    fallback._said.clear()
    try:
        yield said
    finally:
        logger.removeHandler(keep)


def every_dtype_and_reduction() -> list[str]:
    with world() as (rank, size), fallbacks() as said:
        found = Findings()
        for dtype in DTYPES:
            for name, operation in OPERATIONS.items():
                if name == "avg" and not dtype.is_floating_point:
                    continue
                expected = reduced(size, 12, dtype, name)
                for shape in ((12,), (3, 4)):
                    tensor = data(rank, 12, dtype).view(shape)
                    dist.all_reduce(tensor, op=operation)
                    found.expect(f"all_reduce {dtype} {name}", tensor, expected.view(shape))
                strided = data(rank, 12, dtype).view(3, 4).t()
                dist.all_reduce(strided, op=operation)
                found.expect(f"all_reduce, transposed, {dtype} {name}", strided, expected.view(3, 4).t())
                out = torch.empty(12 // size, dtype=dtype)
                dist.reduce_scatter_tensor(out, data(rank, 12, dtype), op=operation)
                found.expect(f"reduce_scatter {dtype} {name}", out, expected.chunk(size)[rank])
                tensor = data(rank, 12, dtype)
                dist.reduce(tensor, dst=size - 1, op=operation)
                if rank == size - 1:
                    found.expect(f"reduce {dtype} {name}", tensor, expected)
        for empty in (torch.empty(0), torch.empty(0, 3, dtype=torch.int64)):
            dist.all_reduce(empty)
        leaf = torch.ones(4, requires_grad=True)
        dist.all_reduce(leaf)
        found.expect("a leaf", leaf.detach(), torch.full((4,), float(size)))
        found.expect("fallbacks", said, [])
        return found.wrong


def every_form() -> list[str]:
    """Lists, single buffers, uneven parts, gaps in memory, types that are only copied."""
    with world() as (rank, size), fallbacks() as said:
        found = Findings()
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn):
            mine = data(rank, 6).to(dtype)
            every = [data(one, 6).to(dtype) for one in range(size)]
            tensor = mine.clone().view(2, 3)
            dist.broadcast(tensor, src=size - 1)
            found.expect(f"broadcast {dtype}", bytes_of(tensor), bytes_of(every[-1].view(2, 3)))
            outputs = [torch.empty(6, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, mine)
            found.expect(f"all_gather {dtype}", bytes_of(torch.cat(outputs)), bytes_of(torch.cat(every)))
        mine, every = data(rank, 6), [data(one, 6) for one in range(size)]
        out = torch.empty(size * 6)
        dist.all_gather_into_tensor(out, mine)
        found.expect("all_gather_into_tensor", out, torch.cat(every))
        gaps = torch.empty(6, size).t()
        dist.all_gather_into_tensor(gaps, mine)
        found.expect("all_gather_into_tensor with gaps", gaps, torch.stack(every))
        within = torch.zeros(size, 6)
        within[rank] = mine
        dist.all_gather_into_tensor(within, within[rank])
        found.expect("all_gather_into_tensor in place", within, torch.stack(every))
        bytes_in_common = bytearray(data(rank, 6 * size).numpy().tobytes())
        tensor = torch.frombuffer(bytes_in_common, dtype=torch.float32)
        out = torch.frombuffer(bytes_in_common, dtype=torch.float32, count=6, offset=4 * 3)
        dist.reduce_scatter_tensor(out, tensor)
        found.expect("two storages of one memory", out, reduced(size, 6 * size, torch.float32, "sum").chunk(size)[rank])
        uneven = [torch.empty(one + 1, 2) for one in range(size)]
        dist.all_gather(uneven, torch.full((rank + 1, 2), float(rank)))
        for one, tensor in enumerate(uneven):
            found.expect("uneven all_gather", tensor, torch.full((one + 1, 2), float(one)))
        out = torch.empty(3)
        dist.reduce_scatter(out, list(data(rank, 3 * size).chunk(size)))
        found.expect("reduce_scatter", out, reduced(size, 3 * size, torch.float32, "sum").chunk(size)[rank])
        gathered = [torch.empty(2, 3) for _ in range(size)] if rank == 1 else None
        dist.gather(mine.view(2, 3), gathered, dst=1)
        if gathered is not None:
            found.expect("gather", torch.stack(gathered), torch.stack(every).view(size, 2, 3))
        out = torch.empty(2, 3).t()
        dist.scatter(out, [one.view(2, 3).t() for one in every] if rank == 1 else None, src=1)
        found.expect("scatter", out, mine.view(2, 3).t())
        dist.barrier()
        found.expect("fallbacks", said, [])
        return found.wrong


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def all_to_alls() -> list[str]:
    with world() as (rank, size), fallbacks() as said:
        found = Findings()
        parts = torch.stack([data(one, size * 4).view(size, 4) for one in range(size)])  # from, to
        out = torch.empty(size, 4)
        dist.all_to_all_single(out, parts[rank].clone())
        found.expect("even", out, parts[:, rank])
        table = [[(3 * source + to) % 4 for to in range(size)] for source in range(size)]
        for shape in ((), (2,), (2, 3)):
            mine = torch.cat([torch.full((count, *shape), 10 * rank + to) for to, count in enumerate(table[rank])])
            theirs = torch.cat([torch.full((table[one][rank], *shape), 10 * one + rank) for one in range(size)])
            out = torch.empty_like(theirs)
            dist.all_to_all_single(out, mine, [row[rank] for row in table], table[rank])
            found.expect(f"uneven {shape}", out, theirs)
        outputs = [torch.empty(table[one][rank], 2) for one in range(size)]
        dist.all_to_all(outputs, [torch.full((count, 2), float(rank)) for count in table[rank]])
        for one, tensor in enumerate(outputs):
            found.expect("lists", tensor, torch.full((table[one][rank], 2), float(one)))
        try:  # as many rows in all, but not from each
            dist.all_to_all_single(torch.empty(2 * size), torch.empty(2 * size), [1, 3] + [2] * (size - 2), [2] * size)
        except UndertowError as error:
            expected = "rows is 2 on rank 0 for rank 0, but must be 1, as rank 0 expects."
            found.expect("splits that disagree", str(error), expected)
        else:
            found.wrong.append("splits that disagree are not refused")
        found.expect("fallbacks", said, [])
        return found.wrong


def what_falls_back() -> tuple[list[str], list[str]]:
    """Operations that Undertow lacks: right all the same, and said once."""
    with world() as (rank, size), fallbacks() as said:
        found = Findings()
        for _ in range(2):
            tensor = torch.full((4,), float(rank + 1))
            dist.all_reduce(tensor, op=dist.ReduceOp.PRODUCT)
            found.expect("product", tensor, torch.full((4,), float(torch.arange(1, size + 1).prod())))
        bits = torch.tensor([1 << rank])
        dist.all_reduce(bits, op=dist.ReduceOp.BOR)
        found.expect("bor", bits, torch.tensor([(1 << size) - 1]))
        got = torch.empty(3)
        request = dist.irecv(got, src=(rank - 1) % size)
        dist.send(torch.full((3,), float(rank)), dst=(rank + 1) % size)
        request.wait()
        found.expect("message", got, torch.full((3,), float((rank - 1) % size)))
        messages = [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size),
            dist.P2POp(dist.irecv, batch := torch.empty(2), (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        found.expect("batch", batch, torch.full((2,), float((rank - 1) % size)))
        short = torch.ones(3)
        dist.group.WORLD.allreduce(short).wait()
        found.expect("short form", short, torch.full((3,), float(size)))
        named = torch.tensor([float(rank), -float(rank)])
        dist.group.WORLD.allreduce(named, op=dist.ReduceOp.MAX).wait()
        found.expect("short form, by name", named, torch.tensor([size - 1.0, 0.0]))
        memory = torch.zeros(7)
        gaps = memory[::2]
        gaps.fill_(rank + 1.0)
        dist.all_reduce(gaps, op=dist.ReduceOp.PRODUCT)
        product = float(torch.arange(1, size + 1).prod())
        found.expect("product, and between the gaps", memory, torch.tensor([product, 0.0] * 3 + [product]))
        small = torch.full((3,), 200, dtype=torch.int16)
        work = dist.all_reduce(small, op=dist.ReduceOp.PRODUCT, async_op=True)
        (small,) = work.get_future().then(lambda done: done.value()).wait()
        found.expect("product of int16", small, torch.full((3,), 200**size).to(torch.int16))
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        found.expect("objects", objects, [{"rank": one, "text": "x" * one} for one in range(size)])
        sent = [{"from": 0}] if rank == 0 else [None]
        dist.broadcast_object_list(sent, src=0)
        found.expect("object list", sent, [{"from": 0}])
        return found.wrong, said


def handles() -> list[str]:
    """Asynchronous calls: order, waiting, futures, progress without waiting."""
    with world() as (rank, size):
        found = Findings()
        tensors = [data(rank, 50 + step) for step in range(20)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        last = data(rank, 5)
        dist.all_reduce(last)  # blocking: after all of those before it
        found.expect("those before it", [work.is_completed() for work in works], [True] * 20)
        for step in (19, 0, 7):
            works[step].wait()
        for step, tensor in enumerate(tensors):
            found.expect(f"call {step}", tensor, reduced(size, 50 + step, torch.float32, "sum"))
        found.expect("success", works[3].is_success(), True)
        tensor = data(rank, 9)
        (result,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
        found.expect("future", result, reduced(size, 9, torch.float32, "sum"))
        twice = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2).wait()
        found.expect("then", twice, reduced(size, 9, torch.float32, "sum") * size * 2)
        sums = data(rank, 9)

        def again(_: object) -> object:
            return dist.all_reduce(sums, async_op=True).get_future().then(lambda _: None).wait()

        dist.all_reduce(sums, async_op=True).get_future().then(again).wait()  # as PowerSGD does
        found.expect("a callback that waits for another", sums, reduced(size, 9, torch.float32, "sum") * size)
        for seconds, set_timeout in ((8, c10d._set_pg_timeout), (7, dist.group.WORLD.set_timeout)):
            set_timeout(timedelta(seconds=seconds))
            found.expect("a new timeout", dist.group.WORLD.undertow.deadline, float(seconds))
        work, limit = dist.all_reduce(tensor, async_op=True), time.monotonic() + 20
        while not work.is_completed() and time.monotonic() < limit:
            time.sleep(0.001)
        found.expect("progress without waiting", work.is_completed(), True)
        with c10d._coalescing_manager(async_ops=True) as together:
            for tensor in tensors:
                dist.all_reduce(tensor)
        together.wait()
        for step, tensor in enumerate(tensors):
            found.expect(f"coalesced {step}", tensor, reduced(size, 50 + step, torch.float32, "sum") * size)
        shards, whole = [data(rank, 2), data(rank, 5)], [torch.empty(2 * size), torch.empty(5 * size)]
        with c10d._coalescing_manager():
            for out, shard in zip(whole, shards, strict=True):
                dist.all_gather_into_tensor(out, shard)
        for out, count in zip(whole, (2, 5), strict=True):
            found.expect(f"coalesced gather {count}", out, torch.cat([data(one, count) for one in range(size)]))
        with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as together:
            dist.broadcast(tensor := data(rank, 3), src=0)
        together.wait()
        found.expect("coalesced broadcast", tensor, data(0, 3))
        product = torch.full((100,), 2.0)
        with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as together:
            dist.all_reduce(product, op=dist.ReduceOp.PRODUCT)
        found.expect("what is waited for", [len(one._works) for one in together.works], [1])
        together.wait()
        found.expect("coalesced, by the fallback", product, torch.full((100,), 2.0**size))
        return found.wrong


def functional_collectives() -> list[str]:
    with world() as (rank, size), fallbacks() as said:
        found = Findings()
        everybody = dist.group.WORLD
        mine = data(rank, 6).view(3, 2)
        total = reduced(size, 6, torch.float32, "sum").view(3, 2)
        every = torch.cat([data(one, 6).view(3, 2) for one in range(size)])
        found.expect("all_reduce", plain(functional.all_reduce(mine, "sum", everybody)), total)
        found.expect("its input", mine, data(rank, 6).view(3, 2))
        found.expect("average", plain(functional.all_reduce(mine, "avg", everybody)), total / size)
        found.expect("all_gather", plain(functional.all_gather_tensor(mine, 0, everybody)), every)
        wide = data(rank, 2 * size).view(size, 2)
        scattered = plain(functional.reduce_scatter_tensor(wide, "sum", 0, everybody))
        found.expect(
            "reduce_scatter", scattered, reduced(size, 2 * size, torch.float32, "sum").view(size, 2)[rank][None]
        )
        swapped = plain(functional.all_to_all_single(wide, None, None, everybody))
        found.expect(
            "all_to_all", swapped, torch.stack([data(one, 2 * size).view(size, 2)[rank] for one in range(size)])
        )
        found.expect("broadcast", plain(functional.broadcast(mine, 0, everybody)), data(0, 6).view(3, 2))
        both = functional.all_reduce_coalesced([mine, mine * 2], "sum", everybody)
        found.expect("coalesced", torch.stack([plain(one) for one in both]), torch.stack([total, total * 2]))
        found.expect("fallbacks", said, [])
        return found.wrong


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(tensor)


def sub_groups() -> list[str]:
    """Two halves at a time, and a mesh; each group its own Undertow group."""
    with world() as (rank, size):
        found = Findings()
        halves = [dist.new_group(list(range(size // 2))), dist.new_group(list(range(size // 2, size)))]
        mine, members = (
            halves[rank // (size // 2)],
            [one for one in range(size) if one // (size // 2) == rank // (size // 2)],
        )
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=mine)
        found.expect("half", tensor, torch.full((3,), float(sum(members))))
        tensor = torch.full((3,), float(rank))
        dist.broadcast(tensor, src=members[-1], group=mine)
        found.expect("root by its rank of all", tensor, torch.full((3,), float(members[-1])))
        works = [dist.all_reduce(torch.ones(7), group=group, async_op=True) for group in (mine, None)]
        for work in works:
            work.wait()
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=mesh.get_group("outer"))
        found.expect("mesh", tensor, torch.full((2,), 2.0))
        dist.destroy_process_group(mine)
        dist.all_reduce(tensor)
        found.expect("two threads", in_crossed_order(members), [2.0, 2.0])
        return found.wrong


def in_crossed_order(members: list[int]) -> list[float]:
    """Two groups whose first calls are on two threads: each rank begins with another group."""
    patience = timedelta(seconds=20)
    groups = [dist.new_group(members, patience, use_local_synchronization=True) for _ in range(2)]
    begun = {group.group_name: threading.Event() for group in groups}
    sums = [torch.ones(1) for _ in groups]

    class Told(Group):
        def __init__(self, process_group: dist.ProcessGroup, *others: Any) -> None:
            begun[process_group.group_name].set()
            super().__init__(process_group, *others)

    with mock.patch.object(registry, "Group", Told):
        threads = []
        for place in sorted(range(2), key=lambda place: (place + dist.get_rank()) % 2):
            threads.append(
                threading.Thread(target=dist.all_reduce, args=(sums[place],), kwargs={"group": groups[place]})
            )
            threads[-1].start()
            begun[groups[place].group_name].wait(20)
        for thread in threads:
            thread.join()
    return [float(one) for one in sums]


def made_again() -> list[bool]:
    found = []
    for _ in range(3):
        with world() as (rank, size):
            tensor = data(rank, 100)
            dist.all_reduce(tensor)
            found.append(tensor.equal(reduced(size, 100, torch.float32, "sum")))
    return found


def lost_rank() -> tuple[str, float]:
    """Rank 1 dies; the others are in a call, or wait for an asynchronous one."""
    dist.init_process_group("undertow")
    rank = dist.get_rank()
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), 9)
    began = time.monotonic()
    try:
        dist.all_reduce(tensor, async_op=rank == 2).wait() if rank == 2 else dist.all_reduce(tensor)
    except UndertowError as error:
        return str(error), time.monotonic() - began
    return "nothing", time.monotonic() - began


def late_rank() -> str:
    """Rank 1 does not come: the deadline of the group is torch's timeout."""
    dist.init_process_group("undertow", timeout=timedelta(seconds=2))
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    try:
        dist.all_reduce(tensor, async_op=True).wait()
    except UndertowError as error:
        return str(error)
    return "nothing"


def early_end() -> str:
    """Rank 1 ends in order where the other one makes one more call."""
    dist.init_process_group("undertow")
    dist.all_reduce(tensor := torch.ones(10))
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(tensor)
        except UndertowError as error:
            return str(error)
    return ""


def limited_wait() -> str:
    """A wait with a limit of its own ends; the call goes on and is right."""
    with world() as (rank, size):
        tensor, said = torch.ones(5), ""
        dist.all_reduce(torch.ones(5))  # ranks compare the first call of a kind, and wait for each other there
        go = torch.ones(1)
        if rank == 1:
            dist.recv(go, src=0)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            try:
                work.wait(timedelta(milliseconds=200))
            except UndertowError as error:
                said = str(error)
            dist.send(go, dst=1)
        work.wait()
        return f"{said} {tensor.eq(size).all()}"
