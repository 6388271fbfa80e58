"""Rank functions for the tests of bad input: importable by name, as any rank function must be."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import undertow as ut
from undertow.errors import UndertowError
from undertow.fabric import cpu
from undertow.fabric.segment import Segment


def sentence(call: Callable[[], Any]) -> str:
    """What `call` is refused with: the kind and the sentence, or that it was not refused."""
    try:
        call()
    except UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def multiply(rows: int = 4, columns: int = 8, **options: Any) -> torch.Tensor:
    return ut.matmul_all_reduce(torch.ones(rows, 2), torch.ones(2, columns), **options)


def mismatched_rows(strategy: str) -> None:
    """Rank 1 calls with more rows. Whoever waits too long compares what the others called."""
    group = ut.init()
    multiply(strategy=strategy)
    multiply(rows=400 if group.rank == 0 else 800, columns=1000, strategy=strategy)


def mismatched_before_launch(strategy: str) -> tuple[str, bool]:
    """With UNDERTOW_CHECK all ranks hear of it first, and nothing has happened to the group."""
    group = ut.init()
    found = sentence(lambda: multiply(rows=4 + group.rank, strategy=strategy))
    return found, bool((multiply(strategy=strategy) == 2 * group.size).all())


def mismatched_buffers() -> tuple[str, bool]:
    group = ut.init()
    found = sentence(lambda: group.fabric.buffer(10 + group.rank, torch.float32))
    return found, group.fabric.buffer(10, torch.float32).shape == (10,)


def failing_allocation() -> tuple[str, str, bool]:
    """More than the node holds, asked for by all ranks; then a small one that only rank 1 cannot make."""
    group = ut.init()
    huge = sentence(lambda: group.fabric.buffer(1 << 50, torch.uint8))
    real = Segment.create

    def refuse(size: int, purpose: str) -> Segment:
        raise cpu.errors.OutOfSharedMemory(purpose=purpose, wanted="8 B", available="0 B")

    if group.rank == 1:
        cpu.Segment.create = refuse  # type: ignore[method-assign, assignment]
    small = sentence(lambda: group.fabric.buffer(8, torch.uint8))
    cpu.Segment.create = real  # type: ignore[method-assign]
    return huge, small, group.fabric.buffer(8, torch.uint8).shape == (8,)


def arguments() -> dict[str, str]:
    """Everything that one rank can refuse by itself, in one process group of one."""
    before = sentence(lambda: ut.as_group(None))
    group = ut.init()
    x, w = torch.ones(4, 2), torch.ones(2, 8)
    call = ut.matmul_all_reduce
    return {
        "before init": before,
        "x of three dimensions": sentence(lambda: call(x[None], w)),
        "w of another length": sentence(lambda: call(x, torch.ones(3, 8))),
        "w of another dtype": sentence(lambda: call(x, w.double())),
        "integers": sentence(lambda: call(x.int(), w.int())),
        "another device": sentence(lambda: call(x.to("meta"), w)),
        "out of another shape": sentence(lambda: call(x, w, out=torch.empty(8, 4))),
        "out strided": sentence(lambda: call(x, w, out=torch.empty(8, 4).T)),
        "unknown strategy": sentence(lambda: call(x, w, strategy="fast")),
        "unknown lane": sentence(lambda: call(x, w, strategy="serial:tube")),
        "plan for other rows": sentence(lambda: call(x, w, plan=ut.Plan("chunked", "net", ((0, 2), (2, 5))))),
        "not a group": sentence(lambda: call(x, w, group="world")),  # type: ignore[arg-type]
        "negative buffer": sentence(lambda: group.fabric.buffer((2, -1), torch.float32)),
        "lane name": sentence(lambda: group.fabric.lane("tube")),
    }


def lane_bounds() -> dict[str, str]:
    """Refused at the sender, before a byte moves."""
    group = ut.init()
    buffer = group.fabric.buffer(16, torch.float32)
    signals = group.fabric.signals(4)
    found: dict[str, str] = {}
    for name in ("peer", "dma"):
        lane = group.fabric.lane(name)
        source = torch.ones(8)
        found[f"{name}: past the end"] = sentence(lambda: lane.send(0, source, buffer, 9, 0))  # noqa: B023
        found[f"{name}: before the start"] = sentence(lambda: lane.send(0, source, buffer, -1, 0))  # noqa: B023
        found[f"{name}: dtype"] = sentence(lambda: lane.send(0, source.double(), buffer, 0, 0))  # noqa: B023
        found[f"{name}: strided"] = sentence(lambda: lane.send(0, source[::2], buffer, 0, 0))  # noqa: B023
    found["signal"] = sentence(lambda: signals.add(0, 4))
    buffer.release()
    found["released"] = sentence(lambda: buffer.local)
    found["released, sent to"] = sentence(lambda: group.fabric.lane("peer").send(0, torch.ones(8), buffer, 0, 0))
    group.barrier()
    group.close()
    found["closed group"] = sentence(lambda: multiply(group=group))
    found["closed group, barrier"] = sentence(group.barrier)
    found["made again"] = str(bool((multiply(strategy="serial:peer") == 2 * group.size).all()))
    return found


def paced() -> str:
    group = ut.init()
    return sentence(lambda: group.fabric.lane("dma"))


def exact() -> bool:
    """A run of everything that needs shared memory."""
    group = ut.init()
    strategies = [f"{grain}:{lane}" for grain in ("serial", "chunked") for lane in ("net", "peer", "dma")]
    return all(bool((multiply(rows=300, strategy=one) == 2 * group.size).all()) for one in strategies)


def bad_deadline() -> str:
    return sentence(ut.init)


def sub_group_without_me() -> str:
    """A ProcessGroup that this rank does not belong to."""
    ut.init()
    other = dist.new_group([0])
    return "member" if int(os.environ["RANK"]) == 0 else sentence(lambda: ut.as_group(other))


if __name__ == "__main__":
    assert ut.launch(exact, 2, device="cpu", deadline=20) == [True, True]
    print("exact")


def mismatched_strategies() -> None:
    """The same call, carried out differently: every rank would wait for messages that nobody sends."""
    group = ut.init()
    x = torch.ones(64, 64)
    ut.matmul_all_reduce(x, x, strategy="serial:peer")
    ut.matmul_all_reduce(x, x, strategy="chunked:dma")
    ut.matmul_all_reduce(x, x, strategy=("serial:peer", "chunked:dma")[group.rank])
