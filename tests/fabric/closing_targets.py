"""What happens after an end: functions that run inside ranks."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref

import torch
import torch.distributed as dist

import undertow as ut
from undertow import errors
from undertow.errors import AllocationFailed
from undertow.fabric import registry
from undertow.fabric.post_ring import Post
from undertow.fabric.proxy import Proxy
from undertow.fabric.segment import Segment


def sentence(use: object) -> str:
    try:
        use()  # type: ignore[operator]
    except errors.UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def use_after_close() -> list[str]:
    """Signals, hand-offs, lanes, buffers and the fabric of a closed group: errors, never a wild pointer."""
    group = ut.init()
    fabric = group.fabric
    signals, pairs, lane = fabric.signals(2), fabric.handoffs(), fabric.lane("peer")
    buffer = fabric.buffer((4,), torch.float32)
    group.barrier()
    group.close()
    other = 1 - group.rank
    return [
        sentence(lambda: signals.add(0, 0)),
        sentence(lambda: pairs.free(other, 0)),
        sentence(lambda: lane.free(other, 0)),
        sentence(lambda: buffer.local),
        sentence(lambda: group.fabric),
        sentence(lambda: ut.matmul_all_reduce(torch.ones(2, 2), torch.ones(2, 2), group=group)),
    ]


def groups_come_and_go(times: int) -> list[tuple[int, int]]:
    """Descriptors and threads after each sub-group was made, used and ended."""
    group = ut.init()
    counts = []
    for _ in range(times):
        process_group = dist.new_group(list(range(group.size)))
        mine = ut.as_group(process_group)
        ut.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), group=mine, strategy="chunked:dma")
        group.barrier()
        mine.close()
        dist.destroy_process_group(process_group)
        del mine, process_group
        gc.collect()
        group.barrier()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return counts


def proxy_outlived(lane: str) -> list[str]:
    """The fabric goes while a proxy is still there."""
    group = ut.init()
    Proxy(group.fabric, lane=lane)
    group.barrier()
    ut.shutdown()
    return sorted(thread.name for thread in threading.enumerate() if thread.name == "undertow-proxy")


def no_memory_for_a_ring() -> list[str]:
    """On one rank: all of them are told, and the group goes on."""
    group = ut.init()
    real, said = Segment.create, []

    def create(size: int, purpose: str) -> Segment:
        if purpose == "a proxy ring":
            raise RuntimeError(f"no memory for {purpose}")  # as torch says it
        return real(size, purpose)

    if group.rank == 1:
        Segment.create = staticmethod(create)  # type: ignore[method-assign]
    for _ in range(2):
        try:
            Proxy(group.fabric)
            said.append("made")
        except AllocationFailed as error:
            said.append(str(error))
        Segment.create = staticmethod(real)  # type: ignore[method-assign]
    return said


def last_posts(how: str) -> list[int]:
    """How many of a rank's last two posts have arrived when it ends right behind them, by the proxy's own order.

    The second one is posted, and the end begins, between the proxy's look for posts and its look for the end.
    """
    group = ut.init()
    proxy = Proxy(group.fabric, signals=1)
    buffer = group.fabric.buffer(4, torch.float32)
    number, to = proxy.attach(buffer), 1 - group.rank
    group.barrier()
    post = Post(number, 0, to, number, 0, 16, 0)
    between, real = threading.Event(), proxy.posts.take
    ended = threading.Thread(target=registry._leave if how == "script" else group.fabric.finish)

    def take() -> Post | None:
        found = real()
        if found is None and proxy.posts.taken == 1 and not between.is_set():  # the first look after the first post
            proxy.post(post)
            ended.start()
            while not proxy.stopping:
                time.sleep(0.001)
            between.set()
        return found

    proxy.posts.take = take  # type: ignore[method-assign]
    proxy.post(post)
    between.wait(5)
    ended.join()
    alive = proxy._thread.is_alive()
    proxy.signals.wait(0, 2)
    return [proxy.signals.read(0), int(alive)]


def shut_down_and_again(lane: str) -> list[list[int]]:
    """Of the proxy, three times in a row: its threads, groups that live, descriptors beyond the first time's."""
    counts, groups, first = list[list[int]](), list[weakref.ref[ut.Group]](), 0
    for turn in range(3):
        group = ut.init()
        groups.append(weakref.ref(group))
        ut.matmul_all_reduce(torch.ones(8, 3), torch.ones(3, 5), group=group, strategy=f"fused:{lane}")
        ut.shutdown()
        del group
        end = time.monotonic() + 5
        while _of_proxies() and time.monotonic() < end:  # the others' goodbyes are on their way
            time.sleep(0.01)
        gc.collect()
        opened = len(os.listdir("/proc/self/fd"))
        first = opened if turn == 0 else first
        counts.append([_of_proxies(), sum(one() is not None for one in groups), opened - first])
    return counts


