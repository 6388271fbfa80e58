"""Fused matmuls that post, as a GPU has them launched, one process a rank, by Triton's interpreter; a thread is the
proxy.

It takes what a rank's kernels post to the ring, late and in any order, and moves it to the memory of other ranks, which
all processes share. Tables, launches and kernels are real; signals, streams and the driver are not.
`test_posted_kernels.py` runs this file in a process of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import interpreted_node  # noqa: F401 - there is no driver behind its import
import interpreted_tokens as parts
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreted_node import made, poisoned, wide

from undertow.fabric.base import WORD_STRIDE
from undertow.fabric.cuda import CudaFabric
from undertow.kernels import embedding, posted, proxy, ring_layout
from undertow.ops import posted_cuda
from undertow.ops.all_gather_matmul import reference as gathered
from undertow.ops.all_to_all_matmul import grouped_reference as arrived
from undertow.ops.beside import Arriving
from undertow.ops.finish import Finish
from undertow.ops.matmul_all_to_all import grouped_reference as left
from undertow.ops.matmul_reduce_scatter import reference as scattered
from undertow.plan.defaults import default_plan, tokens_plan
from undertow.plan.plan import Plan, alike
from undertow.plan.posts import PARCELS, SIGNALS
from undertow.plan.problem import Problem
from undertow.plan.tokens import Tokens

CALLS, CAPACITY, CTAS, PATIENCE = 3, 2, 3, 60.0
STRIDE = WORD_STRIDE // 4
HALF = torch.float16
MOST = 1 << 18  # elements of a half


@triton.jit
def _reached(pointer, target):
    return tl.where(tl.load(pointer) - target >= 0, 0, 1)


def _waited(pointer: Any, target: Any, abort: Any, deadline_ns: Any) -> Any:
    """Until the word is there, or the abort word is set."""
    word, stop = (ctypes.c_int32.from_address(int(one.handle.data[0])) for one in (pointer, abort))
    want = int(target.handle.data[0])
    while word.value - want < 0 and not stop.value:
        time.sleep(0.001)
    return _reached(pointer, target)


@triton.jit
def _released(pointer, value):
    tl.store(pointer, value)


for _module, _name, _other in (
    (proxy, "signal_wait", _waited), (posted, "signal_wait", _waited), (proxy, "release_word", _released),
    (embedding, "report_error", _released), (posted, "has_bulk_copies", parts.bulk_copies),
    (posted, "proxy_fence", parts.no_fence),
):  # fmt: skip
    setattr(_module, _name, _other)
for _name, _found in (
    ("device_table", lambda fabric, key, make: fabric.tables.setdefault(key, torch.from_numpy(np.array(make())))),
    ("has_table", lambda fabric, key: key in fabric.tables),
):
    setattr(posted_cuda, _name, _found)
torch.set_num_threads(1)  # processes are forked: threads of a parallel loop would not be there
torch.cuda.is_current_stream_capturing = lambda: False  # type: ignore[assignment]


class Node:
    """Ranks whose memory and signals are those of all processes."""

    def __init__(self, ranks: int, bulk: bool) -> None:
        self.size, self.bulk = ranks, bulk
        self.memory = [torch.full((2 * MOST,), float("nan"), dtype=HALF).share_memory_() for _ in range(ranks)]
        self.arrived = [torch.zeros(ranks * SIGNALS * STRIDE, dtype=torch.int32).share_memory_() for _ in range(ranks)]
        self.abort = torch.zeros(ranks, dtype=torch.int32).share_memory_()
        self.meeting = multiprocessing.Barrier(ranks)

    def rank(self, rank: int) -> Rank:
        return Rank(self, rank)


class Rank:
    """What is one process's own."""

    def __init__(self, node: Node, rank: int) -> None:
        parts.BULK[0] = node.bulk
        self.node, self.number, self.moved, self.met = node, rank, 0, 0
        self.ring = np.zeros(ring_layout.ring_bytes(CAPACITY) // 8, np.int64)
        self.state = torch.zeros(posted.STATE_WORDS + node.size * SIGNALS, dtype=torch.int32)
        self.tickets = torch.zeros(node.size * PARCELS + 1, dtype=torch.int32)
        self.posting: Any = SimpleNamespace(
            proxy=SimpleNamespace(
                address=self.ring.ctypes.data, head=torch.zeros(1, dtype=torch.int32), capacity=CAPACITY, signals=None
            ),
            state=self.state, idle=torch.zeros_like(self.state), tickets=self.tickets, follow=lambda fabric: None,
            memory=self._memory, finish=self._finish,
        )  # fmt: skip
        self.fabric: Any = object.__new__(CudaFabric)
        self.fabric.group = SimpleNamespace(
            rank=rank, size=node.size, deadline=PATIENCE, failed=False, exchange=lambda said, what: [said]
        )
        self.fabric.device, self.fabric.multiprocessors = torch.device("cpu"), CTAS
        self.fabric.bulk_copies, self.fabric.tables, self.fabric.kept = node.bulk, {}, {}
        self.fabric.guard = SimpleNamespace(abort=node.abort[rank : rank + 1], error=torch.zeros(1, dtype=torch.int32))
        self.fabric.settle = self.fabric.rest = lambda: None
        self.fabric.shares_device = True
        self.fabric.poison_if_aborted = lambda *outputs: None
        self.fabric.signal_word = lambda signals, index: node.arrived[rank][index * STRIDE :]

    def _memory(self, fabric: Any, nbytes: int) -> tuple[Any, int]:
        here = self.node.memory[self.number]
        assert nbytes <= 2 * MOST
        return SimpleNamespace(local=here, nbytes=4 * MOST, address=lambda rank: here.data_ptr()), 7

    def _finish(self, fabric: Any, meets: bool) -> None:
        if not meets:
            self.met += 1
            self.node.meeting.wait(PATIENCE)

    def drain(self, stop: threading.Event, seed: int) -> None:
        """The proxy: posts in the order of tickets, moved late and in any order."""
        chance, pending = random.Random(seed * 31 + self.number), []
        tail = ctypes.c_int32.from_address(self.ring.ctypes.data + ring_layout.TAIL_OFFSET)
        ends = False
        while pending or not ends:
            ends = stop.is_set()  # before the look: what was posted until then is moved
            first = ring_layout.descriptor_offset(self.moved, CAPACITY) // 8
            if self.ring[first] == ring_layout.ready_value(self.moved):
                pending.append([int(one) for one in self.ring[first : first + ring_layout.DESCRIPTOR_WORDS]])
                self.moved += 1
                tail.value = self.moved
                ends = False
            elif pending and chance.random() < 0.3:
                self._move(pending.pop(chance.randrange(len(pending))))
            time.sleep(0.0002)

    def _move(self, words: list[int]) -> None:
        _, here, source, to, there, place, size, signal = words
        assert (here, there) == (7, 7)
        assert to != self.number
        assert 0 <= source < source + size <= 4 * MOST
        assert source // (2 * MOST) == (source + size - 1) // (2 * MOST) == place // (2 * MOST), "of one half"
        ctypes.memmove(self.node.memory[to].data_ptr() + place, self.node.memory[self.number].data_ptr() + source, size)
        self.node.arrived[to][STRIDE * signal] += 1


Work = Callable[[Any, int, int], None]  # a rank's fabric, its number, which call


def _process(node: Node, number: int, work: Work, seed: int) -> None:
    rank, stop = node.rank(number), threading.Event()
    posted_cuda.Posting = SimpleNamespace(of=lambda fabric, lane: rank.posting)  # type: ignore[misc,assignment]
    drain = threading.Thread(target=rank.drain, args=(stop, seed))
    drain.start()
    chosen = random.Random(seed * 100 + number)
    try:
        for call in range(CALLS):
            time.sleep(chosen.random() * 0.02)  # ranks come at different times
            work(rank.fabric, number, call)
            assert rank.state[:2].tolist() == [call + 1, 0]
            assert not rank.tickets.any(), "tickets are zero again"
    finally:
        stop.set()
        drain.join()


def on_all(node: Node, work: Work, seed: int) -> list[int | None]:
    """How the processes of all ranks ended; any that has not after a while is ended."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=_process, args=(node, rank, work, seed)) for rank in range(node.size)]
    for one in started:
        one.start()
    for one in started:
        one.join(PATIENCE)
        if one.is_alive():
            one.kill()
    return [one.exitcode for one in started]


def problem_of(operator: str, m: int, n: int, k: int, ranks: int, bulk: bool, **more: Any) -> Problem:
    return Problem.of(
        operator, m, n, k, dtype="float16", ranks=ranks, device="cuda", multiprocessors=CTAS, bulk=bulk, **more
    )


def in_parcels(plan: Plan, bulk: bool) -> Plan:
    """As few as can be in half of the cases, as many in the others."""
    return replace(plan, parcels=alike(1 if bulk else PARCELS))


SUMS = [(2, 70, 136, 24), (3, 200, 264, 40), (3, 33, 16, 8)]


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.nightly), 2])
def test_sums(number: int, operator: str, bulk: bool) -> None:
    """Shards of one band and of several, and an all_reduce of which a rank owns no band."""
    ranks, m, n, k = SUMS[number]
    bias, node = made(n, seed=3), Node(ranks, bulk)
    plan_of = problem_of(operator, m, n, k, ranks, bulk)
    plan = in_parcels(default_plan(plan_of, "fused", "net"), bulk)
    plan.check(plan_of)

    def work(fabric: Any, rank: int, call: int) -> None:
        xs = [made(m, k, seed=10 * call + one) for one in range(ranks)]
        ws = [made(n, k, seed=90 + one).t() for one in range(ranks)]
        want = [torch.relu(one + bias.float()).to(HALF) for one in scattered(wide(xs), wide(ws))]
        right = want[rank] if operator == "matmul_reduce_scatter" else torch.cat(want)
        y = poisoned(*right.shape)
        posted_cuda.sums(xs[rank], ws[rank], y, plan_of, plan, Finish(bias, "relu"), fabric)()
        assert torch.equal(y, right), f"call {call} of rank {rank}"

    assert on_all(node, work, number) == [0] * ranks


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize(("rows", "n", "k"), [((70, 70), 136, 24), ((150, 1, 65), 33, 72)])
def test_rows(rows: tuple[int, ...], n: int, k: int, bulk: bool) -> None:
    """A rank without columns, and the gradients of a weight and of a bias from what landed."""
    ranks, m = len(rows), sum(rows)
    wides = [n - 8 * (rank == 1) if n > 100 else (n, 0, n)[rank] for rank in range(ranks)]
    node = Node(ranks, bulk)

    def work(fabric: Any, rank: int, call: int) -> None:
        xs = [made(count, k, seed=10 * call + one) for one, count in enumerate(rows)]
        w = made(wides[rank], k, seed=90 + rank).t()
        plan_of = problem_of("all_gather_matmul", m, wides[rank], k, ranks, bulk, shards=rows)
        plan = in_parcels(default_plan(plan_of, "fused", "dma"), bulk)
        plan.check(plan_of)
        y, dz = poisoned(m, wides[rank]), made(m, 8, seed=50)
        arriving = Arriving(dz, torch.zeros(8, k)) if call else None
        posted_cuda.rows(xs[rank], w, y, plan_of, plan, Finish(None, "none"), fabric, arriving)()
        assert torch.equal(y, gathered(wide(xs), [w.float()] * ranks)[rank].to(HALF)), f"call {call} of rank {rank}"
        if arriving is not None:
            whole = torch.cat(xs).float()
            assert torch.equal(arriving.weight, (dz.float().t() @ whole).to(HALF))

    assert on_all(node, work, n) == [0] * ranks


SIZES = [
    [[[3, 0], [70, 1]], [[130, 20], [2, 5]]],
    [[[3, 0], [70, 1], [0, 2]], [[0, 0], [2, 5], [9, 0]], [[1, 1], [0, 66], [0, 0]]],
]


def token_plan(tokens: Tokens, n: int, k: int, bulk: bool, mirrored: bool) -> tuple[Problem, Plan]:
    matrix = tokens.back.matrix if mirrored else tokens.matrix
    wide_, inner = (k, n) if mirrored else (n, k)
    found = Problem.for_splits(
        matrix, wide_, inner, dtype="float16", device="cuda", multiprocessors=CTAS, bulk=bulk, experts=2,
        mirrored=mirrored,
    )  # fmt: skip
    plan = in_parcels(tokens_plan(found, "net", 1), bulk)
    plan.check(found)
    return found, plan


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize(("n", "k"), [(136, 24), pytest.param(33, 13, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("number", range(len(SIZES)))
def test_tokens_leave(number: int, n: int, k: int, bulk: bool) -> None:
    tokens, bias = Tokens.of(SIZES[number]), made(2, n, seed=3)
    ranks, node = tokens.ranks, Node(tokens.ranks, bulk)
    _, plan = token_plan(tokens, n, k, bulk, False)

    def work(fabric: Any, rank: int, call: int) -> None:
        xs = [made(sum(row), k, seed=10 * call + one) for one, row in enumerate(tokens.matrix)]
        ws = [made(2, k, n, seed=90 + one) for one in range(ranks)]
        want = left(
            [torch.cat([x, x.new_ones(len(x), 1)], 1) for x in wide(xs)],
            [torch.cat([w, bias.float()[:, None]], 1) for w in wide(ws)], SIZES[number],
        )[rank]  # fmt: skip
        y = poisoned(*want.shape)
        posted_cuda.exchange(xs[rank], ws[rank], y, tokens, plan, Finish(bias, "relu"), fabric)()
        assert torch.equal(y, torch.relu(want).to(HALF)), f"call {call} of rank {rank}"

    assert on_all(node, work, n + number) == [0] * ranks


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize("n", [pytest.param(136, marks=pytest.mark.nightly), 33])
@pytest.mark.parametrize("number", range(len(SIZES)))
def test_tokens_arrive(number: int, n: int, bulk: bool) -> None:
    tokens, k = Tokens.of(SIZES[number]), 24
    ranks, node = tokens.ranks, Node(tokens.ranks, bulk)
    _, plan = token_plan(tokens, n, k, bulk, True)

    def work(fabric: Any, rank: int, call: int) -> None:
        xs = [made(sum(row), k, seed=10 * call + one) for one, row in enumerate(tokens.matrix)]
        ws = [made(2, n, k, seed=90 + one).mT for one in range(ranks)]
        want = arrived(wide(xs), wide(ws), SIZES[number])[rank]
        came = arrived(wide(xs), [torch.eye(k).expand(2, k, k)] * ranks, SIZES[number])[rank]
        y, kept = poisoned(*want.shape), poisoned(*came.shape)
        nothing = Finish(None, "none")
        posted_cuda.arrive(xs[rank], ws[rank], kept, y, tokens, plan, nothing, fabric, None, call > 0)()
        assert torch.equal(y, want.to(HALF)), f"call {call} of rank {rank}"
        assert torch.equal(kept, came.to(HALF)) == (call > 0)

    assert on_all(node, work, n + number) == [0] * ranks


def test_a_rank_that_does_not_come() -> None:
    """The other gives up with the abort word, counts nothing, and waits for nothing in a later call."""
    node, plan_of = Node(2, False), problem_of("matmul_reduce_scatter", 70, 136, 24, 2, False)
    plan, rank, stop = default_plan(plan_of, "fused", "net"), node.rank(0), threading.Event()
    posted_cuda.Posting = SimpleNamespace(of=lambda fabric, lane: rank.posting)  # type: ignore[misc,assignment]
    drain = threading.Thread(target=rank.drain, args=(stop, 1))
    drain.start()
    giving_up = threading.Timer(0.3, lambda: node.abort.fill_(1))
    giving_up.start()
    for _ in range(2):
        y = poisoned(35, 136)
        posted_cuda.sums(made(70, 24, seed=1), made(136, 24, seed=2).t(), y, plan_of, plan, Finish(None, "none"),
                         rank.fabric)()  # fmt: skip
        assert rank.state[:2].tolist() == [0, 1]
        assert int(rank.fabric.guard.error) == 1
        assert y.isnan().all()
        node.abort.fill_(0)
        node.arrived[0].fill_(1)
    giving_up.join()
    stop.set()
    drain.join()
