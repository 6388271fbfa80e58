"""What runs inside ranks for the tests of c3: every result is compared exactly, on poisoned memory."""

from __future__ import annotations

import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import undertow as ut
from undertow import collective
from undertow.c3.characterise import Bench, Scenario
from undertow.c3.spans import spans_of
from undertow.c3.strategies import strategy
from undertow.c3.together import Concurrent, place_of, run
from undertow.collective import copies
from undertow.fabric import placement
from undertow.fabric.placement import Placement
from undertow.plan.plan import Share, split

NUMBERS = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)  # fmt: skip
OTHERS = (torch.bool, torch.complex64, torch.float8_e4m3fn)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers that every type holds, also their sum over eight ranks; of bool both values."""
    whole = (torch.arange(count) * 7 + 3 * rank).remainder(5)
    return (whole > 2) if dtype == torch.bool else whole.to(torch.float32).to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def blank(count: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(count, dtype=dtype)
    raw(made).fill_(0xA5)
    return made


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def expected(name: str, rank: int, size: int, count: int, dtype: torch.dtype, root: int) -> torch.Tensor | None:
    """The meaning of every collective, as a plain loop; what rank `rank` must have in the end."""
    if name == "all_to_all":
        return torch.cat([values(one, count * size, dtype)[rank * count :][:count] for one in range(size)])
    every = [values(one, count, dtype) for one in range(size)]
    if name in ("all_gather", "gather"):
        found = torch.cat(every)
        return found if name == "all_gather" or rank == root else None
    if name == "broadcast":
        return every[root]
    if name == "scatter":
        return values(root, count * size, dtype)[rank * count :][:count]
    total = _sum(every)
    if name == "reduce":
        return total if rank == root else None
    start, stop = split(count, size)[rank]
    return total if name == "all_reduce" else total[start:stop]


def call(name: str, group: ut.Group, count: int, dtype: torch.dtype, root: int) -> torch.Tensor | None:
    """The collective on fresh input and poisoned output."""
    rank, size = group.rank, group.size
    mine = values(rank, count, dtype)
    if name == "all_reduce":
        out = blank(count, dtype)
        return collective.all_reduce(mine, out=out, group=group)
    if name == "all_gather":
        return collective.all_gather(mine, out=blank(count * size, dtype), group=group)
    if name == "reduce_scatter":
        start, stop = split(count, size)[rank]
        return collective.reduce_scatter(mine, out=blank(stop - start, dtype), group=group)
    if name == "all_to_all":
        whole = values(rank, count * size, dtype)
        return collective.all_to_all(whole, out=blank(count * size, dtype), group=group)
    if name == "broadcast":
        given = mine.clone() if rank == root else blank(count, dtype)
        return collective.broadcast(given, root=root, group=group)
    if name == "reduce":
        return collective.reduce(mine, root=root, out=blank(count, dtype) if rank == root else None, group=group)
    if name == "gather":
        out = blank(count * size, dtype) if rank == root else None
        return collective.gather(mine, root=root, out=out, group=group)
    given = values(root, count * size, dtype) if rank == root else None
    return collective.scatter(given, out=blank(count, dtype), root=root, group=group)


def copied(lanes: tuple[str, ...], counts: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> int:
    """Every collective by copies; how many results were compared."""
    group = ut.init()
    compared = calls = 0
    for lane in lanes:
        for name in copies.COLLECTIVES:
            for dtype in dtypes:
                if dtype in OTHERS and name in ("all_reduce", "reduce_scatter", "reduce"):
                    continue
                for count in counts:
                    root, calls = calls % group.size, calls + 1
                    with placement.placed(Placement(lane)):
                        found = call(name, group, count, dtype, root)
                    wanted = expected(name, group.rank, group.size, count, dtype, root)
                    assert (found is None) == (wanted is None), (lane, name)
                    if found is not None and wanted is not None:
                        assert torch.equal(raw(found), raw(wanted)), (lane, name, dtype, count, root)
                        compared += 1
    in_place(group)
    return compared


def in_place(group: ut.Group) -> None:
    for op, wanted in (("sum", group.size * (group.size + 1) / 2), ("max", group.size), ("avg", (group.size + 1) / 2)):
        x = torch.full((70_001,), float(group.rank + 1))
        with placement.placed(Placement("dma")):
            collective.all_reduce(x, op=op, group=group)
        assert bool((x == wanted).all()), (op, x[:3])


def variants(counts: tuple[int, ...]) -> None:
    """Both ways to carry, and parcels that do not divide what they carry."""
    group = ut.init()
    for variant in (
        copies.Variant(math.inf, math.inf), copies.Variant(math.inf, math.inf, False), copies.Variant(math.inf, 4096),
        copies.Variant(math.inf, 1000, False),
    ):  # fmt: skip
        for name in ("all_gather", "all_reduce", "reduce_scatter"):
            made = copies.Copies(group.fabric, "dma", name, variant=variant)
            for count in counts:
                source = values(group.rank, count, torch.float32)
                spans = [count] * group.size if name == "all_gather" else [count]
                length = {"all_gather": count * group.size}.get(name, count)
                if name == "reduce_scatter":
                    spans = [stop - start for start, stop in split(count, group.size)]
                    length = spans[group.rank]
                out = blank(length, torch.float32)
                made.run(source, out, spans)
                wanted = expected(name, group.rank, group.size, count, torch.float32, 0)
                assert wanted is not None
                assert torch.equal(out, wanted), (variant.name, name, count)


def gigabyte() -> None:
    """1 GiB of bytes, gathered and summed by copies."""
    group = ut.init()
    count = (1 << 30) // group.size
    mine = torch.full((count,), group.rank + 1, dtype=torch.uint8)
    out = torch.zeros(1 << 30, dtype=torch.uint8)
    with placement.placed(Placement("dma")):
        collective.all_gather(mine, out=out)
        for rank, part in enumerate(out.view(group.size, count)):
            assert bool((part == rank + 1).all())
        out.fill_(3)
        collective.all_reduce(out)
    assert bool((out == 3 * group.size).all())


def compiled() -> None:
    """A block that torch has compiled, without this machine's compiler."""
    ut.init()
    block = torch.compile(lambda x: torch.relu(x @ x) + 1, backend="aot_eager")
    x, y = torch.ones(64, 64), torch.ones(5000)
    for share in ("base", "dma"):
        y.fill_(1.0)
        done = ut.concurrent(lambda: block(x), lambda: collective.all_reduce(y), share=share)
        assert bool((done.compute == 65).all())
        assert bool((y == 2).all())


