"""The lane of GPUs with peer access without a GPU: its operations on a driver that runs streams in random orders.

As for the staged lane (`test_staged_lane.py`): a flag that is missing shows as wrong bytes, one too many as a deadlock.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_node import FakeSignals

from undertow.collective.carry import Carrier
from undertow.fabric.base import WORD_STRIDE
from undertow.fabric.signals import Handoffs

SLOTS = 4  # of two kinds of messages, in turns


class Peers:
    """Lanes of all ranks, and what their streams copy: nothing happens before `world` runs it."""

    def __init__(self, ranks: int, modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        lanes, self.module, self.world = modules
        self.rank, self.ranks = 0, ranks  # whose host enqueues
        self.current = [self.world.new_stream() for _ in range(ranks)]
        self._events = iter(range(5000, 1 << 20))
        self._memory: dict[int, list[torch.Tensor]] = {}
        made = self.module.new_stream
        monkeypatch.setattr(
            self.module, "new_stream", lambda device, priority=0: self._stream(made(device).cuda_stream)
        )
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._stream(self.current[self.rank]))
        monkeypatch.setattr(torch.cuda, "stream", self._inside)
        count = Handoffs.words(ranks, SLOTS)
        self._words = (ctypes.c_byte * (ranks * count * WORD_STRIDE))()
        self.lanes = []
        for rank in range(ranks):
            signals: Any = FakeSignals(self._words, self.module, rank, count)
            signals.perform = lambda steps, signals=signals: self.module.batch(
                self.current[self.rank], signals.packed(steps)
            )
            pairs = Handoffs(signals, rank, ranks, SLOTS)
            pairs.reset()
            lane = lanes.CopyLane(types.SimpleNamespace(device=rank, handoffs=lambda pairs=pairs: pairs))
            lane.unload = lambda copies: [
                self.later(lambda out=out, view=view: out.copy_(view)) for out, view in copies
            ]
            self.lanes.append(lane)

    def later(self, act: Callable[[], object]) -> None:
        """On the current stream of the rank."""
        self.world.put(self.current[self.rank], act)

    def _stream(self, number: int) -> Any:
        def wait_stream(other: Any) -> None:
            self.module.after(number, other.cuda_stream, next(self._events))

        return types.SimpleNamespace(cuda_stream=number, wait_stream=wait_stream)

    @contextlib.contextmanager
    def _inside(self, stream: Any) -> Iterator[None]:
        before, self.current[self.rank] = self.current[self.rank], stream.cuda_stream
        yield
        self.current[self.rank] = before

    def workspace(self, purpose: str, nbytes: int) -> Any:
        """Memory of every rank that all of them see."""
        every = self._memory.setdefault(nbytes, [torch.full((nbytes // 4,), -1, dtype=torch.int32) for _ in self.lanes])

        def place(peer: int, begin: int, end: int) -> Any:
            copy = lambda source, non_blocking: self.later(lambda: every[peer][begin:end].copy_(source))  # noqa: E731
            return types.SimpleNamespace(copy_=copy)

        def there(peer: int) -> Any:
            flat = type("Flat", (), {"__getitem__": lambda _, part: place(peer, part.start, part.stop)})()
            return types.SimpleNamespace(view=lambda *shape: flat)

        space = types.SimpleNamespace(
            nbytes=nbytes, dtype=torch.int32, count=nbytes // 4, itemsize=4, local=every[self.rank], peer=there,
            address=lambda peer: every[peer].data_ptr(),
        )  # fmt: skip
        space.as_type = lambda dtype: space
        return space


@pytest.mark.parametrize("left_out", ["", "claim", "accept"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_parcels_are_reduced_and_shared(
    ranks: int, left_out: str, modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As matmul_all_reduce does, each step on a stream of its own; not if an end waits for nothing."""
    peers = Peers(ranks, modules, monkeypatch)
    elements, parcels = 7, 6
    buffers = [torch.arange(parcels * ranks * elements).view(parcels, -1).int() + 1000 * rank for rank in range(ranks)]
    want = torch.stack(buffers).sum(0).int()
    if left_out:
        monkeypatch.setattr(Handoffs, left_out, lambda self, peer, slot: None)
    for rank, lane in enumerate(peers.lanes):
        peers.rank = rank
        fabric: Any = types.SimpleNamespace(
            group=types.SimpleNamespace(size=ranks, rank=rank), workspace=peers.workspace, rank=rank
        )
        carrier = Carrier(fabric, lane, buffers[rank], elements)
        streams = [peers.world.new_stream() for _ in range(3)]
        for parcel in range(parcels):
            parts = list(buffers[rank][parcel].view(ranks, elements))
            peers.current[rank] = streams[0]
            carrier.give(parcel, parts)
            peers.module.after(streams[1], streams[0], 999)
            peers.current[rank] = streams[1]
            mine = parts[rank]

            def combine(found: list[torch.Tensor], mine: torch.Tensor = mine) -> None:
                peers.later(lambda: mine.copy_(torch.stack(found).sum(0)))

            carrier.reduce(parcel, mine, combine)
            carrier.share(parcel, mine)
            peers.current[rank] = streams[2]
            carrier.receive(parcel, parts, shared=True)
        peers.current[rank] = streams[0]
        lane.flush()

    def run() -> None:
        peers.world.run(seed=ranks)
        assert all(torch.equal(one, want) for one in buffers), "wrong bytes"

    if not left_out:
        run()
        return
    with pytest.raises(AssertionError, match=r"wrong bytes|deadlock"):
        run()
