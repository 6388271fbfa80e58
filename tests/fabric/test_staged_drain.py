"""The proxy's `dma` path under a driver that copies at once: chunks, their order, arrivals, room."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from no_driver import imported

from undertow.fabric.proxy import Post


@pytest.fixture(name="staged")
def staged_drain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    driver = {
        "to_host": lambda stream, host, device, size: ctypes.memmove(host, device, size),
        "to_device": lambda stream, device, host, size: ctypes.memmove(device, host, size),
        "write": lambda stream, address, value: setattr(ctypes.c_int32.from_address(address), "value", value),
    }
    with imported("undertow.fabric.staged_drain", monkeypatch) as module:
        for name, function in driver.items():
            monkeypatch.setattr(module.stream_memory, name, function)
        yield module


class Node:
    """Ranks in one process: a buffer and arrival words of each, one ring for all."""

    def __init__(self, staged: Any, monkeypatch: pytest.MonkeyPatch, size: int, nbytes: int) -> None:
        self.memory = [np.zeros(nbytes, np.uint8) for _ in range(size)]
        self.words = [np.zeros(8, np.int32) for _ in range(size)]
        rings: list[np.ndarray[Any, Any]] = []

        def pinned(group: Any, total: int, purpose: str) -> Any:
            if not rings:
                rings.append(np.zeros(total, np.uint8))
            assert rings[0].size == total
            return SimpleNamespace(address=rings[0].ctypes.data, close=lambda: None)

        monkeypatch.setattr(staged, "PinnedSegment", pinned)
        self.drains = [staged.StagedDrain(self._proxy(rank, size)) for rank in range(size)]

    def _proxy(self, rank: int, size: int) -> Any:
        here = self.memory[rank].ctypes.data
        words = self.words[rank].ctypes.data
        signals = SimpleNamespace(count=8, address=lambda at, index: words + 4 * index)
        return SimpleNamespace(
            group=SimpleNamespace(rank=rank, size=size, device="a device"), signals=signals,
            buffers={5: SimpleNamespace(address=lambda at: here)}, source=lambda post: here + post.source_offset,
            copies=lambda: SimpleNamespace(out=0, into=0),
        )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_posts_arrive_whole_in_order_and_once(ranks: int, staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no bytes, of less than a chunk, of exactly one, of many more than there are places for."""
    chunk = staged.chunk_bytes(ranks)
    sizes = (0, 17, chunk, 5 * chunk + 3, 1)
    span = max(sizes)
    node = Node(staged, monkeypatch, ranks, (1 + ranks) * span)
    chance = random.Random(ranks)
    sent = []
    for rank, to in ((one, (one + step) % ranks) for one in range(ranks) for step in range(1, ranks)):
        size = sizes[len(sent) % len(sizes)]
        post = Post(5, 0, to, 5, span * (1 + rank), size, rank)
        node.drains[rank].start(post)
        sent.append((rank, to, size))
    for rank, memory in enumerate(node.memory):
        memory[:span] = rank + 1
    arrived: dict[tuple[int, int], int] = {}
    for _ in range(200 * ranks):
        number = chance.randrange(ranks)
        node.drains[number].progress()
        for rank, to, size in sent:
            if node.words[to][rank] and (rank, to) not in arrived:
                landed = node.memory[to][span * (1 + rank) :][:size]
                assert (landed == rank + 1).all(), "a signal came before its bytes"
                arrived[rank, to] = size
    assert arrived == {(rank, to): size for rank, to, size in sent}
    assert all(int(words.sum()) == ranks - 1 for words in node.words)
    assert not any(drain.progress() for drain in node.drains)
