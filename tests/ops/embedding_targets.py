"""Rank functions for the tests of embedding_all_to_all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import undertow as ut
from undertow.errors import RankLost, UndertowError
from undertow.ops import embedding_all_to_all as operator
from undertow.ops import embedding_gradients as gradients
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


def aborted() -> list[str]:
    """A call that fails leaves the caller's `out` poisoned, and one that fails on the way back leaves tables alone."""
    group = ut.init()
    given, said = ordinary(group), []
    out = torch.ones(BATCH, DIM * len(given["tables"]) * group.size)
    real = operator.run

    def fails(*arguments: Any) -> torch.Tensor:
        raise KeyError("half-way")

    operator.run = fails  # type: ignore[assignment]
    try:
        ut.embedding_all_to_all(**given, out=out)
    except KeyError:
        said.append("poisoned" if bool(out.isnan().all()) else "left as it was")
    operator.run = real
    before = [one.clone() for one in given["tables"]]
    y = ut.embedding_all_to_all(**given, optimizer=RowOptimizer())
    gathered = gradients.row_gradients

    def lost(*arguments: Any) -> Any:
        """As on a GPU: the exchange was enqueued, and fails while the host goes on."""
        found = gathered(*arguments)
        group.barrier()
        group.fail(RankLost(rank=0, group=group.name, reason="a test says so"))
        return found

    gradients.row_gradients = lost
    try:
        y.sum().backward()
    except RankLost:
        same = all(torch.equal(one, other) for one, other in zip(given["tables"], before, strict=True))
        said.append("no step" if same else "stepped")
    return said


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
    outside = {**good, "values": torch.full_like(good["values"], 99)}
    said["an index of one rank"] = _said(lambda: ut.embedding_all_to_all(**(outside if group.rank else good)))
    flat = {**good, "tables": [one.view(-1) for one in good["tables"]]}
    said["a table of one rank"] = _said(lambda: ut.embedding_all_to_all(**(flat if group.rank else good)))
    columns = [Shard(torch.ones(10 - group.rank, 2), 0, first_column=2 * group.rank)]
    bags = {"values": torch.tensor([9 - group.rank] * 2), "lengths": torch.tensor([1, 1])}
    said["columns of other heights"] = _said(lambda: ut.embedding_all_to_all(columns, **bags))
    layout = ut.embedding_layout(good["tables"])
    halves = {**good, "tables": [one.half() for one in good["tables"]]}
    said["another dtype"] = _said(lambda: ut.embedding_all_to_all(**halves, layout=layout))
    twice = {**good, "tables": good["tables"][:1] * 2, "optimizer": RowOptimizer("adagrad")}
    said["a table twice"] = _said(lambda: ut.embedding_all_to_all(**twice))
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


# -- who takes part in the backward pass -------------------------------------------------------------------------------


def held_by_the_first(group: ut.Group, table: torch.Tensor) -> dict[str, Any]:
    """One table, on rank 0, looked up once for each of two samples a rank."""
    count = 2 * group.size if group.rank == 0 else 0
    return {
        "tables": [table] if group.rank == 0 else [], "values": torch.arange(count) % len(table),
        "lengths": torch.ones(count, dtype=torch.int64),
    }  # fmt: skip


def frozen_then_trained(lane: str) -> list[Any]:
    """Frozen tables have no backward pass on any rank, trained ones on all, also on ranks that hold none."""
    group, found = ut.init(), []
    for turn in range(3):
        y = ut.embedding_all_to_all(**held_by_the_first(group, torch.full((4, 2), turn + 0.0)), strategy=lane)
        found.append((y.requires_grad, y[0, 0].item()))
        if y.requires_grad:
            (7 * y.sum()).backward()
        weight = torch.ones(4, 2, requires_grad=True)
        z = ut.embedding_all_to_all(**held_by_the_first(group, weight), strategy=lane)
        z.sum().backward()
        if group.rank == 0:
            assert weight.grad is not None
            found.append(weight.grad.tolist())
    out = torch.empty(2, 2)
    frozen = ut.embedding_all_to_all(**held_by_the_first(group, torch.ones(4, 2)), strategy=lane, out=out)
    assert frozen is out
    given = held_by_the_first(group, torch.ones(4, 2, requires_grad=True))
    found.append(_said(lambda: ut.embedding_all_to_all(**given, strategy=lane, out=out if group.rank else None)))
    return found


