"""The fused kernels of rows that change ranks, as GPUs without TMA run them, by Triton's interpreter on the CPU.

Ranks run one after the other, so nothing may wait: all send first, then all take what arrived. Signals are replaced by
plain stores, which the tests look at. `test_fused_tokens.py` runs this file in a process of its own.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from undertow.kernels import bring, fused_brought, fused_exchange, fused_gather, fused_scatter, gemm, last_wave
from undertow.ops.all_to_all_matmul import grouped_reference as arriving_reference
from undertow.ops.matmul_all_to_all import grouped_reference as leaving_reference
from undertow.plan import fused, fused_order, reorder, tokens
from undertow.plan.plan import Plan
from undertow.plan.tokens import Tokens

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes `int()` of an array of shape [1], which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_with_index


BULK = [False]  # what `has_bulk_copies` says


def bulk_copies() -> bool:
    return BULK[0]


@triton.jit
def told(bases, first, count, offset, epoch, failed):
    for one in range(count):
        tl.store(tl.load(bases + first + one).to(tl.pointer_type(tl.int32)) + offset, epoch)


@triton.jit
def set_word(word, epoch):
    tl.store(word, epoch)


@triton.jit
def no_turn(word_bases, words, epoch, program, rank, abort, error, deadline_ns, RANKS: tl.constexpr):
    pass


@triton.jit
def no_wait(pointer, target, count, skipped, abort, error, deadline_ns):
    return 0


@triton.jit
def no_fence():
    pass


for _module in (bring, fused_brought, fused_exchange, fused_gather, fused_scatter, last_wave):
    for _name, _other in (
        ("has_bulk_copies", bulk_copies), ("tell", told), ("take_turn", no_turn), ("signal_wait_all", no_wait),
        ("set_after_bulk_stores", set_word), ("proxy_fence", no_fence),
    ):  # fmt: skip
        if hasattr(_module, _name):
            setattr(_module, _name, _other)

LINE, TILE, EPOCH = fused.LINE, (16, 32), 7
NOBODY = torch.zeros(1, dtype=torch.int32)
PLAN = Plan("fused", "peer", ((0, 1),), tile=TILE, group_bands=2, own_last=True, piece=32)


def case(ranks: int, experts: int, n: int, k: int, seed: int, transposed: bool) -> tuple[Any, ...]:
    chance, made = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [[[chance.choice((0, 1, 16, 19)) for _ in range(experts)] for _ in range(ranks)] for _ in range(ranks)]
    xs = [torch.randint(-1, 2, (sum(map(sum, row)), k), generator=made).float() for row in sizes]
    ws = [torch.randint(-1, 2, (experts, k, n), generator=made).float() for _ in range(ranks)]
    if transposed:
        ws = [w.mT.contiguous().mT for w in ws]
    return Tokens.of(sizes), xs, ws


def table(found: Any) -> torch.Tensor:
    return torch.from_numpy(found.copy())


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([one.data_ptr() for one in tensors])


CASES = [(2, 2, 40, 8, False), (2, 2, 5, 24, True)]


@pytest.mark.parametrize(("ranks", "experts", "n", "k", "transposed"), CASES)
def test_tiles_go_to_their_final_rows(ranks: int, experts: int, n: int, k: int, transposed: bool) -> None:
    rows, xs, ws = case(ranks, experts, n, k, 10 * n + ranks, transposed)
    want = leaving_reference(xs, ws, rows.sizes)
    wide = -(-n // 8) * 8
    half = max(8, rows.most * n)
    half += -half % 8
    lines = -(-rows.most_lines(TILE[0]) * -(-n // TILE[1]) // LINE)
    stages = [torch.full((2 * half,), float("nan")) for _ in range(ranks)]
    words = [torch.zeros((1 + 2 * lines + 4) * LINE, dtype=torch.int32) for _ in range(ranks)]
    outs = [torch.full((sum(row[rank] for row in rows.matrix), n), float("nan")) for rank in range(ranks)]
    bias = torch.arange(experts * n, dtype=torch.float32).view(experts, n) % 3
    padded = []
    for w in ws:
        held = w if transposed else torch.zeros(experts, k, wide)
        if not transposed:
            held[:, :, :n] = w
        padded.append(held)

    def run(rank: int, sending: bool | None) -> None:
        leaving = table(tokens.leaving_table(rows, n, PLAN, rank))
        coming = table(tokens.collected_table(rows, n, PLAN, rank))
        b = padded[rank].mT if transposed else padded[rank]
        kernel: Any = fused_exchange.fused_exchange_kernel
        kernel[(3,)](
            xs[rank], b, stages[rank], outs[rank], bias, leaving, coming, addresses(stages),
            addresses(words), words[rank], torch.full((3,), EPOCH - 1, dtype=torch.int32), k, b.stride(1), b.stride(0),
            len(leaving) if sending else 0, len(coming) if sending is False else 0, 2, k, n, half, lines, rank, NOBODY,
            NOBODY, 10**9, BLOCK_M=TILE[0], BLOCK_N=TILE[1], BLOCK_K=16, TRANSPOSED=transposed, GROUPED=True,
            RANKS=ranks, EVEN=n % 8 == 0, BIAS=True, ACTIVATION=1,
        )  # fmt: skip

    for rank in range(ranks):
        run(rank, None)
    assert not any(one.any() for one in words), "a CTA that does not work told of a tile"
    for rank in range(ranks):
        run(rank, True)
    for rank in range(ranks):
        heard = words[rank][(1 + EPOCH % 2 * lines) * LINE :]
        awaited = [line[4] for line in tokens.collected_table(rows, n, PLAN, rank).tolist()]
        assert [int(heard[word]) for word in awaited] == [EPOCH] * len(awaited)
        assert int((heard[: lines * LINE] == EPOCH).sum()) == len(awaited), "a word that nobody waits for was set"
        run(rank, False)
    for rank in range(ranks):
        finished = leaving_reference(
            [torch.cat([x, x.new_ones(len(x), 1)], 1) for x in xs],
            [torch.cat([w, bias[:, None]], 1) for w in ws], rows.sizes,
        )[rank]  # fmt: skip
        assert want[rank].shape == outs[rank].shape
        assert torch.equal(outs[rank], torch.relu(finished))
        beyond = stages[rank][EPOCH % 2 * half :][:half][outs[rank].numel() :]
        assert bool(torch.isnan(beyond).all()), "stored behind the last row"
        assert bool(torch.isnan(stages[rank][(1 - EPOCH % 2) * half :][:half]).all()), "stored in the other turn"


@pytest.mark.parametrize(("ranks", "experts", "n", "k", "transposed"), CASES)
def test_rows_arrive_and_are_multiplied(ranks: int, experts: int, n: int, k: int, transposed: bool) -> None:
    rows, xs, ws = case(ranks, experts, n, k, 20 * n + ranks, transposed)
    want = arriving_reference(xs, ws, rows.sizes)
    wide = -(-n // 8) * 8
    capacity, lines = rows.most + 3, rows.most_lines(TILE[0])
    stages = [torch.full((2 * capacity, k), float("nan")) for _ in range(ranks)]
    words = [torch.zeros((1 + 2 * lines) * LINE, dtype=torch.int32) for _ in range(ranks)]
    outs = [torch.full(one.shape, float("nan")) for one in want]

    def run(rank: int, pushing: bool) -> None:
        tiles, pushes = table(tokens.arriving_tiles(rows, n, PLAN, rank)), table(tokens.push_table(rows, PLAN, rank))
        held = ws[rank] if transposed else torch.zeros(experts, k, wide)
        if not transposed:
            held[:, :, :n] = ws[rank]
        b = held.mT if transposed else held
        taken = torch.zeros(2 * LINE, dtype=torch.int32)
        kernel: Any = fused_gather.fused_gather_kernel
        pieces = -(-k // PLAN.piece)
        kernel[(3,)](
            xs[rank], stages[rank], b, NOBODY, xs[rank], outs[rank], outs[rank], tiles, pushes, addresses(stages),
            addresses(words), words[rank], torch.full((3,), EPOCH - 1, dtype=torch.int32), taken,
            0 if pushing else len(tiles), len(pushes) * pieces if pushing else 0, 2, 1, k, k, b.stride(1), b.stride(0),
            0, capacity, lines, pieces, rank, NOBODY, NOBODY, 10**9, BLOCK_M=TILE[0], BLOCK_N=TILE[1],
            BLOCK_K=16, TRANSPOSED=transposed, GROUPED=True, PARTS=4, BULK=False, EVEN=n % 8 == 0,
            BIAS=False, ACTIVATION=0, WIDTH=PLAN.piece, RANKS=ranks, ANNOUNCED=True,
            PULL=False,
        )  # fmt: skip

    for rank in range(ranks):
        run(rank, True)
    for rank in range(ranks):
        heard = words[rank][(1 + EPOCH % 2 * lines) * LINE :]
        awaited = {line[6] for line in tokens.arriving_tiles(rows, n, PLAN, rank).tolist()} - {fused_order.OWN}
        assert all(int(heard[line * LINE]) == EPOCH for line in awaited)
        assert int((heard[: lines * LINE] == EPOCH).sum()) == len(awaited), "a word that nobody waits for was set"
        run(rank, False)
        assert torch.equal(outs[rank], want[rank])


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_signaled_tiles_have_the_weight_of_their_expert(transposed: bool, bulk: bool) -> None:
    n, k = 40, 24
    sizes = ((3, 0, 17), (0, 16, 1))
    plan = Plan("signaled", "peer", ((0, 1), (1, 2)), tile=TILE, group_bands=2, order="proportional")
    grid = reorder.sender_grid(sizes, n, plan)
    tiles = table(reorder.tile_table(grid, plan, 0))
    made = torch.Generator().manual_seed(5)
    x, w = (torch.randint(-1, 2, shape, generator=made).float() for shape in ((grid.m, k), (3, k, n)))
    w = w.mT.contiguous().mT if transposed else w
    bias, out = torch.arange(3 * n).view(3, n).float() % 4, torch.full((grid.m, n), float("nan"))
    both = {
        "BLOCK_M": TILE[0], "BLOCK_N": TILE[1], "BLOCK_K": 16, "PARTS": 2, "EVEN": True, "SIGNAL": False, "BIAS": True,
        "ACTIVATION": 1, "GROUPED": True, "BIAS_ROW": n,
    }  # fmt: skip
    kernel: Any
    if bulk:
        b = w.mT if transposed else w
        kernel = gemm.gemm_kernel
        kernel[(2,)](
            TensorDescriptor.from_tensor(x, [TILE[0], 16]),
            TensorDescriptor.from_tensor(b, [1, *((TILE[1], 16) if transposed else (16, TILE[1]))]),
            NOBODY, out, bias, tiles, NOBODY, len(tiles), k, TRANSPOSED=transposed, BULK=False, DEFER=False, **both,
        )  # fmt: skip
    else:
        kernel = gemm.plain_gemm_kernel
        kernel[(2,)](
            x, w, out, bias, tiles, NOBODY, len(tiles), k, *x.stride(), *w.stride()[1:], NOBODY, NOBODY, 10**9,
            WAITS=False, b_expert=w.stride(0), **both,
        )  # fmt: skip
    row = 0
    for block in sizes:
        for expert, rows in enumerate(block):
            want = torch.relu(x[row : row + rows] @ w[expert] + bias[expert])
            assert torch.equal(out[row : row + rows], want)
            row += rows
