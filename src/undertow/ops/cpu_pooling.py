"""Pooled lookup on a CPU, compiled by Numba: one call for a table's bags, without the GIL, straight into its columns.

torch's embedding_bag costs tens of microseconds a call and a copy of its result, which slices of few bags would feel.
Sums are taken in the table's own type, in the order of the values.
"""

from __future__ import annotations

from typing import Any

import numba


@numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")  # type: ignore[untyped-decorator]
def pool_table(
    table: Any, values: Any, offsets: Any, weights: Any, weighted: bool, first_row: int, mean: bool, out: Any,
    column: int,
) -> None:  # fmt: skip
    """out[b, column : column + dim] = the bag [offsets[b], offsets[b + 1]) of `values`, pooled.

    `table` [rows, dim] begins with global row `first_row`; rows that it does not hold count nothing, but count in the
    number that a mean is divided by. `offsets` lie within `values`: whoever calls has checked that.
    """
    rows, dim = table.shape
    for bag in range(out.shape[0]):
        begin, end = offsets[bag], offsets[bag + 1]
        to = out[bag, column : column + dim]
        to[:] = 0
        for place in range(begin, end):
            index = values[place] - first_row
            if index < 0 or index >= rows:
                continue
            row = table[index]
            if weighted:
                scale = weights[place]
                for position in range(dim):
                    to[position] += scale * row[position]
            else:
                for position in range(dim):
                    to[position] += row[position]
        if mean and end > begin:
            count = table.dtype.type(end - begin)
            for position in range(dim):
                to[position] /= count
