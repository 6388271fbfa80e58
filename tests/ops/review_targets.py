"""Rank functions for what a hostile reader found in the operators."""

from __future__ import annotations

import os
from typing import Any

import matmul_suite
import torch
from matmul_suite import Case

import undertow as ut
from undertow.collective import LIBRARY
from undertow.errors import UndertowError
from undertow.ops.finish import Finish
from undertow.plan.plan import Plan


def modes() -> None:
    """Threads that carry parcels run in the caller's inference mode, with a Parameter as bias too."""
    group = ut.init()
    with torch.inference_mode():  # the fabric, too, is made here
        buffer = group.fabric.buffer(3, torch.float32)
    buffer.local.fill_(1)  # torch refuses that of a tensor that was made in the mode
    x, w = torch.ones(64, 8), torch.ones(8, 16)
    bias = torch.nn.Parameter(torch.ones(16))
    for strategy in ("serial:peer", "chunked:peer", "signaled:peer", "signaled:dma"):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                y = ut.matmul_all_reduce(x, w, bias=bias, group=group, strategy=strategy)
                assert bool((y == 8 * group.size + 1).all()), (strategy, mode)
                assert not y.requires_grad
    others: list[dict[str, Any]] = [{"strategy": one} for one in ("fused:dma", "fused:net")]
    others += [{"strategy": f"signaled:{lane}", "program": LIBRARY["one_shot"]} for lane in ("dma", "net")]
    for options in others:  # what is made at the first call of a kind is written to by calls in no such mode
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                y = ut.matmul_all_reduce(x, w, group=group, **options)
            assert bool((y == 8 * group.size).all()), (options, mode)
    ut.matmul_all_reduce(x, w, bias=bias, group=group).sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((16,), 64.0))
    assert _refused_with_gradients() == ["bias"] * 16 + ["residual"]


def no_tokens_then_one() -> None:
    """A plan for no rows must not serve a call with one."""
    group = ut.init()
    w = torch.ones(4, 6)
    for rows in (0, 1, 0, 2, 1):
        splits = [[0] * group.size for _ in range(group.size)]
        for rank in range(group.size):
            splits[rank][(rank + 1) % group.size] = rows
        out = torch.full((rows, 6), -7.0)
        ut.matmul_all_to_all(torch.ones(rows, 4), w, splits, group=group, out=out)
        assert bool((out == 4).all()), rows


def own_rows_apart() -> None:
    """Where a lane says that it stages, own rows are copied on a stream of their own: all of them, and by the end."""
    group = ut.init()
    group.fabric.lane("dma").staged_chunk = 1
    for seed, shape in enumerate(((37, 16, 5), (64, 33, 7), (3, 8, 8))):
        for strategy in ("serial:dma", "chunked:dma", "signaled:dma"):
            matmul_suite.verify(group, Case("matmul_all_to_all", strategy, torch.float32, shape, seed))


def long_pieces() -> None:
    """Packed parcels whose pieces are far from their fraction of the rows."""
    group = ut.init()
    rows, n, k = 128, 513, 4
    plan = Plan(
        "signaled", "peer", ((0, 1), (1, 2)), tile=(1, 512), group_bands=1 << 20, order="proportional", layout="packed"
    )
    splits = [[rows] * group.size for _ in range(group.size)]
    x = torch.arange(rows * group.size).remainder(7).float()[:, None].expand(-1, k).contiguous()
    for lane in ("peer", "dma"):
        out = torch.full((rows * group.size, n), -7.0)
        from dataclasses import replace

        ut.matmul_all_to_all(x, torch.ones(k, n), splits, group=group, plan=replace(plan, lane=lane), out=out)
        mine = x[rows * group.rank : rows * (group.rank + 1), :1] * k
        assert torch.equal(out, mine.repeat(group.size, n))


def disagreeing(what: str) -> str:
    """Ranks that mean different calls hear of it."""
    group = ut.init()
    first = group.rank == 0
    x, w = torch.ones(4, 3), torch.ones(3, 5)
    try:
        if what == "bias":
            ut.matmul_all_reduce(x, w, bias=torch.ones(5) if first else None, group=group, strategy="serial:peer")
        elif what == "rows":
            mine = torch.ones(3 if first else 4, 3)
            ut.all_gather_matmul(mine, w, rows=[3, 5] if first else [4, 4], group=group, strategy="serial:peer")
        else:
            splits = [[2, 2], [1, 3]] if first else [[1, 3], [2, 2]]
            ut.matmul_all_to_all(x, w, splits, group=group, strategy="serial:peer")
    except UndertowError as error:
        return type(error).__name__
    return "nothing"


