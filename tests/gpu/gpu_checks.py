"""Checks that only make sense on a GPU: captured graphs, in-kernel signals, aborted streams. Run inside ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import fabric_suite
import torch
import torch.distributed as dist
from fabric_suite import integers, settle

import undertow as ut
from undertow import collective as co
from undertow import errors
from undertow.fabric import placement

REPLAYS = 1000
SCALES = (1, -1, 2, -2, 3)


def _replay(
    group: ut.Group, name: str, x: torch.Tensor, y: torch.Tensor, run: Callable[[], None], want: torch.Tensor,
    ahead: int = REPLAYS,
) -> None:  # fmt: skip
    """Capture `run`, replay it with new inputs, a rank delayed now and then; all results are compared on the device.

    `ahead`: how many replays the host enqueues before it waits for them.
    """
    base = x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()  # warm: workspaces and kernels exist before the capture
    torch.cuda.current_stream().wait_stream(side)
    settle(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    settle(group)
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    for step in range(REPLAYS):
        scale = SCALES[step % len(SCALES)]
        torch.mul(base, scale, out=x)
        y.fill_(float("nan"))
        if step % 100 == 50 and group.rank == step // 100 % group.size:
            time.sleep(0.01)  # the host of one rank is late
        if step % 100 == 0 and group.rank == (step // 100 + 1) % group.size:
            torch.cuda._sleep(5_000_000)  # the device of one rank is late
        graph.replay()
        wrong += (y != want * scale).sum()
        if step % ahead == ahead - 1:
            torch.cuda.synchronize()
    assert int(wrong) == 0, f"{name}: {int(wrong)} wrong elements"


def run(names: list[str]) -> list[str]:
    """As in the suite, in a process that knows the checks of this file too."""
    return fabric_suite.run(names)


@fabric_suite.check
def captured_operators_replay(group: ut.Group) -> None:
    device = group.device
    xs = [integers((96, 40), rank, torch.float32, device) for rank in range(group.size)]
    ws = [integers((40, 72), 9 + rank, torch.float32, device) for rank in range(group.size)]
    want = sum(x @ w for x, w in zip(xs, ws, strict=True))
    for strategy in ("serial:peer", "serial:dma", "chunked:peer", "chunked:dma"):
        x, w = xs[group.rank].clone(), ws[group.rank]
        y = torch.empty(96, 72, device=device)

        def run(x: torch.Tensor = x, w: torch.Tensor = w, y: torch.Tensor = y, strategy: str = strategy) -> None:
            ut.matmul_all_reduce(x, w, group=group, strategy=strategy, out=y)

        _replay(group, strategy, x, y, run, want)


@fabric_suite.check
def captured_handoffs_replay(group: ut.Group) -> None:
    pairs = group.fabric.handoffs(1)
    box = group.fabric.buffer((4096,), torch.float32)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x = torch.arange(1, 4097, dtype=torch.float32, device=group.device) + group.rank
    y = torch.empty_like(x)

    def run() -> None:
        pairs.claim(right, 0)
        box.peer(right).copy_(x)
        pairs.deliver(right, 0)
        pairs.accept(left, 0)
        y.copy_(box.local)
        pairs.free(left, 0)

    _replay(group, "hand-off", x, y, run, torch.arange(1, 4097, dtype=torch.float32, device=group.device) + left)


@fabric_suite.check
def captured_kernels_with_epochs_replay(group: ut.Group) -> None:
    """In-kernel waits: both ends count their calls in device memory."""
    from undertow.kernels import move

    guard = group.fabric.guard
    words = group.fabric.buffer((64,), torch.int32)  # [0]: full, [32]: acknowledged
    box = group.fabric.buffer((10007,), torch.float32)
    own = torch.zeros(4, dtype=torch.int32, device=group.device)  # epochs and tickets of both ends
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x = torch.arange(1, 10008, dtype=torch.float32, device=group.device) + group.rank
    y = torch.empty_like(x)
    shared = {"abort": guard.abort, "error": guard.error, "deadline_ns": 20_000_000_000}

    def run() -> None:
        full, acknowledged = words.peer(right)[0:1], words.local[32:33]
        move.wait_and_copy(
            box.peer(right), x, 2, ready=acknowledged, done=full, epoch=own[0:1], ticket=own[1:2], ahead=0, **shared
        )
        full, acknowledged = words.local[0:1], words.peer(left)[32:33]
        move.wait_and_copy(
            y, box.local, 2, ready=full, done=acknowledged, epoch=own[2:3], ticket=own[3:4], ahead=1, **shared
        )

    _replay(group, "epochs", x, y, run, torch.arange(1, 10008, dtype=torch.float32, device=group.device) + left)
    assert int(guard.error[0]) == 0


@fabric_suite.check
def some_ranks_meet_more_often_than_others(group: ut.Group) -> None:
    """Memory of a group of some ranks, between memory of all: torch counts what a process does in all its groups."""
    some = dist.new_group(list(range(group.size // 2)))
    mine = ut.as_group(some) if group.rank < group.size // 2 else None
    for turn in range(2):
        for one in (mine, mine, group) if mine is not None else (group,):
            buffer = one.fabric.buffer(3, torch.int32)
            buffer.local.fill_(one.rank + 10 * turn)
            settle(one)
            assert [buffer.peer(peer).tolist() for peer in range(one.size)] == [
                [peer + 10 * turn] * 3 for peer in range(one.size)
            ]
            settle(one)
            buffer.release()
    if mine is not None:
        mine.close()


@fabric_suite.check
def calls_go_by_the_lane_of_gpus_with_peer_access(group: ut.Group) -> None:
    """What `dma` is between GPUs of their own, under whole calls and in graphs. Here its copies take SMs, so that no
    kernel may wait for them."""
    from undertow.fabric.cuda_lanes import CopyLane

    mine = ut.as_group(dist.new_group(list(range(group.size))))
    mine.fabric._lanes["dma"] = CopyLane(mine.fabric)
    device = group.device
    xs = [integers((96, 40), rank, torch.float32, device) for rank in range(group.size)]
    ws = [integers((40, 72), 9 + rank, torch.float32, device) for rank in range(group.size)]
    x, w, total = xs[group.rank], ws[group.rank], sum(x @ w for x, w in zip(xs, ws, strict=True))
    rows = total.tensor_split(group.size)[group.rank]
    for strategy in ("serial:dma", "chunked:dma"):
        for _ in range(3):
            assert torch.equal(ut.matmul_all_reduce(x, w, group=mine, strategy=strategy), total)
            assert torch.equal(ut.matmul_reduce_scatter(x, w, group=mine, strategy=strategy), rows)
            gathered = ut.all_gather_matmul(x, w, group=mine, strategy=strategy)
            assert torch.equal(gathered, torch.cat(xs) @ w)
    with placement.placed(placement.Placement("dma")):
        for _ in range(3):
            assert torch.equal(co.all_gather(x, group=mine), torch.cat(xs))
            assert torch.equal(co.all_reduce(x.clone(), group=mine), sum(xs[1:], xs[0].clone()))
            program = co.LIBRARY["ring"]
            assert torch.equal(co.all_reduce(x.clone(), group=mine, program=program), sum(xs[1:], xs[0].clone()))
    left, y = x.clone(), torch.empty_like(total)

    def run() -> None:
        ut.matmul_all_reduce(left, w, group=mine, strategy="chunked:dma", out=y)

    _replay(mine, "chunked over copies between peers", left, y, run, total)
    mine.close()


@fabric_suite.check
def copy_lane_works_where_peers_exist(group: ut.Group) -> None:
    """The lane for GPUs with peer access. Here both ends are one card, so only its correctness is shown."""
    from undertow.fabric.cuda_lanes import CopyLane

    lane = CopyLane(group.fabric)
    buffer = group.fabric.buffer((group.size, 5003), torch.float32)
    for step in range(5):
        mine = integers((5003,), group.rank + step, torch.float32, group.device)
        for offset in range(1, group.size):
            lane.send((group.rank + offset) % group.size, mine, buffer, group.rank * 5003, 0)
        for offset in range(1, group.size):
            peer = (group.rank - offset) % group.size
            got = lane.receive(peer, buffer, peer * 5003, 5003, 0)
            assert torch.equal(got, integers((5003,), peer + step, torch.float32, group.device))
            lane.free(peer, 0)
        lane.flush()


@fabric_suite.check
def joined_buffers_reach_every_peer(group: ut.Group) -> None:
    """Odd sizes, and again after a release: the memory is the buffer's own, whichever mapping is used."""
    for count in (1, 1000, (3 << 20) + 7):
        buffer = group.fabric.buffer((count,), torch.bfloat16)
        joined = group.fabric.joined(buffer)
        whole = joined.view(count, torch.bfloat16)
        buffer.local.fill_(group.rank + 1)
        settle(group)
        for rank in range(group.size):
            assert bool((whole[rank] == rank + 1).all()), (count, rank)
        settle(group)
        whole[(group.rank + 1) % group.size].fill_(10 + group.rank)
        settle(group)
        assert bool((buffer.local == 10 + (group.rank - 1) % group.size).all())
        read = torch.empty(group.size, 64, 64, dtype=torch.bfloat16, device=group.device)
        if count >= 4096:
            copy_tiles(joined.view(4096, torch.bfloat16).view(group.size, 64, 64), read)
            assert torch.equal(read[:, 0, 0], whole[:, 0])
            assert torch.equal(read.view(group.size, -1), whole[:, :4096])
        settle(group)
        group.fabric.part(joined)
        buffer.release()