def forms(threads: int) -> list[str]:
    """Both forms of `ut.concurrent` under every strategy that runs here."""
    torch.set_num_threads(threads)
    group = ut.init()
    size, total = group.size, group.size * (group.size + 1) / 2
    possible = place_of(group).possible
    for share in possible:
        x = torch.full((5000,), group.rank + 1.0)
        done = ut.concurrent(
            lambda: torch.ones(32, 32) @ torch.ones(32, 32),
            lambda: collective.all_reduce(x),  # noqa: B023
            share=share,
        )
        assert done.collective is x
        assert bool((x == total).all()), share
        assert bool((done.compute == 32).all())
        assert done.strategy.name == share
        out = torch.full((size * 3, 2), -1.0)
        shard = torch.full((3, 2), float(group.rank))
        with ut.concurrent(collective=lambda: collective.all_gather(shard, out=out), share=share) as beside:  # noqa: B023
            inside = torch.ones(4).sum()
            later = beside.post(lambda: collective.all_reduce(torch.full((9,), 1.0)))
        assert float(inside) == 4
        assert out[:, 0].tolist() == [float(one) for one in range(size) for _ in range(3)], share
        assert later.result.tolist() == [float(size)] * 9
    # A share of the caller's own, another lane, a program, several in a row.
    y = torch.full((100,), 1.0)
    program = collective.LIBRARY["ring"]
    ut.concurrent(lambda: None, lambda: collective.all_reduce(y, program=program), share=Share(), lane="dma")
    assert bool((y == size).all())
    ut.concurrent(lambda: None, lambda: [collective.all_reduce(y) for _ in range(3)], share="base", lane="net")
    assert bool((y == size**4).all())
    return possible


