"""Ranks that call `fused_decode` again and again, on GPUs whose warps run in random orders (`triton_warps.py`).

Each call's x is what the call before has summed, so that who begins too early multiplies something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from random_orders import plain, rewrite
from triton_language import language, launching
from triton_warps import THREADS, WARPS, Element, Gpus, Pointer, Stream, tensor

from undertow.kernels import ahead, fused_decode, gemm, packets, poison

MODULES = (fused_decode, packets, poison, ahead, gemm)
LINE = 4  # words: as many as a warp has threads
DEADLINE = 2
FOREVER = 1 << 40
POISON = 0xFFFF  # an element of 16 bits
Changes = Callable[[Any], None]


@dataclass(frozen=True)
class Rank:
    """`multiplying`: 0: a CTA for each piece. `transposed`: how its weights lie."""

    multiplying: int = 0
    summing: int = 1
    tile: tuple[int, int] = (1, 8)
    transposed: bool = True


@dataclass(frozen=True)
class Case:
    """`chained`: what a call sums is the next call's x; else each has its own. `apart`: each rank has a GPU of its own,
    else all have one; `room`: CTAs that a GPU has places for. Of the last rank, `missing`: the calls that it does not
    make; `lost`: it ends somewhere in a call; `silent`: in its last call the first CTA does not begin."""

    ranks: tuple[Rank, ...] = (Rank(summing=2), Rank())
    rows: int = 1
    n: int = 16
    split: int = 1
    at_once: int = 1
    chained: bool = True
    early: bool = True
    bias: bool = False
    calls: int = 5
    apart: bool = True
    room: int = 64
    missing: int = 0
    lost: bool = False
    silent: bool = False
    idle: bool = False  # launches of no CTA that does anything, between the calls

    @property
    def fails(self) -> bool:
        return bool(self.missing or self.lost or self.silent)


def finished(total: Any, ACTIVATION: int) -> Any:
    """In place of an activation: so that sums stay small, and all are told apart."""
    return (total + 8 * ACTIVATION) % 7 - 3


class Node:
    """All that a case needs in memory, what the kernel made of it, and what it should have."""

    def __init__(self, case: Case, gpus: Gpus) -> None:
        self.case, self.gpus = case, gpus
        ranks = len(case.ranks)
        draw = np.random.default_rng(gpus.draw.getrandbits(32))
        self.half = ranks * case.split * case.rows * case.n // 2
        shape = (case.rows, case.n)
        self.x = draw.integers(-2, 3, (case.calls, ranks, *shape)).astype(np.float16)
        self.w = draw.integers(-2, 3, (ranks, case.n, case.n)).astype(np.float16)
        self.bias = draw.integers(-2, 3, case.n).astype(np.float16)
        self.out = np.full((ranks, case.calls, *shape), 0x7777, np.uint16)
        self.packets = np.zeros((ranks, 2 * self.half), np.int64)
        self.epochs = np.zeros((ranks, LINE), np.int32)
        self.taken = np.zeros((ranks, 2 * LINE), np.int32)
        self.error = np.zeros((ranks, 2), np.int32)  # the abort word, the error word

    def counts(self, rank: Rank) -> tuple[int, int]:
        """CTAs that multiply, and that sum."""
        return rank.multiplying or -(-self.case.n // rank.tile[1]) * self.case.split, rank.summing

    def add(self, number: int, room: list[int]) -> None:
        """The launches of a rank."""
        case, gpus, rank = self.case, self.gpus, self.case.ranks[number]
        stream = Stream(gpus, room, case.early)
        gpus.streams.append(stream)
        half, whole, wide = (Element(one) for one in (np.float16, np.int32, np.int64))
        weights = np.ascontiguousarray(self.w[number].T if rank.transposed else self.w[number])
        outs = [Pointer(gpus.hold(one), half) for one in self.out[number]]
        xs = [Pointer(gpus.hold(one[number]), half) for one in self.x]
        if case.chained:
            xs[1:] = outs[:-1]
        w, bias = Pointer(gpus.hold(weights), half), Pointer(gpus.hold(self.bias), half)
        bases, packets = Pointer(gpus.hold(self.bases), wide), Pointer(self.bases[number], wide)
        epochs, taken = (Pointer(gpus.hold(one[number]), whole) for one in (self.epochs, self.taken))
        abort = Pointer(gpus.hold(self.error[number]), whole)
        deadline = DEADLINE if case.fails or gpus.hurry else FOREVER

        def launch(call: int, counts: tuple[int, int]) -> None:
            sizes = [tensor(one, np.int32) for one in (case.rows, case.n, case.n, *counts)]
            strides = [tensor(one, np.int64) for one in (case.n, case.n, self.half)]

            def work() -> None:
                fused_decode.fused_decode_kernel(
                    xs[call], w, outs[call], bias, bases, packets, epochs, taken, *sizes, *strides,
                    tensor(number, np.int32), abort, abort + 1, tensor(deadline, np.int64),
                    ROWS=rank.tile[0], BLOCK_N=rank.tile[1], BLOCK_K=8, TRANSPOSED=rank.transposed, SPLIT=case.split,
                    TURNS=rank.multiplying > 0, RANKS=len(case.ranks), LANES=WARPS * THREADS, AT_ONCE=case.at_once,
                    EARLY=case.early, BIAS=case.bias, ACTIVATION=1,
                )  # fmt: skip

            stream.add(max(1, sum(counts)), work)

        for call in range(case.calls - (case.missing if rank is case.ranks[-1] else 0)):
            if case.idle:
                launch(call, (0, 0))
            launch(call, self.counts(rank))

    def run(self) -> None:
        case, gpus = self.case, self.gpus
        self.bases = np.array([gpus.hold(one) for one in self.packets], np.int64)
        shared = [case.room]
        for number in range(len(case.ranks)):
            self.add(number, [case.room] if case.apart else shared)
        if case.silent:
            gpus.streams[-1].silent = case.calls - 1, 0
        if case.lost:
            each = case.rows * case.n // 2 * case.split * len(case.ranks)  # and a few more, of counts and sums
            gpus.streams[-1].stores = gpus.draw.randrange(case.calls * (each + 10))
        gpus.run()

    def want(self) -> list[Any]:
        """What each call should have summed."""
        found: list[Any] = []
        for own in self.x.astype(np.float64):
            x = own if not (self.case.chained and found) else np.stack([found[-1]] * len(own))
            total = sum(one @ w for one, w in zip(x, self.w.astype(np.float64), strict=True))
            found.append(finished(total + (self.bias if self.case.bias else 0), 1))
        return [one.astype(np.float16).view(np.uint16) for one in found]


def run(case: Case, seed: int, changes: Changes = lambda modules: None, hurry: int = 0, patient: bool = True) -> Node:
    """All calls of a case, in an order; everybody comes to an end. `hurry`: as often, time passes while others could go
    on; `patient`: who waits for others to leave before it poisons what they store has more time than they need."""
    gpus = Gpus(seed, hurry, 200 if case.fails or hurry else 0)
    node = Node(case, gpus)
    with plain(*MODULES):
        said, spoken = launching(gpus, patient), language(gpus)
        for module in MODULES:
            module.tl = spoken  # type: ignore[attr-defined]
        ahead.gdc_wait, ahead.gdc_launch_dependents = said.gdc_wait, said.gdc_launch_dependents
        poison.globaltimer = said.globaltimer
        fused_decode.LINE, fused_decode._POISONED_AT_ONCE, fused_decode.activated = LINE, 16, finished
        # What is told to the compiler of blocks of columns, for smaller ones.
        rewrite(MODULES, "plain_multiply", lambda text: text.replace("column // 16 * 16", "column // 8 * 8"))
        changes(MODULES)
        node.run()
    return node


def check(node: Node, calls: int | None = None) -> None:
    """Right sums of these calls, or of all; and then what the next call finds."""
    case = node.case
    for call, want in enumerate(node.want()[:calls]):
        for rank in range(len(case.ranks)):
            assert np.array_equal(node.out[rank, call], want), f"call {call} of rank {rank}: a wrong sum"
    if calls is not None:
        return
    for number, rank in enumerate(case.ranks):
        assert (node.epochs[number] == case.calls).all()
        taken = node.taken[number].reshape(2, LINE)
        assert taken[(case.calls + 1) % 2, :2].tolist() == [0, 0]  # for the next call
        assert taken[case.calls % 2, :2].tolist() == [sum(node.counts(rank)), rank.summing]
        assert not node.error[number].any()


def check_failed(node: Node) -> None:
    """Of what a rank has of a call, all is right or all is poisoned, which its error word tells."""
    case, lost = node.case, node.case.fails
    want = node.want()
    for number in range(len(case.ranks) - lost):
        poisoned = [bool((got == POISON).all()) for got in node.out[number]]
        for call, got in enumerate(node.out[number]):
            assert poisoned[call] or np.array_equal(got, want[call]), f"call {call} of rank {number} is mixed"
        assert node.error[number].tolist() == ([1, 2] if any(poisoned) else [0, 0])
        for call in range(case.calls - max(case.missing, case.silent), case.calls):
            assert poisoned[call], f"call {call} of rank {number} cannot be right"
