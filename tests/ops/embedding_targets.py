"""Rank functions for the tests of embedding_all_to_all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import undertow as ut
from undertow.errors import UndertowError
from undertow.ops.bags import Shard
from undertow.ops.embedding_gradients import RowOptimizer

ROWS, DIM, TABLES, BATCH = 11, 4, 2, 3


def ordinary(group: ut.Group, seed: int = 0) -> dict[str, Any]:
    """Two tables on each rank, three samples each, two values in a bag."""
    generator = torch.Generator().manual_seed(100 * seed + group.rank)
    samples = BATCH * group.size
    return {
        "tables": [torch.randint(-4, 5, (ROWS, DIM), generator=generator).float() for _ in range(TABLES)],
        "values": torch.randint(0, ROWS, (2 * TABLES * samples,), generator=generator),
        "offsets": torch.arange(0, 2 * TABLES * samples + 1, 2),
    }


def torch_way(group: ut.Group, given: dict[str, Any], tables: list[torch.Tensor]) -> torch.Tensor:
    samples = BATCH * group.size
    pooled = [
        torch.nn.functional.embedding_bag(given["values"][k * 2 * samples : (k + 1) * 2 * samples].view(-1, 2), table,
                                          mode="sum")
        for k, table in enumerate(tables)
    ]  # fmt: skip
    mine = torch.cat(pooled, 1)
    out = torch.empty(group.size * BATCH, TABLES * DIM)
    dist.all_to_all_single(out, mine.detach().contiguous())
    return out.view(group.size, BATCH, -1).permute(1, 0, 2).reshape(BATCH, -1)


def beside_torch() -> bool:
    group = ut.init()
    given = ordinary(group)
    want = torch_way(group, given, given["tables"])
    tables = [one.clone().requires_grad_() for one in given["tables"]]
    y = ut.embedding_all_to_all(tables, given["values"], given["offsets"])
    assert torch.equal(y.detach(), want)
    dy = torch.arange(y.numel()).view(y.shape).float() % 5
    y.backward(dy)
    back = torch.empty(group.size, BATCH, TABLES * DIM)
    outgoing = dy.view(BATCH, group.size, -1).permute(1, 0, 2).contiguous()
    dist.all_to_all_single(back, outgoing)
    plain = [one.clone().requires_grad_() for one in given["tables"]]
    samples = BATCH * group.size
    for k, table in enumerate(plain):
        bags = given["values"][k * 2 * samples : (k + 1) * 2 * samples].view(-1, 2)
        pooled = torch.nn.functional.embedding_bag(bags, table, mode="sum")
        pooled.backward(back.view(samples, -1)[:, k * DIM : (k + 1) * DIM].contiguous())
    return all(torch.equal(one.grad, other.grad) for one, other in zip(tables, plain, strict=True))  # type: ignore[arg-type]


def kept_results() -> str:
    group = ut.init()
    kept = []
    for seed in range(4):
        given = ordinary(group, seed)
        kept.append((ut.embedding_all_to_all(**given, strategy="fused:peer"), given))
    for y, given in kept:
        assert torch.equal(y, torch_way(group, given, given["tables"]))
    given = kept[0][1]
    out = torch.full_like(kept[0][0], float("nan"))
    layout = ut.embedding_layout(given["tables"])
    got = ut.embedding_all_to_all(**given, out=out, layout=layout, batches=[BATCH] * group.size, strategy="fused:peer")
    assert got is out
    assert torch.equal(out, kept[0][0])
    return str(ut.explain())


def adagrad() -> bool:
    """Two steps against the formula, row by row."""
    group = ut.init()
    given = ordinary(group)
    tables = [one.double() for one in given["tables"]]
    plain, state = [one.clone() for one in tables], [torch.zeros(ROWS, dtype=torch.float64) for _ in tables]
    optimizer = RowOptimizer("adagrad", lr=0.1, eps=1e-3)
    optimizer.state = [one.clone() for one in state]
    samples = BATCH * group.size
    for _ in range(2):
        y = ut.embedding_all_to_all(tables, given["values"], given["offsets"], optimizer=optimizer)
        y.sum().backward()
        for k, table in enumerate(plain):
            bags = given["values"][k * 2 * samples : (k + 1) * 2 * samples]
            for row in bags.unique().tolist():
                gradient = torch.full((DIM,), float((bags == row).sum()), dtype=torch.float64)
                state[k][row] += gradient.pow(2).mean()
                table[row] -= 0.1 * gradient / (state[k][row].sqrt() + 1e-3)
    return all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(tables, plain, strict=True))


# -- bad input ---------------------------------------------------------------------------------------------------------

SAID = {
    "index": ("values[3] is 99", "table", "tables[0]", "between 0 and 10"),
    "negative index": ("values[13] is -1", "tables[1]", "11 rows"),
    "decreasing": ("offsets is 8 at 4 and 1 at 5", "never decreasing"),
    "negative length": ("never negative",),
    "last offset": ("offsets is from 0 to", "the number of values"),
    "both": ("offsets is given beside lengths",),
    "neither": ("offsets is missing",),
    "float values": ("values is of torch.float32", "torch.int32 or torch.int64"),
    "table dtype": ("tables[1] is of torch.float64", "torch.float32"),
    "integer table": ("tables[0] is of torch.int64", "float32"),
    "flat table": ("tables[0] is of shape [44]", "matrix"),
    "weights": ("weights is [3]",),
    "pooling": ("pooling is 'max'", "sum, mean"),
    "bags": ("offsets is for 11 bags", "each of the 2 tables"),
    "batches": ("batches is [1]", "2 counts"),
    "batch sum": ("offsets is for 6 samples", "for 5 samples"),
    "out": ("out is [1, 1]",),
    "strategy": ("strategy is 'eager'", "serial, chunked, signaled, fused"),
}


def refused() -> dict[str, str]:
    """What each wrong argument says, on all ranks alike; afterwards the group still works."""
    group = ut.init()
    good = ordinary(group)
    values, offsets = good["values"], good["offsets"]

    def changed(tensor: torch.Tensor, place: int, value: int) -> torch.Tensor:
        other = tensor.clone()
        other[place] = value
        return other

    short = torch.full((len(offsets) - 1,), 2)
    cases: dict[str, dict[str, Any]] = {
        "index": {"values": changed(values, 3, 99)},
        "negative index": {"values": changed(values, 2 * BATCH * group.size + 1, -1)},
        "decreasing": {"offsets": changed(offsets, 5, 1)},
        "negative length": {"offsets": None, "lengths": changed(changed(short, 1, -2), 0, 6)},
        "last offset": {"offsets": changed(offsets, -1, len(values) + 2)},
        "both": {"lengths": short},
        "neither": {"offsets": None},
        "float values": {"values": values.float()},
        "table dtype": {"tables": [good["tables"][0], good["tables"][1].double()]},
        "integer table": {"tables": [one.long() for one in good["tables"]]},
        "flat table": {"tables": [one.view(-1) for one in good["tables"]]},
        "weights": {"weights": torch.ones(3)},
        "pooling": {"pooling": "max"},
        "bags": {"offsets": offsets[:12]},
        "batches": {"batches": [1]},
        "batch sum": {"batches": [2, 3]},
        "out": {"out": torch.empty(1, 1)},
        "strategy": {"strategy": "eager"},
    }
    said = {}
    for name, change in cases.items():
        said[name] = _said(lambda change=change: ut.embedding_all_to_all(**{**good, **change}))
    y = ut.embedding_all_to_all(**good)
    assert torch.equal(y, torch_way(group, good, good["tables"]))
    return said


def disagreeing() -> dict[str, str]:
    group = ut.init()
    good, said = ordinary(group), {}
    fewer = {**good, "values": good["values"][:20], "offsets": torch.arange(0, 21, 2)}
    said["samples"] = _said(lambda: ut.embedding_all_to_all(**(fewer if group.rank else good)))
    doubles = {**good, "tables": [one.double() for one in good["tables"]]}
    said["dtypes"] = _said(lambda: ut.embedding_all_to_all(**(doubles if group.rank else good)))
    layout = ut.embedding_layout(good["tables"])
    sizes = [[3, 3], [2, 4]][group.rank]
    said["batches"] = _said(lambda: ut.embedding_all_to_all(**good, layout=layout, batches=sizes))
    part = [Shard(good["tables"][0], 0, first_row=(ROWS + 1) * group.rank)]
    half = len(good["values"]) // 2
    given = {"tables": part, "values": good["values"][:half], "offsets": good["offsets"][: half // 2 + 1]}
    said["rows with a gap"] = _said(lambda: ut.embedding_all_to_all(**given))
    return said


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except UndertowError as error:
        return str(error)
    return "nothing"


def chosen() -> str:
    group = ut.init()
    for _ in range(2):
        y = ut.embedding_all_to_all(**ordinary(group))
    assert torch.equal(y, torch_way(group, ordinary(group), ordinary(group)["tables"]))
    return str(ut.explain())
