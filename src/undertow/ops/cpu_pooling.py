"""Pooled lookup on a CPU, compiled by Numba: one call for all tables, without the GIL, straight into their columns.

torch's embedding_bag costs tens of microseconds a call and a copy of its result, which slices of few bags would feel;
and every return to Python waits for the threads that move slices meanwhile. Sums are taken in the tables' own type, in
the order of the values.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..fabric import machine_code

WORDS = 5
"""Of each table: its address, rows, columns, elements between two rows, and the global number of its first row."""


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:
    """A number as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@partial(machine_code.compiled, boundscheck=False, error_model="numpy")
def pool_tables(
    tables: Any, values: Any, offsets: Any, weights: Any, weighted: bool, mean: bool, samples: int, first: int, out: Any
) -> None:
    """out[b] = the bags of sample `first` + b, pooled, table beside table; bag b of table t begins at offsets[t, b].

    Rows that a table does not hold count nothing, but count in the number that a mean is divided by. `offsets` lie
    within `values`: whoever calls has checked that.
    """
    column = 0
    for number in range(len(tables)):
        address, rows, dim, stride, first_row = tables[number]
        table = numba.carray(_pointer(address), (rows * stride,), out.dtype)
        for bag in range(out.shape[0]):
            place = number * samples + first + bag
            begin, end = offsets[place], offsets[place + 1]
            to = out[bag, column : column + dim]
            to[:] = 0
            for value in range(begin, end):
                index = values[value] - first_row
                if index < 0 or index >= rows:
                    continue
                row = table[index * stride : index * stride + dim]
                if weighted:
                    scale = weights[value]
                    for position in range(dim):
                        to[position] += scale * row[position]
                else:
                    for position in range(dim):
                        to[position] += row[position]
            if mean and end > begin:
                count = out.dtype.type(end - begin)
                for position in range(dim):
                    to[position] /= count
        column += dim