def half_way() -> str:
    """An error while bytes move ends the group at once."""
    group = ut.init()
    x, w = torch.ones(64, 8), torch.ones(8, 16)
    ut.matmul_all_reduce(x, w, group=group, strategy="chunked:peer")
    right = Finish.sum

    def wrong(*_: object, **__: object) -> None:
        raise ValueError("made by a test")

    Finish.sum = wrong  # type: ignore[method-assign,assignment]
    try:
        ut.matmul_all_reduce(x, w, group=group, strategy="chunked:peer")
    except (ValueError, UndertowError):
        pass
    finally:
        Finish.sum = right  # type: ignore[method-assign]
    try:
        ut.matmul_all_reduce(x, w, group=group, strategy="chunked:peer")
    except UndertowError as error:
        return str(error)
    return "nothing"


def known_calls(strategy: str) -> list[str]:
    """Calls that were all made before, but not by all ranks at once: their values are wrong, and nobody waits."""
    group = ut.init(deadline=20)
    x, w = torch.ones(4, 3), torch.ones(3, 5)

    def one() -> object:
        return ut.matmul_all_reduce(x, w, activation="relu", strategy=strategy)

    def other() -> object:
        return ut.matmul_all_reduce(x, w, bias=torch.ones(5), strategy=strategy)

    said = []
    for _ in range(3):
        one()
        other()
    try:  # only one of them is in a call, and counts it
        ut.matmul_all_reduce(x, w, strategy=strategy) if group.rank == 0 else group.barrier()
    except UndertowError as error:
        said.append(type(error).__name__)
    for _ in range(3):
        one()
        other()
    for turn in (0, 1):
        try:
            (one if group.rank == turn else other)()
        except UndertowError as error:
            said.append(f"{type(error).__name__} {'relu' in str(error) and 'bias' in str(error)}")
    return said


def _refused_with_gradients() -> list[str]:
    """What torch's dispatcher would take for another call, or broadcast."""
    x, w, said = torch.ones(4, 3, requires_grad=True), torch.ones(3, 5), []
    for operator in (ut.matmul_all_reduce, ut.all_gather_matmul, ut.matmul_all_to_all, ut.replicated_matmul):
        for bias in (torch.ones(5, device="meta"), torch.ones(1), torch.ones(4, 5), torch.ones(5).double()):
            try:
                operator(x, w, bias=bias, strategy="serial")  # type: ignore[operator]
            except UndertowError as error:
                said.append(str(error).partition(" ")[0])
    try:
        ut.matmul_all_reduce(x, w, residual=torch.ones(4, 5).double())
    except UndertowError as error:
        said.append(str(error).partition(" ")[0])
    return said


def forked_and_interrupted() -> tuple[str, bool, str]:
    """What a child is told, whether its parent's calls are as ever, and what follows an interrupt half-way."""
    group = ut.init()
    x, w = torch.ones(4, 3), torch.ones(3, 5)
    ut.matmul_all_reduce(x, w, strategy="serial:peer")
    out, into = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing"
        try:
            ut.matmul_all_reduce(x, w, strategy="serial:peer")
        except UndertowError as error:
            said = type(error).__name__
        finally:
            os.write(into, said.encode())
            os._exit(0)
    os.waitpid(child, 0)
    y = ut.matmul_all_reduce(x, w, strategy="serial:peer")
    finished, right = Finish.sum, bool((y == 3 * group.size).all())

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    Finish.sum = interrupted  # type: ignore[method-assign,assignment]
    try:
        ut.matmul_all_reduce(x, w, strategy="serial:peer")
    except KeyboardInterrupt:
        pass
    finally:
        Finish.sum = finished  # type: ignore[method-assign]
    try:
        ut.matmul_all_reduce(x, w, strategy="serial:peer")
        said = "nothing"
    except UndertowError as error:
        said = str(error)
    return os.read(out, 100).decode(), right, said
