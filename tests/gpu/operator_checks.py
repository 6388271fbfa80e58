"""Exactness of the matmul operators on a GPU, and their captured calls, run inside the ranks of a virtual node."""

from __future__ import annotations

import faulthandler
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace

import chain_checks
import few_row_checks
import gradient_checks
import matmul_suite
import posted_checks
import staged_checks
import token_checks
import torch
from matmul_suite import Case

import undertow as ut
from undertow.errors import StrategyUnavailable
from undertow.ops.matmul_all_reduce import reference
from undertow.plan import brought, fused
from undertow.plan.defaults import fused_plan, gather_forms
from undertow.plan.plan import Plan, Share
from undertow.plan.problem import Problem

CHECK_SECONDS = 240
CHECKS: dict[str, Callable[[ut.Group], None]] = {}
# Whole tiles, tails in every dimension, fewer rows than ranks; sizes that TMA cannot read go to the plain kernel.
SHAPES = ((512, 512, 128), (1160, 264, 72), (515, 130, 33), (3, 16, 8))
DTYPES = (torch.bfloat16, torch.float32)
NOT_FUSED = (
    "float16 and bfloat16, not float32",
    "not a multiple of 8",
    "a rank has no rows",
)
POSTED = ("fused:net", "fused:dma")
SEEDS = (30, 77)  # with bias, relu and uneven parts; without, weights the other way round: few kernels to compile


def check(function: Callable[[ut.Group], None]) -> Callable[[ut.Group], None]:
    CHECKS[function.__name__] = function
    return function


def run(names: list[str]) -> list[str]:
    """The named checks in order; the time each took, for people."""
    group = ut.init()
    report = []
    for name in names:
        settle(group)
        began = time.perf_counter()
        faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
        CHECKS[name](group)
        settle(group)
        faulthandler.cancel_dump_traceback_later()
        report.append(f"{name} {time.perf_counter() - began:.1f} s")
        if group.rank == 0:
            print(report[-1], flush=True)
    return report


def settle(group: ut.Group) -> None:
    torch.cuda.synchronize()
    group.barrier()
    group.check()


@check
def operators_are_exact(group: ut.Group) -> None:
    """All operators, grains, lanes and shapes; dtypes in turn. What no fused kernel does must be refused."""
    for operator in matmul_suite.OPERATORS:
        fused = 0
        for number, strategy in enumerate(matmul_suite.strategies()):
            if strategy == "chunked:net" or strategy in POSTED:
                continue  # as serial:net, through the host; `posted_checks.py`
            for which, shape in enumerate(SHAPES):
                dtype = DTYPES[0] if which < 2 else DTYPES[(number + which) % len(DTYPES)]
                case = Case(operator, strategy, dtype, shape, SEEDS[(number + which) % len(SEEDS)])
                try:
                    matmul_suite.verify(group, case)
                    torch.cuda.synchronize()
                    group.check()
                    fused += strategy.startswith("fused")
                except StrategyUnavailable as error:
                    if strategy != "fused:peer" or not any(one in str(error) for one in NOT_FUSED):
                        raise AssertionError(f"{case}: {error}") from error
                except Exception as error:
                    raise AssertionError(f"{case}: {error}") from error
        assert fused >= 2, f"{operator}: {fused} fused cases ran"
        if group.rank == 0:
            print(f"  {operator} {time.perf_counter():.1f}", flush=True)


@check
def what_follows_is_right(group: ut.Group) -> None:
    """Residual add, RMSNorm and LayerNorm fused with unpacking, packed and natural, against the reference."""
    import norm_targets

    packed_too = ((64, 512, 128), (1160, 264, 72), (130, 520, 40))  # few bands are packed
    for operator in norm_targets.CALLS:
        for number, kind in enumerate(norm_targets.KINDS):
            for which, shape in enumerate(packed_too):
                strategy = ("signaled:peer", "signaled:dma", "chunked:peer")[(number + which) % 3]
                case = Case(operator, strategy, DTYPES[(number + which) % 2], shape, SEEDS[which % 2])
                norm_targets.verify(group, case, kind, False)
                torch.cuda.synchronize()
                group.check()


