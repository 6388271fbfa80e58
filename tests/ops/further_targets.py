"""Rank functions for one gather with several weights: exact under every strategy, gradients, graphs, failures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import matmul_suite as suite
import torch

import undertow as ut
from undertow import collective as co
from undertow.errors import UndertowError
from undertow.ops import all_gather_matmul as gather
from undertow.ops.all_gather_matmul import reference

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"none": lambda y: y, "relu": torch.relu}


def _drawn(rows: int, columns: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return suite._drawn(rows, columns, seed, 16).to(dtype)


def exact(seed: int, count: int) -> int:
    """Random shapes, numbers of weights, strategies and types, rows that differ; how many results were compared."""
    group, chance, compared = ut.init(), random.Random(seed), 0
    strategies = [*suite.strategies(), "auto"]
    for number in range(count):
        strategy, dtype = strategies[number % len(strategies)], chance.choice(suite.CPU_DTYPES)
        m, k = chance.choice((0, 1, 5, 17, 64)), chance.choice((1, 7, 24))
        rows = [chance.choice((m, max(0, m - 3), 0)) for _ in range(group.size)]
        wide = [[chance.choice((1, 5, 16, 33)) for _ in range(3)] for _ in range(group.size)]  # each rank's own
        kept, several = chance.random() < 0.5, chance.choice((1, 2, 3))
        activation = [chance.choice(tuple(FUNCTIONS)) for _ in range(several)]
        biased = chance.random() < 0.5
        xs = [_drawn(one, k, seed + number + rank, dtype) for rank, one in enumerate(rows)]
        columns = wide[group.rank][:several]
        ws = [_drawn(k, n, number + 7 * at, dtype) for at, n in enumerate(columns)]
        if number % 2:
            ws = [one.t().contiguous().t() for one in ws]
        bias = [torch.arange(n).to(dtype) % 5 - 2 if biased else None for n in columns]
        out = [torch.full((sum(rows), n), float("nan"), dtype=dtype) for n in columns] if number % 3 else None
        found: Any = ut.all_gather_matmul(
            xs[group.rank], ws, gathered=kept, rows=rows, bias=bias, activation=activation, group=group,
            strategy=strategy, out=out,
        )  # fmt: skip
        results, whole = found if kept else (found, None)
        for at, (w, result) in enumerate(zip(ws, results, strict=True)):
            want = reference([one.double() for one in xs], [w.double()])[0].to(dtype)
            want = want if bias[at] is None else want + bias[at]
            assert torch.equal(result, FUNCTIONS[activation[at]](want)), (strategy, rows, columns, at)
            assert out is None or result is out[at]
            compared += 1
        if whole is not None:
            assert torch.equal(whole, torch.cat(xs)), (strategy, rows)
            compared += 1
    return compared


def gradients(seed: int, count: int) -> int:
    """Against autograd of the plain loops, in fp64 and integers: of x, of every weight and bias, through the rows."""
    group, chance = ut.init(), random.Random(seed)
    strategies = [*suite.strategies(), "auto"]
    for number in range(count):
        strategy, kept = strategies[number % len(strategies)], number % 3 != 0
        rows = [chance.choice((1, 4, 9)) for _ in range(group.size)]
        widths = [chance.choice((1, 5, 8)) for _ in range(chance.choice((1, 2, 3)))]
        k, turned = chance.choice((3, 8)), number % 2 == 0
        xs = [_drawn(one, k, seed + number + rank, torch.float64) for rank, one in enumerate(rows)]
        # Of all ranks, as each one's loss depends on the rows of all.
        every = [
            [_drawn(k, n, 31 * rank + at, torch.float64) for at, n in enumerate(widths)] for rank in range(group.size)
        ]
        x = xs[group.rank].clone().requires_grad_()
        ws = [(one.t().contiguous().t() if turned else one.clone()).requires_grad_() for one in every[group.rank]]
        bias = [torch.ones(n, dtype=torch.float64).requires_grad_() for n in widths]
        found: Any = ut.all_gather_matmul(
            x, ws, gathered=kept, rows=rows, bias=bias, activation="relu", group=group, strategy=strategy
        )  # fmt: skip
        results, whole = found if kept else (found, None)
        loss = sum((at + 1) * y.sum() for at, y in enumerate(results))
        if whole is not None:
            loss = loss + (3 * (group.rank + 1) * whole).sum()
        loss.backward()  # type: ignore[union-attr]

        leaves = [one.clone().requires_grad_() for one in xs]
        known = [[one.clone().requires_grad_() for one in mine] for mine in every]
        plain = [torch.ones(n, dtype=torch.float64).requires_grad_() for n in widths]
        gathered = torch.cat(leaves)
        total = gathered.new_zeros(())
        for rank, mine in enumerate(known):
            for at, w in enumerate(mine):
                its = plain[at] if rank == group.rank else torch.ones(w.shape[1], dtype=torch.float64)
                total = total + (at + 1) * torch.relu(gathered @ w + its).sum()
            if kept:
                total = total + (3 * (rank + 1) * gathered).sum()
        total.backward()
        for name, one, want in (
            ("x", x, leaves[group.rank]),
            *((f"w {at}", ws[at], known[group.rank][at]) for at in range(len(ws))),
            *((f"bias {at}", bias[at], plain[at]) for at in range(len(ws))),
        ):
            assert one.grad is not None
            assert want.grad is not None
            assert torch.equal(one.grad, want.grad), (strategy, name, rows, widths)
            assert one.grad.stride() == one.stride() or min(one.shape) == 1, (name, "lies the other way round")
    return count


def in_a_graph() -> list[bool]:
    """torch.compile, fullgraph: several weights, with and without the rows."""
    group = ut.init()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    ws = [torch.randn(6, n, dtype=torch.float64, requires_grad=True) for n in (3, 5)]
    same = []
    for kept in (False, True):

        def model(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, kept: bool = kept) -> torch.Tensor:
            found: Any = ut.all_gather_matmul(
                2 * x, [first, second], gathered=kept, group=group, strategy="chunked:dma"
            )
            (one, other), whole = found if kept else (found, None)
            return torch.relu(one).sum() + other.sum() + (0 if whole is None else (whole * whole).sum())

        torch._dynamo.reset()
        got = [
            torch.autograd.grad(function(x, *ws), (x, *ws))
            for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager"))
        ]
        same.append(all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*got, strict=True)))
    return same


def refused(gradients: bool) -> dict[str, str]:
    """The same sentences with gradients as without."""
    group = ut.init()
    x, w = torch.ones(3, 4), torch.ones(4, 5, requires_grad=gradients)
    narrow, same = torch.ones(4, 3), torch.empty(6, 5)
    attempts: dict[str, Callable[[], object]] = {
        "none": lambda: ut.all_gather_matmul(x, []),
        "bias": lambda: ut.all_gather_matmul(x, [w, w], bias=[torch.ones(5)]),
        "biases": lambda: ut.all_gather_matmul(x, [w, narrow], bias=[torch.ones(3), torch.ones(5)]),
        "activation": lambda: ut.all_gather_matmul(x, [w, w], activation=["relu", "tanh"]),
        "one bias": lambda: ut.all_gather_matmul(x, w, bias=[torch.ones(5)]),  # type: ignore[call-overload]
        "no activation": lambda: ut.all_gather_matmul(x, w, activation=None),  # type: ignore[call-overload]
        "shape": lambda: ut.all_gather_matmul(x, [w, torch.ones(3, 5)]),
        "dtype": lambda: ut.all_gather_matmul(x, [w, narrow.bfloat16()]),
        "outs": lambda: ut.all_gather_matmul(x, [w, w], out=[same, same]),
        "out": lambda: ut.all_gather_matmul(x, [w, w], out=[torch.ones(1, 1), torch.ones(1, 1)]),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = "nothing"
        except UndertowError as error:
            said[name] = f"{type(error).__name__}: {error}"
    ys = ut.all_gather_matmul(x, [w, w], group=group, strategy="serial:peer")
    said["usable"] = str(all(bool((y == 4).all()) for y in ys))
    return said


def changed_in_place() -> bool:
    """Results with gradients may be changed in place, one weight's and several ones'."""
    group = ut.init()
    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(4, 5, requires_grad=True)
    y, whole = ut.all_gather_matmul(x, w, gathered=True, group=group, strategy="serial:peer")
    first, second = ut.all_gather_matmul(x, [w, 2 * w], group=group, strategy="serial:peer")
    for one in (y, whole, first, second):
        one.mul_(2)
    (y.sum() + whole.sum() + first.sum() + second.sum()).backward()
    assert x.grad is not None
    return bool((x.grad == group.size * 2 * (5 + 1 + 5 + 10)).all())


def known_apart() -> int:
    """How many choices are made: of the product alone, with further ones, and again."""
    from undertow.ops.tuning import Known

    group = ut.init()
    x, w = torch.ones(16, 8), torch.ones(8, 300)
    for _ in range(2):
        ut.all_gather_matmul(x, w, group=group)
        ut.all_gather_matmul(x, [w], group=group)  # the same call
        ut.all_gather_matmul(x, [w, w, w], group=group)
        ut.all_gather_matmul(x, [w, w], group=group)
    return Known.of(group).made


def told_different_things() -> str:
    """One rank wants the rows as well: found at the deadline, by all."""
    group = ut.init()
    x, w = torch.ones(3, 4), torch.ones(4, 5)
    ut.all_gather_matmul(x, w, gathered=True, group=group, strategy="serial:peer")
    try:
        ut.all_gather_matmul(x, w, gathered=group.rank == 0, group=group, strategy="serial:peer")  # type: ignore[call-overload]
        ut.all_gather_matmul(x, w, group=group, strategy="chunked:peer")
        group.barrier()
    except UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def aborted() -> list[str]:
    """Whatever a call that fails half-way was given to write to is poisoned, all of it."""
    group = ut.init()
    x, w = torch.ones(3, 4), torch.ones(4, 5)
    out = [torch.ones(3 * group.size, 5) for _ in range(2)]
    real = gather.run

    def fails(*arguments: Any) -> None:
        raise KeyError("half-way")

    gather.run = fails  # type: ignore[assignment]
    try:
        ut.all_gather_matmul(x, [w, w], group=group, strategy="serial:peer", out=out)
    except KeyError:
        return ["poisoned" if bool(one.isnan().all()) else "left as it was" for one in out]
    finally:
        gather.run = real
    return ["nothing"]


def scattered_by_rows() -> bool:
    """The collective that the gradient of gathered rows needs: shards of any lengths."""
    group = ut.init()
    for rows in ([3, 0, 5], [1, 1, 1], [0, 0, 7]):
        counts: Sequence[int] = rows[: group.size]
        whole = torch.arange(float(sum(counts) * 2)).view(-1, 2)
        found = co.reduce_scatter(whole * (group.rank + 1), rows=counts, group=group)
        want = whole * sum(range(1, group.size + 1))
        assert torch.equal(found, torch.split(want, counts)[group.rank])
    return True
