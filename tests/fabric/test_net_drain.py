"""The proxy's `net` path: two ranks in one process over a real Gloo group; GPUs' memory under a driver that copies."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from no_driver import imported

from undertow.fabric import net_drain
from undertow.fabric.post_ring import Post
from undertow.fabric.symmetric import SymmetricBuffer

PIECE = net_drain._PIECE
PATIENCE = 10.0


def wires(patience: float) -> list[Any]:
    """A Gloo group of two."""
    store, made = dist.HashStore(), [None, None]

    def connect(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=patience))  # type: ignore[call-overload]

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return made


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not true() and time.monotonic() < end:
        time.sleep(0.001)
    return true()


class Node:
    """Two ranks: attached buffers and arrival words of each."""

    def __init__(self, on_device: bool = False, patience: float = PATIENCE) -> None:
        self.failures: list[Exception] = []
        self.words = [np.zeros(8, np.int32) for _ in range(2)]
        self.buffers: list[dict[int, Any]] = [{}, {}]
        self.drains = []
        for rank, wire in enumerate(wires(patience)):
            group = SimpleNamespace(
                rank=rank, size=2, device="a device", gloo=lambda purpose, wire=wire: wire, failed=False,
                connected=lambda what: contextlib.nullcontext(), fail=self.failures.append, check=lambda: None,
            )  # fmt: skip
            words = self.words[rank].ctypes.data
            signals = SimpleNamespace(count=8, address=lambda at, index, words=words: words + 4 * index)
            proxy = SimpleNamespace(
                group=group, signals=signals, on_device=on_device,
                posts=SimpleNamespace(named=self.buffers[rank].__getitem__),
                copies=lambda: SimpleNamespace(out=1, into=2, end=lambda: None),
                on_this_thread=contextlib.nullcontext,
            )  # fmt: skip
            self.drains.append(net_drain.NetDrain(proxy))  # type: ignore[arg-type]

    def attach(self, number: int, rank: int, memory: np.ndarray[Any, Any]) -> SymmetricBuffer:
        views: list[torch.Tensor | None] = [None, None]
        views[rank] = torch.from_numpy(memory)
        group: Any = SimpleNamespace(rank=rank)
        made = self.buffers[rank][number] = SymmetricBuffer(group, number, views, object())
        return made

    def close(self) -> None:
        """Both at once: each waits for the other's goodbye."""
        threads = [threading.Thread(target=one.close) for one in self.drains]
        for one in threads:
            one.start()
        for one in threads:
            one.join(PATIENCE)
        assert not any(one._receiver.is_alive() for one in self.drains)
        assert not self.failures


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver that copies at once."""
    driver = {
        "to_host": lambda stream, host, device, size: ctypes.memmove(host, device, size),
        "to_device": lambda stream, device, host, size: ctypes.memmove(device, host, size),
        "write": lambda stream, address, value: setattr(ctypes.c_int32.from_address(address), "value", value),
        "synchronize": lambda stream: None,
    }  # fmt: skip
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **more: empty(*shape, **more))
    with imported("undertow.fabric.stream_memory", monkeypatch) as module:
        for name, function in driver.items():
            monkeypatch.setattr(module, name, function)
        yield


def exchanged(on_device: bool) -> None:
    """Both ranks post to each other and to themselves: nothing, a few bytes, one piece, several."""
    sizes = (0, 17, PIECE, 2 * PIECE + 3)
    node, span = Node(on_device), max(sizes)
    memory = [np.zeros(3 * span, np.uint8) for _ in range(2)]
    for rank in range(2):
        memory[rank][:span] = np.arange(span, dtype=np.uint64) % (251 - rank)
        node.attach(5, rank, memory[rank])

    def post(rank: int) -> None:
        for number, size in enumerate(sizes):
            for to in (1 - rank, rank):
                node.drains[rank].move(Post(5, span - size, to, 5, span * (1 + rank), size, rank))
                assert until(lambda to=to, number=number: bool(node.words[to][rank] > number))
                landed = memory[to][span * (1 + rank) :][:size]
                assert np.array_equal(landed, memory[rank][span - size : span]), "a signal came before its bytes"

    threads = [threading.Thread(target=post, args=(rank,)) for rank in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(4 * PATIENCE)
    assert [list(one[:3]) for one in node.words] == [[len(sizes), len(sizes), 0]] * 2
    node.close()


def test_posts_arrive_whole_and_once() -> None:
    exchanged(on_device=False)


def test_posts_of_a_gpu_arrive_whole_and_once(device: None) -> None:
    """By addresses only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SymmetricBuffer, "local", property(lambda self: pytest.fail("a tensor would keep the memory")))
        exchanged(on_device=True)


@pytest.mark.parametrize("on_device", [False, True])
def test_memory_that_was_replaced_goes_before_the_next_transfer(on_device: bool, device: None) -> None:
    """Symmetric memory that goes waits for all kernels of its rank. One may be waiting for the next transfer: then the
    thread that brings it must not be the one that lets the memory go."""
    node, late = Node(on_device), []
    node.attach(7, 0, np.ones(64, np.uint8))

    def await_kernels() -> None:
        end = time.monotonic() + 1
        while node.words[1][3] == 1 and time.monotonic() < end:  # a kernel was launched that waits for the second
            time.sleep(0.001)
        late.append(node.words[1][3] == 1)

    old = np.zeros(64, np.uint8)
    weakref.finalize(old, await_kernels)
    buffer = node.attach(1, 1, old)
    node.drains[0].move(Post(7, 0, 1, 1, 0, 64, 3))
    assert until(lambda: bool(node.words[1][3] == 1))
    time.sleep(0.05)
    buffer.release()
    del buffer, old
    gone_at_once = bool(late)
    new = np.zeros(64, np.uint8)
    node.attach(2, 1, new)
    node.drains[0].move(Post(7, 0, 1, 2, 0, 64, 3))
    assert until(lambda: bool(node.words[1][3] == 2))
    assert new.all()
    assert gone_at_once, "the receiver still had the memory of the last transfer"
    node.close()


def test_nothing_to_move_for_long_is_no_failure() -> None:
    """Longer than the patience of the group's connections."""
    node, there = Node(patience=1.0), np.zeros(8, np.uint8)
    node.attach(7, 0, np.ones(8, np.uint8))
    node.attach(7, 1, there)
    time.sleep(1.5)
    node.drains[0].move(Post(7, 0, 1, 7, 0, 8, 0))
    assert until(lambda: bool(node.words[1][0]))
    assert there.all()
    node.close()
