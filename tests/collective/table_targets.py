"""What ranks do in the tests of tables by size."""

from __future__ import annotations

import logging
from typing import Any

import torch
from operator_targets import data, reduced

import undertow as ut
from undertow import collective as co
from undertow.collective import kinds, tables
from undertow.collective.language import Trace
from undertow.fabric.placement import Placement


@co.program("all_reduce", chunks=2)
def from_the_middle(c: Trace) -> None:
    """Sums at the last rank and sends back."""
    last = c.ranks - 1
    for half in range(2):
        total = c.rank(last).input[half].copy(c.rank(last).output[half])
        for other in c.others(last):
            total.reduce(c.rank(other).input[half])
        for other in c.others(last):
            total.copy(other)


def chosen(collective: str, nbytes: int) -> str:
    """The program that such a call runs."""
    group = ut.init()
    kind = kinds.kind_of(
        collective,
        (nbytes // 4,),
        torch.float32,
        True,
        "sum",
        None,
        0,
        "cpu",
        group.nodes,
        tables.of(group),
        Placement(),
    )
    return kind.program.name


def uses_the_table() -> dict[str, Any]:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("undertow").addHandler(Keep())
    group = ut.init()
    right = []
    for count in (16, 1000, 100_000):
        tensor = data(group.rank, count, torch.float32)
        co.all_reduce(tensor)
        right.append(tensor.equal(reduced(group.size, count, torch.float32, "sum")))
    return {"programs": [chosen("all_reduce", 64), chosen("all_reduce", 400_000)], "right": all(right), "said": said}


def only_rank_one_has_it(folder: str) -> dict[str, Any]:
    import os

    if os.environ["RANK"] == "1":
        os.environ["UNDERTOW_CACHE_DIR"] = folder
    return uses_the_table()
