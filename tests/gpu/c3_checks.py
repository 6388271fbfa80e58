"""What runs inside ranks of a virtual node for the tests of c3: exact results on poisoned memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import undertow as ut
from undertow import collective
from undertow.c3.workloads import Exchange
from undertow.fabric import share as shares

STRATEGIES = ("serial", "base", "priority", "partition", "both", "dma", "dma+fewer")


def computations(group: ut.Group, compiled: bool) -> dict[str, Callable[[], torch.Tensor]]:
    """Callables of all kinds that know nothing of what runs beside them."""
    device = group.device
    x = torch.ones(1024, 1024, device=device, dtype=torch.bfloat16)
    q = torch.ones(1, 8, 512, 64, device=device, dtype=torch.bfloat16)

    def block() -> torch.Tensor:
        return torch.relu(x @ x) * 2 + 1

    def users_own() -> torch.Tensor:
        from undertow.kernels import move

        out = torch.full_like(x, -1)
        move.copy(out, x, shares.bound() or 16)
        return out

    found: dict[str, Callable[[], torch.Tensor]] = {
        "attention": lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        "a Triton kernel of the user's": users_own,
        "a block": block,
    }
    if compiled:
        found["a compiled block"] = torch.compile(block)
    return found


def everything(compiled: bool = True) -> list[str]:
    """Each computation beside each collective under each strategy; then graphs, failures and lifetimes."""
    group = ut.init()
    said = []
    exchanges = [
        Exchange(name, 3 << 20, group) for name in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
    ]
    for name, compute in computations(group, compiled).items():
        compute()
        wanted = compute().clone()
        for share in STRATEGIES:
            for exchange in exchanges:
                exchange.fill()
                done = ut.concurrent(compute, exchange, share=share)
                assert torch.equal(done.compute, wanted), (name, share)
                assert exchange.wrong() == 0, (name, share, exchange.name)
        said.append(f"{name}: {len(STRATEGIES)} strategies exact")
    for check in (captured, failing, dropped, by_block):
        check(group)
        said.append(f"{check.__name__}: good")
    return said


def captured(group: ut.Group) -> None:
    """A concurrent call inside a graph, replayed with other numbers."""
    for share in ("base", "priority", "dma"):
        x = torch.zeros(1 << 20, device=group.device)
        w = torch.ones(512, 512, device=group.device)
        y = torch.zeros(512, 512, device=group.device)

        def both() -> None:
            ut.concurrent(lambda: torch.mm(w, w, out=y), lambda: collective.all_reduce(x), share=share)  # noqa: B023

        both()
        both()
        torch.cuda.synchronize()
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            both()
        for turn in range(3):
            x.fill_(float(group.rank + turn))
            y.fill_(-1.0)
            graph.replay()
            torch.cuda.synchronize()
            assert bool((x == sum(one + turn for one in range(group.size))).all()), share
            assert bool((y == 512).all()), share
        group.barrier()
        del graph


def failing(group: ut.Group) -> None:
    """One rank's computation raises: the collective completes, the group goes on."""
    for share in ("base", "priority", "partition", "dma"):
        x = torch.ones(100_000, device=group.device)

        def fails() -> None:
            if group.rank == 1:
                raise KeyError("inside")

        raised = False
        try:
            ut.concurrent(fails, lambda: collective.all_reduce(x), share=share)  # noqa: B023
        except KeyError:
            raised = True
        assert raised == (group.rank == 1)
        assert bool((x == group.size).all()), share


def dropped(group: ut.Group) -> None:
    """The collective's input dies as soon as it is enqueued, and the computation takes all the memory it can get."""
    count = 4 << 20
    for share in ("base", "dma"):
        for turn in range(4):
            held = [torch.full((count,), float(group.rank + turn), device=group.device)]
            with ut.concurrent(share=share) as beside:
                posted = beside.post(lambda: collective.all_gather(held.pop()))  # noqa: B023
                taken = [torch.full((count,), -7.0, device=group.device) for _ in range(8)]
            found = posted.result.view(group.size, count)
            wanted = torch.arange(group.size, device=group.device).view(-1, 1) + turn
            assert bool((found == wanted).all()), share
            del taken


def by_block(group: ut.Group) -> None:
    """The context manager: what is posted comes after the work so far."""
    for share in ("base", "priority", "dma"):
        x = torch.zeros(1 << 20, device=group.device)
        with ut.concurrent(share=share) as beside:
            for _ in range(50):
                x += 1
            beside.post(lambda: collective.all_reduce(x))  # noqa: B023
        assert bool((x == 50 * group.size).all()), share


def divided() -> str:
    """On a whole card: parts that share no SM, and results that are right in each."""
    from undertow.c3.stand_ins import LocalCopy, Thieves
    from undertow.fabric import green

    group = ut.init()
    thieves = Thieves(group.device)
    first, second = green.halves(group.device.index, 100)
    used = []
    for part in (first, second):
        part.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(part.stream):
            used.append(thieves.places(2 * part.multiprocessors, 100_000))
    torch.cuda.synchronize()
    mine, others = (set(one.tolist()) for one in used)
    assert not mine & others
    assert len(mine) == first.multiprocessors
    copy = LocalCopy(64 << 20, group)
    x = torch.ones(2048, 2048, device=group.device, dtype=torch.bfloat16)
    for share in ("partition", "both", "dma+fewer"):
        copy.fill()
        done = ut.concurrent(lambda: x @ x, copy, share=share)
        assert bool((done.compute == 2048).all()), share
        assert copy.wrong() == 0, share
    return f"{len(mine)} and {len(others)} SMs, none in both"
