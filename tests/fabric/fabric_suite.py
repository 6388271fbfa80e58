"""What every fabric must do, as functions that run inside a rank: the same for CPU and CUDA.

`run(names)` is launched on every rank; a check that fails raises there, and the launcher shows its traceback.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import undertow as ut
from undertow import errors
from undertow.fabric.post_ring import Post
from undertow.fabric.proxy import Proxy
from undertow.ops.alone import all_reduce
from undertow.ops.matmul_all_reduce import reference

CHECK_SECONDS = 120
CHECKS: dict[str, Callable[[ut.Group], None]] = {}
STRATEGIES = [f"{grain}:{lane}" for grain in ("serial", "chunked") for lane in ("net", "peer", "dma")]


def check(function: Callable[[ut.Group], None]) -> Callable[[ut.Group], None]:
    CHECKS[function.__name__] = function
    return function


def run(names: list[str]) -> list[str]:
    """Run the named checks in order; the time each took, for people."""
    group = ut.init()
    report = []
    for name in names:
        group.barrier()
        began = time.perf_counter()
        faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)  # should a check hang after all: where, and an end
        try:
            CHECKS[name](group)
        except errors.UndertowError as error:
            raise AssertionError(f"check {name} on rank {group.rank}: {error}") from error
        settle(group)
        faulthandler.cancel_dump_traceback_later()
        report.append(f"{name} {time.perf_counter() - began:.2f} s")
        if group.rank == 0:
            print(report[-1], flush=True)
    return report


def settle(group: ut.Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    group.barrier()


def integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values in {-1, 0, 1}: sums of them are exact in every dtype used here. The same for equal seeds on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype).to(device)


@check
def buffers_reach_every_peer(group: ut.Group) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.float64):
        for shape in ((), (1,), (3, 5), (1023,), (7, 0)):
            buffer = group.fabric.buffer(shape, dtype)
            assert buffer.local.shape == shape
            assert torch.equal(buffer.local, torch.zeros(shape, dtype=dtype, device=group.device))
            settle(group)
            right = (group.rank + 1) % group.size
            buffer.peer(right).fill_(group.rank + 1)
            settle(group)
            left = (group.rank - 1) % group.size
            assert torch.equal(buffer.local, torch.full(shape, left + 1, dtype=dtype, device=group.device))
            settle(group)
            buffer.release()


@check
def released_buffers_say_so(group: ut.Group) -> None:
    buffer = group.fabric.buffer((4,), torch.float32)
    kept = buffer.local
    buffer.release()
    kept.fill_(3)  # a tensor taken before stays valid
    assert kept.sum().item() == 12
    for use in (lambda: buffer.local, lambda: buffer.address(group.rank)):
        try:
            use()
        except errors.BufferReleased as error:
            assert "[4]" in str(error)
        else:
            raise AssertionError("a released buffer was usable")


@check
def memory_is_counted_and_reserved(group: ut.Group) -> None:
    before = ut.memory(group)["buffers"]
    buffer = group.fabric.buffer((1000,), torch.float32)
    assert ut.memory(group)["buffers"] == before + 4000
    buffer.release()
    assert ut.memory(group)["buffers"] == before
    del buffer
    ut.reserve(3 << 20, group)
    held = ut.memory(group)
    for lane, missing in group.fabric.lanes().items():
        if lane != "net" and not missing:
            assert held[f"workspace {lane}"] >= 3 << 20
    first = group.fabric.workspace("peer", 10)
    assert group.fabric.workspace("peer", 100) is first  # the largest seen is kept
    assert group.fabric.workspace("peer", first.nbytes + 1) is not first


@check
def signals_add_set_and_wrap(group: ut.Group) -> None:
    signals = group.fabric.signals(4)
    for peer in range(group.size):
        signals.add(peer, 0, 2)
    signals.wait(0, 2 * group.size)
    assert signals.read(0) == 2 * group.size
    settle(group)
    if group.rank == 0:
        for peer in range(group.size):
            signals.set(peer, 1, 2**31 - 1)
    signals.wait(1, 2**31 - 1, sender=0)
    settle(group)
    # Cyclic: one past the largest value is larger, although it reads as the smallest.
    signals.add((group.rank + 1) % group.size, 1, 1)
    signals.wait(1, -(2**31))
    assert signals.read(1) == -(2**31)
    try:
        signals.set(group.rank, 4, 1)
    except errors.InvalidArgument as error:
        assert "index is 4" in str(error)
    else:
        raise AssertionError("a signal out of range was set")
    settle(group)
    signals.release()


@check
def handoffs_never_tear_or_reorder(group: ut.Group) -> None:
    """Payloads through one place, guarded only by the pair; ranks are delayed at random."""
    pairs = group.fabric.handoffs(2)
    box = group.fabric.buffer((2, 257), torch.int32)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    delays = random.Random(group.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    for step in range(60):
        slot = step % 2
        if delays.random() < 0.05:
            time.sleep(0.01)
        pairs.claim(right, slot)
        box.peer(right)[slot].fill_(step * group.size + group.rank)
        pairs.deliver(right, slot)
        pairs.accept(left, slot)
        wrong += (box.local[slot] != step * group.size + left).sum()
        pairs.free(left, slot)
    assert int(wrong) == 0


@check
def lanes_move_any_range(group: ut.Group) -> None:
    for name, missing in group.fabric.lanes().items():
        assert not missing, (name, missing)
        if name == "net" and group.device.type == "cuda" and group.size > 4:
            continue  # sockets between eight ranks on one card: covered at fewer ranks
        lane = group.fabric.lane(name)
        assert lane.describe()
        for dtype, count, start in ((torch.float32, 1, 0), (torch.uint8, 4099, 13), (torch.bfloat16, 70001, 5)):
            buffer = group.fabric.buffer((group.size * 70100,), dtype)
            for round_number in range(3):
                sources = [
                    integers((count,), 7 * rank + round_number, torch.float32, group.device)
                    for rank in range(group.size)
                ]
                mine = sources[group.rank].abs().to(dtype)
                for step in range(1, group.size):
                    lane.send((group.rank + step) % group.size, mine, buffer, group.rank * 70100 + start, 0)
                for step in range(1, group.size):
                    peer = (group.rank - step) % group.size
                    got = lane.receive(peer, buffer, peer * 70100 + start, count, 0)
                    assert torch.equal(got, sources[peer].abs().to(dtype)), (name, dtype, peer)
                    lane.free(peer, 0)
                lane.flush()
            settle(group)
            buffer.release()


@check
def sources_may_be_overwritten_behind_a_mark(group: ut.Group) -> None:
    """What was sent before it has left, whoever waits; what is sent after it is not waited for."""
    following, before, count = (group.rank + 1) % group.size, (group.rank - 1) % group.size, 1 << 20
    if group.size == 1:
        return
    for name in group.fabric.lanes():
        if name == "net" and group.device.type == "cuda":
            continue  # it copies to the host first
        lane = group.fabric.lane(name)
        buffer = group.fabric.buffer((2, count), torch.float32)
        for round_number in range(4):
            source = torch.full((count,), float(round_number), device=group.device)
            lane.send(following, source, buffer, 0, 0)
            left = lane.mark()
            later = torch.full((count,), -1.0, device=group.device)
            lane.send(following, later, buffer, count, 1)
            if name == "net":  # a message leaves when both sides have named it
                first = lane.receive(before, buffer, 0, count, 0)
            left()
            source.fill_(float("nan"))
            if name != "net":
                first = lane.receive(before, buffer, 0, count, 0)
            settle(group)
            assert bool((first == round_number).all()), (name, round_number)
            lane.free(before, 0)
            assert bool((lane.receive(before, buffer, count, count, 1) == -1).all()), (name, round_number)
            lane.free(before, 1)
            lane.flush()
        settle(group)
        buffer.release()


@check
def lanes_report_their_speed(group: ut.Group) -> None:
    if group.size == 1:
        return
    for name in ("peer", "dma"):
        first = group.fabric.bandwidth(name, 1 << 20)
        assert 1e6 < first < 1e14
        assert group.fabric.bandwidth(name, 1 << 20) == first
        assert group.exchange(first, "speeds") == [first] * group.size  # the slowest rank's, so the same on all


@check
def lanes_refuse_wrong_ranges(group: ut.Group) -> None:
    buffer = group.fabric.buffer((8,), torch.float32)
    for name in ("peer", "dma"):
        lane = group.fabric.lane(name)
        for source, start in (
            (torch.zeros(4, device=group.device), 5),
            (torch.zeros(4, device=group.device), -1),
            (torch.zeros(4, device=group.device, dtype=torch.float16), 0),
            (torch.zeros(8, device=group.device)[::2], 0),
        ):
            try:
                lane.send((group.rank + 1) % group.size, source, buffer, start, 0)
            except errors.InvalidArgument:
                continue
            raise AssertionError(f"{name} sent {source.dtype} at {start}")


@check
def all_reduce_is_exact_on_every_lane(group: ut.Group) -> None:
    for name in ("net", "peer", "dma"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for count in (1, group.size - 1, 1000, 65537):
                parts = [integers((count,), 100 * rank + count, dtype, group.device) for rank in range(group.size)]
                tensor = parts[group.rank].clone()
                all_reduce(group.fabric, name, tensor)
                assert torch.equal(tensor, torch.stack(parts).float().sum(0).to(dtype)), (name, dtype, count)


@check
def matmul_is_exact_for_every_strategy(group: ut.Group) -> None:
    device = group.device
    for rows, inner, columns in ((1, 1, 1), (3, 7, 5), (129, 65, 33), (64, 128, 257)):
        for dtype in (torch.float32, torch.bfloat16):
            inners = [inner + rank for rank in range(group.size)]  # uneven shards of K
            xs = [integers((rows, one), rank, dtype, device) for rank, one in enumerate(inners)]
            ws = [integers((one, columns), 50 + rank, dtype, device) for rank, one in enumerate(inners)]
            want = reference(xs, ws)
            for strategy in [*STRATEGIES, "auto"]:
                out = torch.full((rows, columns), float("nan"), dtype=dtype, device=device)
                got = ut.matmul_all_reduce(xs[group.rank], ws[group.rank], group=group, strategy=strategy, out=out)
                assert got is out
                assert torch.equal(out, want), (strategy, rows, inner, columns, dtype)
    explanation = ut.explain()
    assert explanation is not None
    assert explanation.asked == "auto"
    assert explanation.reason


@check
def groups_live_side_by_side(group: ut.Group) -> None:
    """Sub-groups, mesh dimensions, several alive, closed and made again."""
    if group.size % 2:
        return
    device = group.device
    for _ in range(2):
        halves = [dist.new_group(list(range(start, start + group.size // 2))) for start in (0, group.size // 2)]
        mine = ut.as_group(halves[group.rank * 2 // group.size])
        assert mine.size == group.size // 2
        x = torch.full((5, 2), float(group.rank + 1), device=device)
        w = torch.ones(2, 3, device=device)
        want = sum(2.0 * (rank + 1) for rank in mine.ranks)
        for strategy in ("serial:peer", "chunked:dma"):
            y = ut.matmul_all_reduce(x, w, group=mine, strategy=strategy)
            assert torch.equal(y, torch.full((5, 3), want, device=device))
            whole = ut.matmul_all_reduce(x, w, group=group, strategy=strategy)
            assert torch.equal(whole, torch.full((5, 3), float(group.size * (group.size + 1)), device=device))
        settle(group)
        mine.close()
        dist.destroy_process_group(halves[group.rank * 2 // group.size])
        settle(group)
    mesh = init_device_mesh(device.type, (2, group.size // 2), mesh_dim_names=("data", "tensor"))
    try:
        ut.as_group(mesh)
    except errors.InvalidArgument as error:
        assert "2 dimensions" in str(error)
    else:
        raise AssertionError("a two-dimensional mesh was taken for a group")
    for dimension in ("data", "tensor"):
        along = ut.as_group(mesh[dimension])
        x = torch.full((4, 1), float(group.rank + 1), device=device)
        y = ut.matmul_all_reduce(x, torch.ones(1, 2, device=device), group=mesh[dimension], strategy="serial:peer")
        want = float(sum(rank + 1 for rank in along.ranks))
        assert torch.equal(y, torch.full((4, 2), want, device=device))
        settle(group)
        if along is not group:  # a mesh of one column: torch hands out the group of all ranks itself
            along.close()


def own_stream(group: ut.Group) -> contextlib.AbstractContextManager[object]:
    """Threads that share a stream order their groups' calls differently on each rank: nothing could save that."""
    if group.device.type == "cpu":
        return contextlib.nullcontext()
    torch.cuda.set_device(group.device)
    return torch.cuda.stream(torch.cuda.Stream(group.device))