def _of_proxies() -> int:
    return sum(one.name.startswith("undertow-proxy") for one in threading.enumerate())


def wrong_peers_and_slots() -> list[str]:
    group = ut.init()
    buffer = group.fabric.buffer((4,), torch.float32)
    found = []
    for name in ("peer", "net"):
        lane = group.fabric.lane(name)
        found.append(sentence(lambda lane=lane: lane.send(-1, torch.ones(4), buffer, 0, 0)))
        found.append(sentence(lambda lane=lane: lane.send(group.size, torch.ones(4), buffer, 0, 0)))
    found.append(sentence(lambda: group.fabric.lane("peer").send(1 - group.rank, torch.ones(4), buffer, 0, 8)))
    return found


def growth_after_capture() -> tuple[bool, bool, str]:
    """A workspace that a graph has seen outlives its successor. The capture is feigned: the rule is the same."""
    group = ut.init()
    fabric = group.fabric
    first = fabric.workspace("peer", 1 << 20)
    fabric.capturing = lambda: True  # type: ignore[method-assign]
    assert fabric.workspace("peer", 100) is first
    refused = sentence(lambda: fabric.workspace("peer", 8 << 20))
    fabric.capturing = lambda: False  # type: ignore[method-assign]
    second = fabric.workspace("peer", 8 << 20)
    alive = sentence(lambda: first.local) == "nothing was raised"
    third = fabric.workspace("peer", 16 << 20)
    return alive, sentence(lambda: second.local).startswith("BufferReleased") and third is not second, refused


def different_parcels() -> None:
    group = ut.init()
    plans = [ut.Plan("chunked", "peer", ((0, 32), (32, 64))), ut.Plan("chunked", "peer", ((0, 16), (16, 64)))]
    x = torch.ones(64, 8)
    w = torch.ones(8, 8)
    ut.matmul_all_reduce(x, w, strategy="serial:peer")
    ut.matmul_all_reduce(x, w, plan=plans[group.rank])


def different_lanes() -> None:
    group = ut.init()
    ut.matmul_all_reduce(torch.ones(8, 8), torch.ones(8, 8), strategy=("serial:peer", "serial:dma")[group.rank])


def busy_node() -> str:
    """The first node holds the interpreter's lock for longer than a heart may be silent."""
    group = ut.init()
    assert group.nodes == (0, 1)
    if group.rank == 0:
        before = time.monotonic()
        while time.monotonic() - before < 5:
            sum(range(10**8))  # one C call after the other: no other thread of this process runs for long
    y = ut.matmul_all_reduce(torch.ones(2, 2), torch.ones(2, 2), strategy="serial:net")
    return str(y[0, 0].item())


def asked_at_a_check() -> str:
    """What a check says that asks somebody who knows of a failure nobody noticed."""
    group = ut.init()
    asked: list[int] = []
    group.on_check(lambda: asked.append(1))
    group.check()
    assert asked == [1]
    group.on_check(lambda: group.fail(errors.UndertowError(reason="A kernel said so.")))
    try:
        group.check()
    except errors.UndertowError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    os.write(1, f"{shut_down_and_again(sys.argv[1])}\n".encode())
