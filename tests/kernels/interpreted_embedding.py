"""Pooled lookups and spreading, run by Triton's interpreter on the CPU, against plain loops.

`test_embedding_kernels.py` runs this file in a process of its own.
"""

from __future__ import annotations

import interpreted_move  # noqa: F401 - mends Triton's interpreter for this NumPy
import pytest
import torch

from undertow.kernels import embedding

POISON = 77.0


def tables_and_bags(dims: list[int], samples: int, longest: int, dtype: torch.dtype, index: torch.dtype, seed: int):
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randint(-3, 4, (5 + one % 7, one), generator=generator).to(dtype) for one in dims]
    lengths = torch.randint(0, longest + 1, (len(dims) * samples,), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(index)
    values = torch.cat([
        torch.randint(0, len(table), (int(lengths[number * samples : (number + 1) * samples].sum()),),
                      generator=generator)
        for number, table in enumerate(tables)
    ]).to(index)  # fmt: skip
    weights = torch.randint(-2, 3, (len(values),), generator=generator).float()
    return tables, values, offsets, weights


def wanted(tables, values, offsets, weights, samples: int, mean: bool) -> torch.Tensor:
    rows = torch.zeros(samples, sum(one.shape[1] for one in tables), dtype=torch.float64)
    column = 0
    for number, table in enumerate(tables):
        for sample in range(samples):
            begin, end = (int(offsets[number * samples + sample + one]) for one in (0, 1))
            for place in range(begin, end):
                at = int(values[place])
                if 0 <= at < len(table):
                    scale = 1.0 if weights is None else float(weights[place])
                    rows[sample, column : column + table.shape[1]] += scale * table[at].double()
            if mean and end > begin:
                rows[sample, column : column + table.shape[1]] /= end - begin
        column += table.shape[1]
    return rows


def table_list(tables, samples: int, first_row: int = 0) -> torch.Tensor:
    lines, column = [], 0
    for number, table in enumerate(tables):
        lines.append([table.data_ptr(), len(table), table.shape[1], table.stride(0), column, number * samples,
                      first_row, column])  # fmt: skip
        column += table.shape[1]
    return torch.tensor(lines, dtype=torch.int64)


def slice_list(parts: list[dict[str, int]], tables: int, block: int) -> torch.Tensor:
    lines, begin = [], 0
    for one in parts:
        items = tables * -(-one["bags"] // block)
        lines.append([one["address"], one["stride"], one["first"], one["bags"], 0, begin, items, one.get("source", 0),
                      one.get("source_stride", 0), one.get("choice", 0), one.get("distance", 0), -1, 0])  # fmt: skip
        begin += items
    return torch.tensor(lines, dtype=torch.int64)


def launch(tables, values, offsets, weights, slices, about, ctas: int, origin: int = 0, **constants) -> None:
    kinds = {"BAGS": 4, "COLUMNS": 8, "UNROLL": 2, "ALIGNMENT": 1, "MEAN": False, "WHOLE": False, "TOGETHER": 1}
    kinds |= {"WEIGHTS": weights is not None} | constants
    embedding.pool_kernel[(ctas,)](
        tables[0], slices, about, values, offsets, values if weights is None else weights,
        torch.zeros(64 * 32, dtype=torch.int32), len(slices), len(values), origin, 0, **kinds,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(("mean", "weighted"), [(False, False), (True, False), (False, True), (True, True)])
def test_pooled_rows(dtype: torch.dtype, index: torch.dtype, mean: bool, weighted: bool) -> None:
    """Several tables of different dims, slices with tails, places chosen by a word; nothing else is touched."""
    dims, samples = [8, 3, 20], 13
    tables, values, offsets, weights = tables_and_bags(dims, samples, 5, dtype, index, seed=int(mean) + 2 * weighted)
    width = sum(dims)
    places = torch.full((3, samples, width + 2), POISON, dtype=dtype)
    choice = torch.tensor([2], dtype=torch.int32)
    size, stride = places.element_size(), width + 2
    parts = [
        {"address": places.data_ptr() + first * stride * size, "stride": stride, "first": first, "bags": bags,
         "choice": choice.data_ptr(), "distance": samples * stride}
        for first, bags in ((6, 7), (0, 5), (5, 1))
    ]  # fmt: skip
    given = weights if weighted else None
    launch(tables, values, offsets, given, slice_list(parts, 3, 4), table_list(tables, samples), 3, MEAN=mean)
    want = wanted(tables, values, offsets, given, samples, mean)
    limit = 0.0 if not mean else 1e-2
    assert torch.allclose(places[1, :, :width].double(), want, rtol=limit, atol=limit)
    assert (places[1, :, width:] == POISON).all()
    assert (places[[0, 2]] == POISON).all()


@pytest.mark.parametrize("together", [2, 3, 8])
@pytest.mark.parametrize("ctas", [1, 4])
def test_tables_that_take_turns(together: int, ctas: int) -> None:
    """Every item once, whatever the order: more tables than take turns, fewer, and a group that is not full."""
    dims, samples = [8, 4, 12, 3, 8], 13
    tables, values, offsets, _ = tables_and_bags(dims, samples, 5, torch.float32, torch.int64, seed=together)
    width = sum(dims)
    out = torch.full((samples, width), POISON)
    parts = [
        {"address": out.data_ptr() + 4 * width * first, "stride": width, "first": first, "bags": bags}
        for first, bags in ((6, 7), (0, 6))
    ]
    launch(tables, values, offsets, None, slice_list(parts, 5, 4), table_list(tables, samples), ctas, TOGETHER=together)
    assert torch.equal(out.double(), wanted(tables, values, offsets, None, samples, False))


def test_what_is_out_of_range_counts_as_absent() -> None:
    tables, values, offsets, _ = tables_and_bags([4, 4], 6, 5, torch.float32, torch.int64, seed=9)
    values[::3] = torch.tensor([1 << 40, -1, -(1 << 40), 10**9])[torch.arange(len(values[::3])) % 4]
    out = torch.full((6, 8), POISON)
    parts = [{"address": out.data_ptr(), "stride": 8, "first": 0, "bags": 6}]
    launch(tables, values, offsets, None, slice_list(parts, 2, 4), table_list(tables, 6), 2)
    assert torch.equal(out.double(), wanted(tables, values, offsets, None, 6, False))
    broken = offsets.clone()
    broken[1], broken[-1] = -5, 10**6
    launch(tables, values, broken, None, slice_list(parts, 2, 4), table_list(tables, 6), 2)  # reads nothing outside


def test_destinations_from_a_base_on() -> None:
    tables, values, offsets, _ = tables_and_bags([8], 9, 6, torch.float32, torch.int64, seed=5)
    out = torch.full((9, 8), POISON)
    parts = [{"address": 4 * 8 * first, "stride": 8, "first": first, "bags": bags} for first, bags in ((4, 5), (0, 4))]
    about = table_list(tables, 9)
    launch(tables, values, offsets, None, slice_list(parts, 1, 4), about, 2, origin=out.data_ptr(), WHOLE=True)
    assert torch.equal(out.double(), wanted(tables, values, offsets, None, 9, False))


def test_rows_of_others_are_passed() -> None:
    """A table cut by rows: each part adds what it holds, and together they are the whole."""
    tables, values, offsets, _ = tables_and_bags([8], 9, 6, torch.float32, torch.int64, seed=4)
    cut, total = 2, torch.zeros(9, 8)
    for first, part in ((0, tables[0][:cut].clone()), (cut, tables[0][cut:].clone())):
        out = torch.full((9, 8), POISON)
        parts = [{"address": out.data_ptr(), "stride": 8, "first": 0, "bags": 9}]
        launch([part], values, offsets, None, slice_list(parts, 1, 4), table_list([part], 9, first), 2, WHOLE=True)
        total += out
    assert torch.equal(total.double(), wanted(tables, values, offsets, None, 9, False))


def test_spread() -> None:
    dims, samples = [8, 3, 12], 11
    source = torch.arange(samples * 23, dtype=torch.float32).view(samples, 23)
    out = torch.full((samples, 30), POISON)
    about = table_list([torch.empty(1, one) for one in dims], samples)
    about[:, 4] = torch.tensor([20, 13, 0])  # other columns in the destination
    parts = [
        {"address": out.data_ptr() + 4 * 30 * first, "stride": 30, "first": first, "bags": bags,
         "source": 4 * 23 * first, "source_stride": 23}
        for first, bags in ((4, 7), (0, 4))
    ]  # fmt: skip
    embedding.spread_kernel[(3,)](
        source, slice_list(parts, 3, 4), about, torch.zeros(64, dtype=torch.int32), 2, source.data_ptr(), BAGS=4,
        COLUMNS=8, ALIGNMENT=1,
    )  # fmt: skip
    want = torch.full((samples, 30), POISON)
    want[:, 20:28], want[:, 13:16], want[:, 0:12] = source[:, :8], source[:, 8:11], source[:, 11:]
    assert torch.equal(out, want)