def copy_tiles(source: torch.Tensor, out: torch.Tensor) -> None:
    """out = source [ranks, 64, 64], each tile by one load of a tensor descriptor of three dimensions."""
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def kernel(tiles, out):
        rank = tl.program_id(0)
        tile = tl.reshape(tiles.load([rank, 0, 0]), (64, 64))
        place = rank * 4096 + tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(out + place, tile)

    kernel[(len(source),)](TensorDescriptor.from_tensor(source, [1, 64, 64]), out)


def abandoned(deadline_only: bool, strategies: tuple[str, ...] = ("serial:peer", "chunked:dma")) -> str:
    """The last rank dies, or merely does not come; the others wait in a stream and must all raise."""
    group = ut.init()
    x = torch.ones(64, 64, device=group.device)
    for strategy in strategies:
        ut.matmul_all_reduce(x, x, strategy=strategy)
    settle(group)
    if deadline_only:
        group.deadline = 4.0  # only now: the first calls compile
    if group.rank == group.size - 1:
        if deadline_only:
            time.sleep(8)
            return "slept"
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    y = ut.matmul_all_reduce(x, x, strategy=strategies[-1])
    torch.cuda.synchronize()  # released by the watchdog
    assert time.monotonic() - began < 15
    assert bool(torch.isnan(y).all()), "the output of an aborted call was not poisoned"
    try:
        ut.matmul_all_reduce(x, x)
    except (errors.RankLost, errors.MismatchedCall) as error:
        return f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}"
    raise AssertionError("nobody noticed")
