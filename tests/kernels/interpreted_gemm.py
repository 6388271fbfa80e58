"""The arithmetic of the plain matmul and of what follows it, run by Triton's interpreter on the CPU.

`test_gemm.py` runs this file in a process of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from undertow.kernels import combine, gemm
from undertow.plan import reorder
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes `int()` of an array of shape [1], which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_with_index

ACTIVATIONS = (lambda y: y, torch.relu, torch.nn.functional.gelu, torch.nn.functional.silu)


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (16, 32, 16), (37, 45, 33), (64, 64, 70), (5, 130, 97)])
@pytest.mark.parametrize("layout", ["natural", "packed"])
def test_every_tile_comes_to_its_place(layout: str, m: int, n: int, k: int, transposed: bool) -> None:
    x = integers(m, k, seed=m)
    w = integers(n, k, seed=n).t() if transposed else integers(k, n, seed=n)
    problem = Problem.of("matmul_all_reduce", m, n, k, dtype="float32", ranks=2, device="cuda", multiprocessors=4)
    bands, columns = -(-m // 16), -(-n // 32)
    half = max(1, bands // 2) * columns
    parcels = ((0, half), (half, bands * columns)) if bands > 1 else ((0, bands * columns),)
    plan = Plan("signaled", "dma", parcels, tile=(16, 32), group_bands=2, layout=layout)
    plan.check(problem)
    grid = problem.grid(plan)
    table = torch.from_numpy(reorder.tile_table(grid, plan))
    buffer = torch.full((m * n,), float("nan"))
    bias = torch.arange(n, dtype=torch.float32) % 3
    words = torch.zeros(64, dtype=torch.int32)
    kernel: Any = gemm.plain_gemm_kernel
    kernel[(3,)](
        x, w, buffer, buffer, table, words, len(table), k, *x.stride(), *w.stride(), words, words, 10**9,
        BLOCK_M=16, BLOCK_N=32, BLOCK_K=16, PARTS=2, EVEN=False, SIGNAL=False, WAITS=False, BIAS=False, ACTIVATION=0,
    )  # fmt: skip
    want = x @ w
    assert np.array_equal(buffer.numpy(), reorder.pack(want.numpy(), table.numpy()))
    y = torch.full((m, n), float("nan"))
    unpack: Any = combine.unpack_kernel
    found = torch.from_numpy(np.ascontiguousarray(reorder.unpack_table(grid, plan)))
    unpack[(2,)](y, buffer, bias, found, len(found), n, BIAS=True, ACTIVATION=1, ROWS=16, COLUMNS=32)
    assert torch.equal(y, torch.relu(want + bias))


@pytest.mark.parametrize("activation", range(4))
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 100, 5000])
def test_sums_are_finished(count: int, parts: int, activation: int) -> None:
    given = [integers(count, seed=one + count) for one in range(parts)]
    bias, first = integers(7, seed=3), 5
    out = given[-1]
    want = ACTIVATIONS[activation](torch.stack(given).sum(0) + bias[(first + torch.arange(count)) % 7])
    padded = [*given, *[given[0]] * (combine.MOST_PARTS - parts)]
    kernel: Any = combine.combine_kernel
    kernel[(2,)](
        out, *padded, bias, count, first, 7, PARTS=parts, BIAS=True, ACTIVATION=activation, ALIGNED=False,
        BLOCK=combine.BLOCK,
    )  # fmt: skip
    torch.testing.assert_close(out, want)


def test_nan_stays_nan() -> None:
    out = torch.tensor([float("nan"), -1.0, 2.0])
    kernel: Any = combine.combine_kernel
    kernel[(1,)](
        out, *[out] * combine.MOST_PARTS, out, 3, 0, 1, PARTS=1, BIAS=False, ACTIVATION=1, ALIGNED=False, BLOCK=16
    )
    assert bool(torch.isnan(out[0]))
    assert out[1:].tolist() == [0.0, 2.0]