def changed_in_place() -> list[str]:
    """Between the two passes: what a gradient needs of it. Rank 1 changes nothing, and its backward pass ends."""
    group, said = ut.init(), []
    for what in ("values", "weights", "table"):
        table, scale = torch.ones(4, 2, requires_grad=True), torch.ones(2, requires_grad=True)
        values = torch.tensor([0, 1])
        y = ut.embedding_all_to_all([table], values, lengths=torch.tensor([1, 1]), weights=scale, strategy="serial")
        if group.rank == 0:
            with torch.no_grad():
                {"values": values, "weights": scale, "table": table}[what].fill_(3)
        try:
            y.sum().backward()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


def halves_and_strides() -> bool:
    """Sums of half types in fp32, rounded once; weights in their own type, strided or not."""
    ut.init()
    for dtype in (torch.float16, torch.bfloat16):
        big = torch.full((4, 2), 30000.0, dtype=dtype)
        for weights in (None, torch.ones(6)):
            y = ut.embedding_all_to_all([big], torch.tensor([0, 1, 2, 0, 1, 2]), lengths=torch.tensor([3, 3]),
                                        weights=weights, pooling="mean", strategy="serial")  # fmt: skip
            assert torch.equal(y, big[:1].repeat(1, 2))
    table, weights = torch.full((2, 1), 100.0, dtype=torch.bfloat16), torch.full((2, 2), 1.003)[:, 0]
    y = ut.embedding_all_to_all([table], torch.tensor([0, 1]), lengths=torch.tensor([2, 0]), weights=weights,
                                batches=[2, 0], strategy="serial")  # fmt: skip
    assert not len(y) or y[0].tolist() == [torch.tensor(2 * 1.003 * 100).bfloat16().item()] * 2
    return True


def strided_weights() -> bool:
    """What kernels are given: they know no strides."""
    group = ut.init()
    seen: list[bool] = []
    from undertow.ops import embedding_all_to_all as operator

    plain = operator.run

    def run(fabric: Any, bags: Any, *rest: Any) -> torch.Tensor:
        seen.append(bags.weights.is_contiguous())
        return plain(fabric, bags, *rest)

    operator.run = run
    try:
        scale = torch.arange(4.0).view(2, 2)[:, 0]
        ut.embedding_all_to_all([torch.ones(4, 2)], torch.tensor([0, 1]), lengths=torch.tensor([1, 1]), weights=scale,
                                strategy="serial", group=group)  # fmt: skip
    finally:
        operator.run = plain
    return seen == [True]


def lengths_that_differ() -> int:
    """Bags of one rank much longer in one step than the others': nobody measures alone."""
    group = ut.init()
    for step in range(3):
        count = 4000 if (group.rank, step) == (0, 1) else 250
        values, lengths = torch.zeros(2 * count, dtype=torch.int64), torch.tensor([count, count])
        y = ut.embedding_all_to_all([torch.ones(4, 2)], values, lengths=lengths)
    return y.shape[1]


def bench_with_a_wrong_column() -> tuple[list[str], list[str]]:
    """What the benchmark says of a right operator, and of one that spoils what the other rank sent, always alike."""
    from undertow.report import embedding_bench as bench

    group = ut.init()
    shape, plain = bench.Shape(2, 1, 5, 4, 2), bench.run

    def spoiled(*given: Any) -> torch.Tensor:
        y = plain(*given).clone()
        y[:, DIM * (1 - group.rank)] += 1
        return y

    right = bench.measure_rank([shape], 1)[0].wrong
    bench.run = spoiled
    try:
        return right, bench.measure_rank([shape], 1)[0].wrong
    finally:
        bench.run = plain
