"""The launches of `ops/embedding_cuda.py`, run by Triton's interpreter: several ranks in one process, one by one.

The driver is not there: streams do what is enqueued at once, and signals are words of ordinary memory.
`test_embedding_kernels.py` runs this file in a process of its own.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import interpreted_move  # noqa: F401 - mends Triton's interpreter for this NumPy
import pytest
import torch
import triton
import triton.language as tl

_real = ctypes.CDLL


class _NoDriver:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0


ctypes.CDLL = lambda name, *rest, **more: _NoDriver() if "libcuda" in str(name) else _real(name, *rest, **more)  # type: ignore[assignment,misc]
from undertow.kernels import embedding  # noqa: E402
from undertow.ops import cuda_product, embedding_all_to_all, embedding_cuda, embedding_peers  # noqa: E402
from undertow.ops.bags import Bags  # noqa: E402
from undertow.plan.bags import Layout, Piece, completed, slices  # noqa: E402
from undertow.plan.defaults import default_plan  # noqa: E402
from undertow.plan.problem import Problem  # noqa: E402

ctypes.CDLL = _real  # type: ignore[misc]
PLACES, POISON = 2, 99.0


@triton.jit
def _stored(pointer, value):
    tl.store(pointer, value)


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "signal_set", _stored)
    monkeypatch.setattr(embedding_cuda, "device_table", lambda fabric, key, make: torch.from_numpy(make()))
    monkeypatch.setattr(embedding_cuda.stream_memory, "current_stream", lambda device: 0)
    monkeypatch.setattr(embedding_cuda, "counters", lambda fabric, count: torch.zeros(count * 32, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Node:
    """All ranks' bags, places and words."""

    def __init__(self, batches: list[int], dims: list[list[int]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size, self.batches, samples = len(batches), batches, sum(batches)
        held, count = [], 0
        self.tables: list[list[torch.Tensor]] = []
        self.values, self.offsets = [], []
        for widths in dims:
            tables = [torch.randint(-3, 4, (6, one), generator=generator).float() for one in widths]
            lengths = torch.randint(0, 4, (len(tables) * samples,), generator=generator)
            self.values.append(torch.randint(0, 6, (int(lengths.sum()),), generator=generator))
            self.offsets.append(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
            held.append(tuple(Piece(count + k, 6, one) for k, one in enumerate(widths)))
            count += len(tables)
            self.tables.append(tables)
        self.layout = Layout(tuple(held))
        rows = max(batches) * self.layout.room
        self.distance = -(-rows * 4 // 128) * 128
        self.places = [torch.full((PLACES * self.distance // 4,), POISON) for _ in batches]
        self.words = [torch.zeros(2 * self.size * 16 * 32, dtype=torch.int32) for _ in batches]
        self.chosen = [(rank + seed) % PLACES for rank in range(self.size)]

    def bags(self, rank: int) -> Bags:
        held = self.layout.held[rank]
        return Bags(
            tuple(self.tables[rank]), held, self.values[rank], self.offsets[rank], None, "sum", sum(self.batches)
        )

    def result(self, rank: int) -> embedding_peers.Result:
        """As `Exchange.take` and `begin` leave it."""
        for other in range(self.size):
            for parcel in range(16):
                self.words[rank][32 * (other * 16 + parcel)] = self.chosen[other] + 1
        base = [one.data_ptr() for one in self.places]
        nothing: Any = None
        return embedding_peers.Result(
            nothing, base, self.distance, self.chosen[rank], self.layout, self.whole(rank)
        )  # fmt: skip

    def addresses(self, rank: int) -> Any:
        """As `Words` gives them."""
        return SimpleNamespace(
            signal=lambda to, parcel: (
                self.words[to].data_ptr() + 128 * (self.size * 16 + rank * 16 + parcel) if to != rank else 0
            ),
            choice=lambda to, parcel: self.words[rank].data_ptr() + 128 * (to * 16 + parcel),
        )

    def whole(self, rank: int) -> torch.Tensor:
        first = self.chosen[rank] * self.distance // 4
        rows = self.batches[rank]
        return self.places[rank][first : first + rows * self.layout.room].view(rows, self.layout.room)

    def fabric(self, rank: int) -> Any:
        return SimpleNamespace(
            group=SimpleNamespace(rank=rank, size=self.size),
            multiprocessors=1,
            kept={},
            device=torch.device("cpu"),
            gate=lambda: lambda: None,  # one rank runs after the other: nobody can be met
        )

    def check(self, parcels: int) -> None:
        want = embedding_all_to_all.reference(self.tables, self.values, self.offsets, self.batches)
        for rank in range(self.size):
            assert torch.equal(self.whole(rank), want[rank]), f"rank {rank}"
            others = [one for one in range(PLACES) if one != self.chosen[rank]]
            for place in others:
                first = place * self.distance // 4
                assert (self.places[rank][first : first + self.distance // 4] == POISON).all()
            for source in range(self.size):
                wanted = int(source != rank and bool(self.tables[source]) and self.batches[rank] > 0)
                for parcel in range(parcels):
                    assert int(self.words[rank][32 * (self.size * 16 + source * 16 + parcel)]) == wanted
                    chosen = int(self.words[source][32 * (rank * 16 + parcel)])
                    assert chosen == (0 if wanted else self.chosen[rank] + 1), "a choice is cleared with its slice"


@pytest.mark.parametrize("number", range(3))
def test_slices_of_peers(number: int) -> None:
    """Slices that the lookup kernel stores into the places of others, between waits of the stream."""
    nodes = [([3, 5, 2], [[8, 4], [], [12]]), ([4, 0], [[4], [4, 8, 4]]), ([2, 2, 2, 2], [[4], [8], [], [4, 4]])]
    node = Node(*nodes[number], seed=number)
    for rank in range(node.size):
        problem = Problem.of(
            "embedding_all_to_all", sum(node.batches), max(node.layout.sent), 2, dtype="float32", ranks=node.size,
            device="cuda", multiprocessors=1, shards=node.batches,
        )  # fmt: skip
        plan = completed(default_plan(problem, "fused", "peer"), node.layout.dims, 4, 2)
        result = node.result(rank)
        lookup = embedding_cuda.Lookup(node.fabric(rank), node.bags(rank), plan, node.layout.columns[rank])
        lookup.pool(result.slices(slices(node.batches, plan, rank), node.addresses(rank)))
        if lookup.fabric.kept:
            assert all(not one.any() for one in lookup.fabric.kept[id(embedding_cuda._TICKETS)].values())
    node.check(1)


@pytest.mark.parametrize("grain", ["serial", "chunked", "signaled"])
def test_pooled_first_and_spread(grain: str) -> None:
    node = Node([3, 5, 2], [[8, 4], [], [12]], seed=5)
    for rank in range(node.size):
        problem = Problem.of(
            "embedding_all_to_all", sum(node.batches), max(node.layout.sent), 2, dtype="float32", ranks=node.size,
            device="cuda", multiprocessors=1, shards=node.batches,
        )  # fmt: skip
        plan = completed(default_plan(problem, grain, "peer"), node.layout.dims, 4, 2)
        bags, result, fabric = node.bags(rank), node.result(rank), node.fabric(rank)
        buffer = torch.full((bags.samples, bags.width), POISON)
        owned: list[int] = []
        product = embedding_cuda.CudaPooling(
            fabric, bags, node.batches, plan, buffer, lambda owned=owned: owned.append(1)
        )
        product.start()
        for parcel in range(len(plan.parcels)):
            product.reach(parcel)
        assert len(owned) == 1
        lookup = embedding_cuda.Lookup(fabric, bags, plan, node.layout.columns[rank])
        leaving = slices(node.batches, plan, rank)
        if grain == "signaled" and bags.tables:
            assert all(int(product._words[32 * number]) == 1 for number in range(len(leaving)))
        lookup.spread(result.slices(leaving, node.addresses(rank), buffer), buffer)
    want = embedding_all_to_all.reference(node.tables, node.values, node.offsets, node.batches)
    for rank in range(node.size):
        assert torch.equal(node.whole(rank), want[rank])


def test_a_captured_call_uses_the_lists_of_the_calls_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be uploaded in a capture, and the words that a captured call signals by are its own."""
    node, capturing = Node([3, 5], [[8, 4], [12]], seed=3), [False]
    lists: dict[Any, torch.Tensor] = {}

    def device_table(fabric: Any, key: Any, make: Any) -> torch.Tensor:
        assert key in lists or not capturing[0], f"{key[0]} would be uploaded in a capture"
        return lists.setdefault(key, torch.from_numpy(make()))

    monkeypatch.setattr(embedding_cuda, "device_table", device_table)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    problem = Problem.of(
        "embedding_all_to_all", sum(node.batches), max(node.layout.sent), 2, dtype="float32", ranks=node.size,
        device="cuda", multiprocessors=1, shards=node.batches,
    )  # fmt: skip
    fabric, bags, held = node.fabric(0), node.bags(0), []
    for grain in ("serial", "chunked", "signaled"):
        plan = completed(default_plan(problem, grain, "dma"), node.layout.dims, 4, 2)
        for capturing[0] in (False, True):
            buffer = torch.full((bags.samples, bags.width), POISON)
            product = embedding_cuda.CudaPooling(fabric, bags, node.batches, plan, buffer, lambda: None)
            held.append(product)  # so that the next one's words stand elsewhere
            product.load()
            product.prepare()
            product.start()
            for parcel in range(len(plan.parcels)):
                product.reach(parcel)
            assert not (buffer == POISON).any()
            if grain == "signaled":
                assert all(int(product._words[32 * one]) == 1 for one in range(len(product._leaving)))
    assert len({one._words.data_ptr() for one in held}) == len(held)


def test_words_of_a_first_call_in_inference_mode_serve_calls_in_any() -> None:
    with torch.inference_mode():
        words = cuda_product.counters(Node([1], [[4]], seed=0).fabric(0), 2)
    words.zero_()