@check
def programs_are_exact(group: ut.Group) -> None:
    """Library programs and a user's own as the communication, over `peer` (one kernel) and `dma` (the host walks)."""
    import program_targets

    for operator, programs in program_targets.PROGRAMS.items():
        for number, program in enumerate(programs):
            for lane in ("peer", "dma"):
                for which, shape in enumerate(SHAPES):
                    seed = SEEDS[(number + which) % len(SEEDS)]
                    case = Case(operator, f"signaled:{lane}", DTYPES[which // 2], shape, seed)
                    try:
                        for _ in range(2):  # the second one on semaphores and counters that were used
                            program_targets.verify(group, case, program)
                        torch.cuda.synchronize()
                        group.check()
                    except Exception as error:
                        raise AssertionError(f"{case} by {program.name}: {error}") from error


@check
def program_moves_before_the_matmul_ends(group: ut.Group) -> None:
    """A chunk is in place on this rank while the matmul still computes: its last parcel is not counted yet."""
    import program_targets

    from undertow.fabric.timeline import Recorder, recording

    rows, inner = 4096, 32768  # milliseconds: a chunk of an eighth needs a fraction of one
    x = torch.ones(rows, inner, dtype=torch.bfloat16, device=group.device)
    w = torch.ones(inner, 4096, dtype=torch.bfloat16, device=group.device)
    for program in program_targets.PROGRAMS["matmul_all_reduce"]:
        for turn in range(2):
            recorder = Recorder(group.rank, "cuda")
            settle(group)
            if turn:  # the GPU is busy for 10 ms, so that the host walks the program before the matmul begins
                torch.cuda._sleep(25_000_000)
            with recording(recorder):
                ut.matmul_all_reduce(x, w, group=group, program=program, strategy="signaled:dma")
                torch.cuda.synchronize()
            if turn == 0:
                continue  # kernels were compiled, tables uploaded
            events = recorder.timeline().events
            matmul = next(one for one in events if one.name == "matmul")
            copies = [one for one in events if one.name.startswith("copy")]
            early = sum(one.end_ns < matmul.end_ns for one in copies)
            first = min((one.end_ns for one in copies), default=0) - matmul.start_ns
            assert early > 0, (
                f"{program.name}: none of {len(copies)} copies was over before the matmul's end: the first after "
                f"{first / 1e6:.2f} ms, the matmul after {(matmul.end_ns - matmul.start_ns) / 1e6:.2f} ms"
            )


@check
def captured_programs_replay(group: ut.Group) -> None:
    """1000 replays with new inputs, a rank's host or device delayed now and then; over `dma` with sums that are shared
    (`mine`) and with messages to one rank only."""
    import program_targets
    from gpu_checks import _replay

    library = ut.collective.LIBRARY
    for lane, program in (
        ("peer", program_targets.mine), ("dma", program_targets.mine), ("dma", library["halving_doubling"]),
    ):  # fmt: skip
        case = Case("matmul_all_reduce", f"signaled:{lane}", torch.bfloat16, (512, 512, 128), SEEDS[1])
        xs, ws = matmul_suite._factors(group, case)
        want = reference(matmul_suite._wide(xs), matmul_suite._wide(ws)).to(torch.bfloat16)
        x, w = xs[group.rank].clone(), ws[group.rank]
        y = torch.empty(512, 512, dtype=torch.bfloat16, device=group.device)

        def call(
            x: torch.Tensor = x, w: torch.Tensor = w, y: torch.Tensor = y, lane: str = lane,
            program: ut.collective.Program = program,
        ) -> None:  # fmt: skip
            ut.matmul_all_reduce(x, w, group=group, program=program, strategy=f"signaled:{lane}", out=y)

        _replay(group, f"{program.name} over {lane}", x, y, call, want)


@check
def programs_of_long_chunks_are_exact(group: ut.Group) -> None:
    """Chunks longer than the lane's messages: several iterations, whose streams begin and end with them."""
    rows, columns, inner = 6144 * group.size, 8192, 64  # 12 MiB a chunk with eight parcels
    x = torch.ones(rows, inner, dtype=torch.bfloat16, device=group.device)
    x[::3] = -1
    w = torch.ones(inner, columns, dtype=torch.bfloat16, device=group.device)
    w[:, ::5] = 0
    want = (x.float() @ w.float() * group.size).to(torch.bfloat16)
    programs = {"matmul_all_reduce": ("two_shot", "ring"), "matmul_reduce_scatter": ("reduce_scatter_direct",)}
    for operator, names in programs.items():
        mine = want if operator == "matmul_all_reduce" else torch.tensor_split(want, group.size)[group.rank]
        for name in names:
            out = torch.full_like(mine, float("nan"))
            for _ in range(2):
                getattr(ut, operator)(
                    x, w, group=group, program=ut.collective.LIBRARY[name], strategy="signaled:dma", out=out
                )
            settle(group)
            assert torch.equal(out, mine), f"{operator} by {name}"


@check
def captured_signaled_calls_replay(group: ut.Group) -> None:
    """1000 replays with new inputs, a rank's host or device delayed now and then."""
    from gpu_checks import _replay

    for strategy in ("signaled:dma", "signaled:peer"):
        case = Case("matmul_all_reduce", strategy, torch.bfloat16, (512, 512, 128), SEEDS[1])
        xs, ws = matmul_suite._factors(group, case)
        want = reference(matmul_suite._wide(xs), matmul_suite._wide(ws)).to(torch.bfloat16)
        x, w = xs[group.rank].clone(), ws[group.rank]
        y = torch.empty(512, 512, dtype=torch.bfloat16, device=group.device)

        def call(x: torch.Tensor = x, w: torch.Tensor = w, y: torch.Tensor = y, strategy: str = strategy) -> None:
            ut.matmul_all_reduce(x, w, group=group, strategy=strategy, out=y)

        _replay(group, strategy, x, y, call, want)


FUSED_SHAPES = ((512, 512, 128), (1160, 264, 72), (300, 272, 200), (16, 512, 256), (5, 1040, 64), (64, 256, 128))


@check
def fused_calls_of_all_kinds_in_a_row(group: ut.Group) -> None:
    """2,000 fused calls, sizes and operators at random, a hundred under way before the host looks; others between.

    A shape keeps its dtype, bias and the way its weights lie: about twenty kernels to compile, not sixty.
    """
    chance = random.Random(4070)
    made = []
    for number in range(64):
        which, operator = number % len(FUSED_SHAPES), chance.choice(list(matmul_suite.OPERATORS))
        strategy = "signaled:peer" if number % 16 == 0 else "fused:peer"
        if operator != "matmul_all_reduce" and FUSED_SHAPES[which][0] < 64:
            which = number % 3  # every rank has rows
        dtype = torch.float16 if which % 3 == 0 else torch.bfloat16
        seed = SEEDS[which % 2] + 210 * (number % 9)
        case = Case(operator, strategy, dtype, FUSED_SHAPES[which], seed)
        matmul_suite.verify(group, case)
        made.append((str(case), *matmul_suite.prepared(group, case)))
    made += [
        chain_checks.chained(group, shape, seed) for seed, shape in enumerate(((512, 520, 64), (1040, 776, 264)) * 4)
    ]
    wrong = torch.zeros(len(made), dtype=torch.int64, device=group.device)
    for number in range(2000):
        which = chance.randrange(len(made))
        _, call, want = made[which]
        got = call(torch.full_like(want, float("nan")))
        wrong[which] += (got != want).sum()
        if number % 100 == 99:
            settle(group)
            found = {name: count for (name, *_), count in zip(made, wrong.tolist(), strict=True) if count}
            assert not found, f"rank {group.rank}, after {number + 1} calls, elements that are wrong: {found}"


def gathering(
    group: ut.Group, rows: list[int], inner: int, columns: int
) -> tuple[list[torch.Tensor], torch.Tensor, Problem, torch.Tensor]:
    """Rows of all ranks, the weights here, the problem, and what all_gather_matmul must give here."""
    case = Case("all_gather_matmul", "fused:peer", torch.bfloat16, (0, 0, 0), SEEDS[0])
    mine = [matmul_suite.integers(count, inner, 5 + rank, case, group.device) for rank, count in enumerate(rows)]
    w = matmul_suite.integers(inner, columns, 50 + group.rank, case, group.device)
    problem = Problem.of(
        "all_gather_matmul", sum(rows), columns, inner, dtype="bfloat16", ranks=group.size, device="cuda",
        multiprocessors=group.fabric.multiprocessors, shards=rows, bulk=group.fabric.bulk_copies,
        together=group.fabric.together,
    )  # fmt: skip
    return mine, w, problem, (torch.cat(mine).double() @ w.double()).to(torch.bfloat16)


def gather_in_a_row(group: ut.Group, rows: list[int], inner: int, columns: int, plans: list[Plan]) -> None:
    """Calls in a row with a rank late, each with other numbers: rows that are read before they are there are those of
    two calls ago."""
    mine, w, problem, want = gathering(group, rows, inner, columns)
    for plan in plans:
        plan.check(problem)
        results = []
        for turn in range(12):
            if group.rank == turn % group.size:
                torch.cuda._sleep(3_000_000)
            x = mine[group.rank] * (turn + 1)
            results.append(ut.all_gather_matmul(x, w, rows=rows, group=group, plan=plan))
        for turn, y in enumerate(results):
            assert torch.equal(y, want * (turn + 1)), (inner, plan, turn)


@check
def rows_are_brought_while_own_tiles_are_multiplied(group: ut.Group) -> None:
    """Pulled and pushed, by one CTA and by several; K of one step and of many."""
    rows = [700 + 130 * rank for rank in range(group.size)]
    for inner, columns in ((64, 520), (1032, 776), (136, 2048)):
        problem = gathering(group, rows, inner, columns)[2]
        plans = []
        for pull, bringing in ((True, 1), (True, 4), (False, 1), (False, 3)):
            beside = gather_forms(replace(problem, together=pull), "peer")["beside"]
            plans.append(replace(beside, share=replace(beside.share, communication_ctas=bringing)))
        gather_in_a_row(group, rows, inner, columns, plans)


@check
def few_rows_are_brought_by_all_at_once(group: ut.Group) -> None:
    """In tiles of both widths and with K of the last ones cut, all of them or some; K of one step and of many; in step
    and not. A rank with odd columns has the other kernel, and compiles it when the others have theirs."""
    rows = [70 + 90 * rank for rank in range(group.size)]
    for inner, columns in ((1032, 232), (64, 2248)):
        problem = gathering(group, rows, inner, columns)[2]
        active = max(1, group.fabric.multiprocessors - 1)
        usual = replace(fused_plan(problem, "peer"), order="rotated", share=Share(active, active))
        plans = [replace(usual, tile=tile, piece=256) for tile in (fused.GPU_TILES[0], fused.NARROW_TILE)]
        parts = brought.split_of(problem.grid(plans[0]).tiles, active)
        assert parts > 0 or group.size > 4
        plans.append(replace(plans[0], split=parts, in_step=not plans[0].in_step))
        assert all(fused.at_once(plan) for plan in plans)
        gather_in_a_row(group, rows, inner, columns, plans)
        gather_in_a_row(group, rows, inner, columns - 3 * (group.rank == 1), plans)


@check
def rows_are_pushed_or_pulled(group: ut.Group) -> None:
    """Rows that are pushed and pulled, before tiles are multiplied and beside them; gathered ones kept for the
    gradient."""
    for many in (False, True):
        rows = (
            [300 + 7 * rank for rank in range(group.size)] if many else [200 + 7 * rank for rank in range(group.size)]
        )
        mine, w, problem, want = gathering(group, rows, 264, 520)
        for turn in range(6):
            plan = fused_plan(replace(problem, together=turn % 2 == 0), "peer")
            assert plan.pull == (turn % 2 == 0)
            assert fused.brought(problem, plan) == (plan.pull and problem.bulk)
            x, weight = mine[group.rank].clone().requires_grad_(turn > 3), w.clone().requires_grad_(turn > 3)
            y = ut.all_gather_matmul(x, weight, rows=rows, group=group, plan=plan)
            assert torch.equal(y, want), (turn, plan)
            if turn > 3:
                y.backward(torch.ones_like(y))
                total = torch.cat(mine).double().sum(0)[:, None]
                assert weight.grad is not None
                assert torch.equal(weight.grad, total.expand_as(w).to(torch.bfloat16))


@check
def captured_fused_calls_replay(group: ut.Group) -> None:
    """1000 replays with new inputs, a rank's host or device delayed now and then: sums by owners, and of few rows."""
    from gpu_checks import _replay

    for shape in ((512, 512, 128), (16, 512, 128)):
        case = Case("matmul_all_reduce", "fused:peer", torch.bfloat16, shape, SEEDS[1])
        xs, ws = matmul_suite._factors(group, case)
        x, w = xs[group.rank].clone(), ws[group.rank]
        whole = reference(matmul_suite._wide(xs), matmul_suite._wide(ws)).to(torch.bfloat16)
        y = torch.empty_like(whole)

        def call(x: torch.Tensor = x, w: torch.Tensor = w, y: torch.Tensor = y) -> None:
            ut.matmul_all_reduce(x, w, group=group, strategy="fused:peer", out=y)

        _replay(group, f"fused {shape}", x, y, call, whole)
        if shape[0] < 512:
            continue
        part = torch.tensor_split(whole, group.size)[group.rank].contiguous()
        shard = torch.empty_like(part)
        x = xs[group.rank].clone()  # the replays left others

        def scattered(x: torch.Tensor = x, w: torch.Tensor = w, y: torch.Tensor = shard) -> None:
            ut.matmul_reduce_scatter(x, w, group=group, strategy="fused:peer", out=y)

        _replay(group, "fused reduce_scatter", x, shard, scattered, part)
        inner = 64
        mine = [matmul_suite.integers(128, inner, 5 + rank, case, group.device) for rank in range(group.size)]
        weight = ws[group.rank][:inner].contiguous()
        gathered = (torch.cat(mine).double() @ weight.double()).to(torch.bfloat16)
        rows, out = mine[group.rank].clone(), torch.empty_like(gathered)

        def gather(x: torch.Tensor = rows, w: torch.Tensor = weight, y: torch.Tensor = out) -> None:
            ut.all_gather_matmul(x, w, group=group, strategy="fused:peer", out=y)

        _replay(group, "fused all_gather", rows, out, gather, gathered)


@check
def late_products_are_waited_for(group: ut.Group) -> None:
    """A rank whose own product takes long must not sum before it is there, though all others' pieces are."""
    m, n, long = 1024, 2048, 16384
    for turn in range(2 * group.size):
        late = turn % group.size
        inner = long if group.rank == late else 64
        x = torch.zeros(m, inner, dtype=torch.bfloat16, device=group.device)
        x[:, 0] = turn + 1
        w = torch.ones(inner, n, dtype=torch.bfloat16, device=group.device)
        want = float((turn + 1) * group.size)
        for strategy in ("chunked:peer", "chunked:dma", "signaled:peer", "signaled:dma", "fused:peer"):
            y = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=group.device)
            ut.matmul_all_reduce(x, w, group=group, strategy=strategy, out=y)
            part = ut.matmul_reduce_scatter(x, w, group=group, strategy=strategy)
            wrong = int((y != want).sum()), int((part != want).sum())
            assert wrong == (0, 0), f"{strategy}, turn {turn}: {wrong} elements of all_reduce and reduce_scatter"


@check
def matmuls_in_clusters_find_room(group: ut.Group) -> None:
    """Ranks wait in kernels of all kinds for one that is late, whose next matmul is launched in clusters of several
    SMs (cuBLAS: 4 x 2 of them for few columns and a long K): on a shared GPU it must find them.
    """
    rows, width, narrow = 512, 4096, 256
    w = torch.ones(width // 4, width, dtype=torch.bfloat16, device=group.device)
    wide = torch.ones(rows, width, dtype=torch.bfloat16, device=group.device)
    few = torch.ones(narrow, width, dtype=torch.bfloat16, device=group.device)
    uneven = [rows - 40 * (group.size - 1), *[40] * (group.size - 1)]
    x = torch.zeros(rows, width // 4, dtype=torch.bfloat16, device=group.device)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "collective": lambda: ut.collective.all_reduce(torch.mm(x, w), group=group),
        "sums": lambda: ut.matmul_all_reduce(x, w, group=group, strategy="fused:peer"),
        "own sums": lambda: ut.matmul_reduce_scatter(x, w, group=group, strategy="fused:peer"),
        "few rows": lambda: ut.matmul_all_reduce(x[:4], w, group=group, strategy="fused:peer"),
        "serial sums": lambda: ut.matmul_all_reduce(x, w, group=group, strategy="serial:peer"),
        "serial own sums": lambda: ut.matmul_reduce_scatter(x, w, rows=uneven, group=group, strategy="serial:peer"),
        "rows": lambda: ut.all_gather_matmul(x, w, group=group, strategy="fused:peer"),
        "serial rows": lambda: ut.all_gather_matmul(x, w, group=group, strategy="serial:peer"),
        "rows of a lane": lambda: ut.all_gather_matmul(x, w, group=group, strategy="signaled:peer"),
    }
    every = sum(range(1, group.size + 1))
    for turn in range(40):
        x[:, 0] = (turn % 3 + 1) * (group.rank + 1)  # sums are exact in bf16, and other ranks' and calls' are others
        if turn % group.size == group.rank:
            torch.cuda._sleep(500_000)
        found = {}
        for name, call in calls.items():
            torch.nn.functional.linear(wide, few)
            found[name] = call()
        for name, y in found.items():
            want = torch.full_like(y, (turn % 3 + 1) * every)
            if "rows" in name and name != "few rows":
                for rank, part in enumerate(want.view(group.size, -1)):
                    part.fill_((turn % 3 + 1) * (rank + 1))
            assert torch.equal(y, want), (turn, name)


@check
def calls_of_several_kinds_on_two_streams(group: ut.Group) -> None:
    """Half the ranks' GPUs come to one of two calls first, half to the other; each may hold all SMs until all come."""
    rows, width = 256, 1024
    x = torch.zeros(rows, width // 4, dtype=torch.bfloat16, device=group.device)
    w = torch.ones(width // 4, width, dtype=torch.bfloat16, device=group.device)
    x[:, 0] = group.rank + 1
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "sums": lambda: ut.matmul_all_reduce(x, w, group=group, strategy="fused:peer"),
        "own sums": lambda: ut.matmul_reduce_scatter(x, w, group=group, strategy="fused:peer"),
        "few sums": lambda: ut.matmul_all_reduce(x[:4], w, group=group, strategy="fused:peer"),
        "serial sums": lambda: ut.matmul_all_reduce(x, w, group=group, strategy="serial:peer"),
        "rows": lambda: ut.all_gather_matmul(x, w, group=group, strategy="fused:peer"),
        "rows of a lane": lambda: ut.all_gather_matmul(x, w, group=group, strategy="signaled:peer"),
    }
    want = {name: call() for name, call in calls.items()}
    for name, y in want.items():
        parts = y.float().view(group.size if "rows" in name else 1, -1)
        sums = range(1, group.size + 1) if "rows" in name else [sum(range(1, group.size + 1))]
        assert parts.unique(dim=1).view(-1).tolist() == list(sums), name
    streams = [torch.cuda.Stream(group.device) for _ in range(2)]
    for number, (first, second) in enumerate(itertools.permutations(calls, 2)):
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[(group.rank + number) % 2]):
            torch.cuda._sleep(2_000_000)
        found = []
        for name, stream in zip((first, second), streams, strict=True):
            with torch.cuda.stream(stream):
                found.append((name, calls[name]()))
        torch.cuda.synchronize()
        group.check()
        for name, y in found:
            assert torch.equal(y, want[name]), (first, second, name)


for _module in (chain_checks, few_row_checks, gradient_checks, token_checks, staged_checks, posted_checks):
    for _one in _module.CHECKS:
        check(_one)