def raised(error: Callable[[], object]) -> str:
    try:
        error()
    except Exception as found:
        return f"{type(found).__name__}: {found}"
    return ""


def bad_input() -> dict[str, str]:
    group = ut.init()
    x = torch.ones(1000)

    def fails() -> None:
        raise KeyError("inside")

    def nothing() -> None:
        return None

    def reduced() -> object:
        return collective.all_reduce(x)

    found = {}
    only_one = group.rank == group.size - 1
    for share in ("serial", "base", "priority", "dma"):
        x.fill_(1.0)
        said = raised(lambda: ut.concurrent(fails if only_one else nothing, reduced, share=share))  # noqa: B023
        assert said == ("KeyError: 'inside'" if only_one else ""), said
        assert bool((x == group.size).all()), "the collective completes"
        assert not group.reserved
        collective.all_reduce(torch.ones(3))  # the group is usable

    def block() -> None:
        with ut.concurrent(collective=reduced, share="base"):
            fails()

    assert raised(block).startswith("KeyError")
    small = torch.ones(2)
    found["too many"] = raised(lambda: ut.concurrent(nothing, reduced, share=Share(multiprocessors=10_000)))
    found["none"] = raised(lambda: ut.concurrent(nothing, reduced, share=Share(multiprocessors=0)))
    found["no CTAs"] = raised(lambda: ut.concurrent(nothing, reduced, share=Share(communication_ctas=0)))
    found["name"] = raised(lambda: ut.concurrent(nothing, reduced, share="fast"))
    found["lane"] = raised(lambda: ut.concurrent(nothing, reduced, share="base", lane="road"))
    found["dma lane"] = raised(lambda: ut.concurrent(nothing, reduced, share="dma", lane="peer"))
    found["no callable"] = raised(lambda: ut.concurrent(3, reduced, share="base"))  # type: ignore[call-overload]
    found["no collective"] = raised(lambda: ut.concurrent(nothing, share="base"))  # type: ignore[call-overload]
    found["same group"] = raised(lambda: ut.concurrent(lambda: collective.all_reduce(small), reduced, share="base"))
    found["nested"] = raised(
        lambda: ut.concurrent(lambda: ut.concurrent(nothing, reduced, share="base"), reduced, share="base")
    )
    found["bad collective"] = raised(
        lambda: ut.concurrent(nothing, lambda: collective.all_reduce(x, op="median"), share="base")
    )
    found["early"] = raised(lambda: Concurrent(group, strategy("base", place_of(group))).post(reduced).result)
    found["still usable"] = str(float(collective.all_reduce(torch.ones(1))))
    return found


def freed_early() -> None:
    """The collective's tensors are dropped while it runs; nobody else may be given their memory."""
    group = ut.init()
    for share in ("base", "dma"):
        for turn in range(5):
            held = [torch.full((300_000,), float(group.rank + turn))]
            seen = weakref.ref(held[0])

            def churn() -> None:
                held.clear()  # noqa: B023
                assert seen() is not None, "kept until the end"  # noqa: B023
                for _ in range(20):
                    torch.full((300_000,), -7.0)

            done = ut.concurrent(churn, (lambda mine: lambda: collective.all_reduce(mine))(held[0]), share=share)
            wanted = sum(one + turn for one in range(group.size))
            assert bool((done.collective == wanted).all()), share
            del done
            gone = seen() is None
            assert gone, "and no longer"


def beside() -> tuple[float, float, float]:
    """A computation that only waits, beside a paced collective: whether they overlap. (compute, collective, both)"""
    group = ut.init()
    x = torch.ones(1 << 20)
    chosen = strategy("dma", place_of(group))
    over = threading.Event()

    def waits() -> None:
        over.wait(0.2)

    with placement.placed(Placement("dma")):
        collective.all_reduce(x)
        began = time.perf_counter()
        collective.all_reduce(x)
        alone = time.perf_counter() - began
    spans = spans_of(group.device)
    run(group, chosen, waits, lambda: collective.all_reduce(x), spans)
    ends = spans.ends()
    return 0.2, alone, ends.both


