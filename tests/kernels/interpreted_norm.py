"""Unpacking with residual add and normalisation, run by Triton's interpreter on the CPU, as `ops/norm.py` launches it.

`test_norm.py` runs this file in a process of its own.
"""

from __future__ import annotations

import itertools

import interpreted_move  # noqa: F401 - mends Triton's interpreter for this NumPy
import numpy as np
import pytest
import torch

from undertow.kernels import norm as kernels
from undertow.ops import norm as ops
from undertow.plan import reorder
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem

SHAPES = ((1, 1), (5, 7), (9, 48), (2, 100))


def values(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(matrix: torch.Tensor, tile: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffer that a packed matmul leaves, and the table by which it is unpacked."""
    m, n = matrix.shape
    problem = Problem.of("matmul_all_reduce", m, n, 8, dtype="float32", ranks=2, device="cuda", multiprocessors=4)
    plan = Plan("signaled", "dma", ((0, 0),), tile=tile, group_bands=2, layout="packed")
    tiles = problem.grid(plan).tiles
    plan = Plan("signaled", "dma", ((0, tiles // 2), (tiles // 2, tiles)), tile=tile, group_bands=2, layout="packed")
    grid = problem.grid(plan)
    buffer = reorder.pack(matrix.float().numpy(), reorder.tile_table(grid, plan))
    table = np.ascontiguousarray(reorder.unpack_table(grid, plan))
    return torch.from_numpy(buffer).to(matrix.dtype), torch.from_numpy(table)


def norm_of(kind: type[torch.nn.Module] | None, n: int, dtype: torch.dtype, plain: bool) -> torch.nn.Module | None:
    if kind is None:
        return None
    made = kind(n, eps=1e-5, elementwise_affine=not plain).to(dtype).requires_grad_(False)
    for one in made.parameters():
        one.data = values(n, 2, dtype, 3)[:, 0]  # a column of another tensor
    return made


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, kernels.MOST_IN_REGISTERS), (torch.bfloat16, 16)])
@pytest.mark.parametrize("kind", [None, torch.nn.RMSNorm, torch.nn.LayerNorm])
def test_rows(
    monkeypatch: pytest.MonkeyPatch, kind: type[torch.nn.Module] | None, dtype: torch.dtype, most: int
) -> None:
    """Packed and natural, with and without residual, bias, activation; rows that fit the registers or do not."""
    monkeypatch.setattr(kernels, "MOST_IN_REGISTERS", most)
    monkeypatch.setattr(kernels, "WIDTH", 8)
    for (rows, n), tile in itertools.product(SHAPES, ((4, 16), None)):
        seed = rows + n
        total, bias = values(rows, n, dtype, seed), values(1, n, dtype, seed + 1)[0] if rows % 2 else None
        residual = values(rows, n, dtype, seed + 2) if n % 2 == 0 or kind is None else None
        activation = "relu" if n % 3 == 0 else "none"
        want = total.double() if bias is None else total.double() + bias.double()
        want = torch.relu(want) if activation == "relu" else want
        want = want if residual is None else want + residual.double()
        y = torch.full((rows, n), float("nan"), dtype=dtype)
        buffer, table = (y.view(-1), None) if tile is None else packed(total, tile)
        if tile is None:
            y.copy_(total)
        norm = norm_of(kind, n, dtype, rows == 9)
        after = ops.After.of(residual, norm, y)
        if after is None:
            continue
        kept = None if residual is None else residual.clone()
        ops._on_gpu(after, y, buffer, table, tile, bias, activation)
        h = want.to(dtype)
        if residual is not None:
            assert torch.equal(residual, kept if kind is None else h), "the residual holds h, and only with a norm"
        expected = ops.reference(h, norm)
        if kind is None:
            assert torch.equal(y, h), f"{rows} x {n} {tile}"
        else:
            limit = 2e-2 if dtype == torch.bfloat16 else 2e-5
            assert torch.allclose(y.double(), expected, rtol=limit, atol=limit), f"{rows} x {n} {tile}"


def test_a_wrong_table_is_seen() -> None:
    total = values(32, 64, torch.float32, 1)
    buffer, table = packed(total, (16, 32))
    table[[0, 1], 4] = table[[1, 0], 4]
    y = torch.empty_like(total)
    ops._on_gpu(ops.After(torch.zeros_like(total), None), y, buffer, table, (16, 32), None, "none")
    assert not torch.equal(y, total)
