"""The product that a plan asks for, and its tables, on the device that is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument
from ..plan import reorder
from ..plan.tiles import chunks
from .product import Product, RowProduct, TileProduct

if TYPE_CHECKING:
    import torch

    from ..fabric.base import Fabric
    from ..plan.plan import Plan
    from ..plan.problem import Problem
    from ..plan.tiles import TileGrid
    from ..plan.tokens import Block
    from .finish import Finish


def product_of(
    fabric: Fabric,
    problem: Problem,
    plan: Plan,
    x: torch.Tensor,
    w: torch.Tensor,
    buffer: torch.Tensor,
    finish: Finish | None,
    blocks: Sequence[Block] = (),
    grid: TileGrid | None = None,
) -> Product:
    """x [M, K] @ w [K, N] into the flat `buffer`, as `plan` lays it out; `finish` where the product is complete.

    `blocks`: which rows are whose, where w [experts, K, N] has one weight for each expert; `grid`: tiles that are cut
    there, too.
    """
    if plan.grain in ("serial", "chunked"):
        rows = chunks(problem.shards, plan)
        return RowProduct(fabric, plan, x, w, buffer.view(problem.m, problem.n), rows, finish, blocks)
    if plan.grain != "signaled":
        raise InvalidArgument(argument="plan", was=plan.name, must="serial, chunked or signaled")
    if x.device.type == "cuda":
        from .cuda_product import CudaTileProduct

        return CudaTileProduct(fabric, problem, plan, x, w, buffer, finish, grid=grid)
    table = reorder.tile_table(grid or problem.grid(plan), plan, fabric.group.rank)
    return TileProduct(x, w, buffer, table, len(plan.parcels), finish, blocks)


def placed(
    fabric: Fabric, key: tuple[object, ...], make: Callable[[], NDArray[np.int64]]
) -> NDArray[np.int64] | torch.Tensor:
    """A table for this device: as it is on a CPU, uploaded once on a GPU."""
    if fabric.group.device.type == "cpu":
        return make()
    from .cuda_product import device_table

    return device_table(fabric, key, make)