def learns() -> list[Any]:
    """share="auto": what ran at every call, on every rank the same."""
    group = ut.init()
    x = torch.ones(50_000)
    ran = []
    for _ in range(8):
        ut.concurrent(lambda: torch.ones(200, 200) @ torch.ones(200, 200), lambda: collective.all_reduce(x))
        said = ut.explain()
        assert said is not None
        ran.append(said.to_dict()["strategy"])
    x.fill_(1.0)
    with ut.concurrent(collective=lambda: collective.all_reduce(x)):
        pass
    assert bool((x == group.size).all())
    assert "concurrent(" in str(ut.explain())
    ut.concurrent(lambda: None, lambda: collective.all_reduce(x), name="another", lane="dma")
    last = ut.explain()
    assert last is not None
    return [*ran, last.to_dict()["strategy"], str(last)]


def several() -> tuple[dict[str, Any], list[str], list[str], tuple[int, str, float]]:
    """One launch for what needs none of its own."""
    variants((1, 2, 5000))
    freed_early()
    return measured(), refused_kinds(), kinds(), blocks()


def measured() -> dict[str, Any]:
    group = ut.init()
    bench = Bench(group, rounds=3, seconds=0.5)
    found = bench.measure(Scenario("gemm", "reduce_scatter", 1 << 16, "dma"), ("base", "dma", "partition"))
    return found.to_json()


def refused_kinds() -> list[str]:
    group = ut.init()
    return [
        raised(lambda: copies.Copies(group.fabric, "dma", "all_to_none")),
        raised(lambda: copies.Copies(group.fabric, "road", "all_gather")),
        raised(lambda: Bench(group).measure(Scenario("sleep", "all_gather", 1, "dma"), ("base",))),
        raised(lambda: Bench(group).measure(Scenario("gemm", "gather", 1, "dma"), ("base",))),
    ]


def kinds() -> list[str]:
    """What tells kinds apart: functions inside partials too; ranks that differ hear of it; failed times are redone."""
    group, said = ut.init(), []
    x = torch.ones(100)

    def one() -> None:
        return None

    def other() -> None:
        return None

    for work in (one, other):
        ut.concurrent(partial(work), partial(collective.all_reduce, x))
        said.append(str(ut.explain()))
    said.append(raised(lambda: ut.concurrent(torch.nn.ReLU(), lambda: collective.all_reduce(x))))
    mine = (lambda: None) if group.rank else one
    said.append(raised(lambda: ut.concurrent(mine, lambda: collective.all_reduce(x))))

    def fails() -> None:
        raise KeyError("inside")

    for turn in range(8):  # the call that counts fails on one rank: it is timed once more
        failing = turn == 1 and group.rank == 1
        work = fails if failing else one
        found = raised(lambda: ut.concurrent(work, lambda: collective.all_reduce(x), name="failing", lane="dma"))  # noqa: B023
        assert failing == found.startswith("KeyError"), found
        last = ut.explain()
        assert last is not None
        said.append(last.to_dict()["strategy"] if not failing else "failed")
    return said


def blocks() -> tuple[int, str, float]:
    """A block that is dropped warns, one that is used again is refused; one that posts nothing can be timed."""
    group = ut.init()
    x = torch.ones(10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ut.concurrent(collective=lambda: collective.all_reduce(x), share="base")
        dropped = len(caught)
        used = ut.concurrent(collective=lambda: collective.all_reduce(x), share="base")
        with used:
            pass
        again = raised(used.__enter__)
        del used
        assert len(caught) == dropped
    assert bool((x == group.size).all())
    spans = spans_of(group.device)
    spans.communicated = partial(setattr, spans, "_collective", math.nan)  # type: ignore[method-assign]
    with Concurrent(group, strategy("serial", place_of(group)), spans):
        pass
    return dropped, again, float(math.isnan(spans._collective))