@check
def threads_use_their_own_groups(group: ut.Group) -> None:
    pair = [ut.as_group(dist.new_group(list(range(group.size)))) for _ in range(2)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            with own_stream(group):
                for step in range(20):
                    x = torch.full((6, 3), float(index + step), device=group.device)
                    w = torch.ones(3, 2, device=group.device)
                    y = ut.matmul_all_reduce(x, w, group=pair[index], strategy=("chunked:peer", "serial:dma")[index])
                    assert torch.equal(y, torch.full((6, 2), 3.0 * (index + step) * group.size, device=group.device))
        except BaseException as error:
            failures.append(error)

    for one in pair:
        for name in ("peer", "dma"):
            one.fabric.lane(name)
            one.fabric.workspace(name, 1 << 20)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    settle(group)
    for one in pair:
        one.close()


def _proxy_round_trip(group: ut.Group, lane: str, post: Callable[[Proxy, Post], None]) -> None:
    proxy = Proxy(group.fabric, signals=group.size, capacity=4, lane=lane)
    source = group.fabric.buffer((9, 1000), torch.int32)
    target = group.fabric.buffer((group.size, 9, 1000), torch.int32)
    numbers = proxy.attach(source), proxy.attach(target)
    source.local.copy_(torch.arange(9000, dtype=torch.int32, device=group.device).view(9, 1000) + group.rank)
    settle(group)
    for step in range(1, group.size):
        to = (group.rank + step) % group.size
        for piece in range(9):  # more posts than the ring has places
            begin = piece * 4000
            post(proxy, Post(numbers[0], begin, to, numbers[1], group.rank * 36000 + begin, 4000, group.rank))
    for peer in range(group.size):
        if peer != group.rank:
            proxy.wait(peer, 9, sender=peer)
            group.fabric.settle()
            group.check()  # an aborted wait returns: say why, not that bytes are missing
            want = torch.arange(9000, dtype=torch.int32, device=group.device).view(9, 1000) + peer
            assert torch.equal(target.local[peer], want), (lane, peer)
    settle(group)
    proxy.close()


@check
def proxy_moves_what_is_posted(group: ut.Group) -> None:
    if group.size == 1:
        return
    for lane in ("dma", "net"):
        if group.device.type == "cpu":
            _proxy_round_trip(group, lane, lambda proxy, post: proxy.post(post))
        else:
            from gpu_posts import post_from_kernel

            _proxy_round_trip(group, lane, post_from_kernel)


@check
def mismatched_buffers_are_refused_on_all_ranks(group: ut.Group) -> None:
    if group.size == 1:
        return
    try:
        group.fabric.buffer((4 + group.rank,), torch.float32)
    except errors.MismatchedCall as error:
        assert "buffer([4]" in str(error)
    else:
        raise AssertionError("ranks with different shapes got a buffer")
    group.fabric.buffer((4,), torch.float32).release()  # the group is as good as before


def again_and_again() -> None:
    """Shut down and initialised again in one process, with torch.distributed and without it going away too."""
    for outer in range(2):
        for inner in range(2):
            group = ut.init()
            x = torch.full((3, 2), float(group.rank + outer), device=group.device)
            y = ut.matmul_all_reduce(x, torch.ones(2, 2, device=group.device), strategy="chunked:peer")
            want = 2.0 * sum(rank + outer for rank in range(group.size))
            assert torch.equal(y, torch.full((3, 2), want, device=group.device))
            if inner == 0:
                group.close()
        ut.shutdown()
        assert not dist.is_initialized()
