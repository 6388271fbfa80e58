"""Exactness of matmuls whose rows change ranks, one weight or one for each expert, run in ranks of a virtual node.

`operator_checks` runs them; `plain` runs the fused kernels as GPUs without TMA do, in a launch of its own.
"""

from __future__ import annotations

import random
import time

import grouped_targets as targets
import matmul_suite
import torch
from grouped_targets import Case

import undertow as ut
from undertow.errors import StrategyUnavailable

STRATEGIES = {
    "leaving": ("serial:peer", "chunked:peer", "chunked:dma", "signaled:peer", "signaled:dma", "fused:peer"),
    "arriving": ("serial:peer", "chunked:peer", "chunked:dma", "fused:peer"),
}
# experts, rows of a block at most, N, K: whole tiles, tails in every dimension, odd columns, few rows, one expert
SHAPES = ((2, 256, 512, 128), (4, 300, 264, 72), (3, 130, 130, 40), (5, 17, 33, 64), (1, 515, 256, 264))
HALVES = (torch.bfloat16, torch.float16)
SEEDS = (30, 77, 41)  # with bias and relu; without, weights the other way round; again without, other blocks empty


def tokens_are_exact(group: ut.Group) -> None:
    """Both operators, all strategies and shapes; fused calls thrice, so that each turn is used again."""
    for operator, strategies in STRATEGIES.items():
        for strategy in strategies:
            for which, (experts, rows, n, k) in enumerate(SHAPES):
                for seed in SEEDS:
                    case = Case(operator, strategy, HALVES[which % 2], experts, rows, n, k, seed + 210 * which)
                    try:
                        for _ in range(3 if strategy == "fused:peer" else 1):
                            targets.verify(group, case)
                        group.check()
                    except Exception as error:
                        raise AssertionError(f"{case}: {error}") from error


def tokens_are_refused_by_a_sentence(group: ut.Group) -> None:
    """What has no form: signaled rows that arrive, rows of K that no kernel brings, other dtypes."""
    said = []
    for operator, strategy, k, dtype in (
        ("arriving", "signaled:peer", 16, torch.bfloat16),
        ("arriving", "fused:peer", 12, torch.bfloat16),
        ("leaving", "fused:peer", 16, torch.float32),
    ):
        try:
            targets.verify(group, Case(operator, strategy, dtype, 2, 8, 16, k, 77))
            said.append("not refused")
        except StrategyUnavailable as error:
            said.append(str(error))
    for part, one in zip(("no signaled form", "not a multiple of 8", "not float32"), said, strict=True):
        assert part in one, said
        assert "possible here" in one, said


def tokens_that_all_go_one_way(group: ut.Group) -> None:
    """Forty calls under way at once, where a rank may have nothing to wait for: nobody may overtake a slow receiver."""
    size, rank, device = group.size, group.rank, group.device
    n, k, experts, rows = 256, 64, 2, 96
    ways = {
        "round": [[[rows, rows // 2] if to == (sender + 1) % size else [0, 0] for to in range(size)]
                  for sender in range(size)],
        "to the first": [[[rows, 1] if to == 0 else [0, 0] for to in range(size)] for _ in range(size)],
        "from the last": [[[1, rows] if sender == size - 1 else [0, 0] for _ in range(size)] for sender in range(size)],
    }  # fmt: skip
    for name, sizes in ways.items():
        for operator, call in (("leaving", ut.matmul_all_to_all), ("arriving", ut.all_to_all_matmul)):
            case = Case(operator, "fused:peer", torch.bfloat16, experts, rows, n, k, 77)
            xs, ws, _ = targets.tensors(case, sizes, device)
            want = targets.expected(case, sizes, xs, ws)[rank]
            scaled = [xs[rank] * (turn % 5 + 1) for turn in range(40)]
            torch.cuda.synchronize()
            group.barrier()
            if rank == 0:
                torch.cuda._sleep(20_000_000)  # its device begins late
            found = [call(x, ws[rank], group_sizes=sizes, group=group, strategy="fused:peer") for x in scaled]
            for turn, y in enumerate(found):
                wrong = int((y != want * (turn % 5 + 1)).sum())
                assert wrong == 0, f"{operator} {name}, turn {turn}: {wrong} of {want.numel()} elements are wrong"
            group.check()


def tokens_of_all_kinds_in_a_row(group: ut.Group) -> None:
    """400 calls, operators, sizes and numbers of experts at random; other fused operators between.

    A shape keeps its dtype, so that most kernels were compiled by `tokens_are_exact`.
    """
    chance = random.Random(516)
    for number in range(400):
        if number % 9 == 0:
            suite = matmul_suite.Case("matmul_all_reduce", "fused:peer", torch.bfloat16, (300, 272, 200), 77)
            matmul_suite.verify(group, suite)
        which = chance.randrange(len(SHAPES))
        experts, rows, n, k = SHAPES[which]
        case = Case(
            chance.choice(("leaving", "arriving")), "fused:peer", HALVES[which % 2], experts,
            chance.choice((1, rows // 2, rows)), n, k, 77 + 6 * chance.randrange(5),
        )  # fmt: skip
        targets.verify(group, case)
    group.check()


def gradients_of_tokens_are_exact(group: ut.Group) -> None:
    for operator, strategies in STRATEGIES.items():
        for strategy in strategies:
            for seed in SEEDS:
                case = Case(operator, strategy, torch.bfloat16, 3, 9, 16, 8, seed)
                try:
                    targets.verify_gradient(group, case)
                except Exception as error:
                    raise AssertionError(f"gradient of {case}: {error}") from error


def captured_tokens_replay(group: ut.Group) -> None:
    """1000 replays with new inputs, a rank's host or device delayed now and then."""
    from gpu_checks import _replay

    for operator, call in (("leaving", ut.matmul_all_to_all), ("arriving", ut.all_to_all_matmul)):
        case = Case(operator, "fused:peer", torch.bfloat16, 3, 140, 264, 72, 77)
        sizes = targets.sizes_of(case, group.size)
        xs, ws, _ = targets.tensors(case, sizes, group.device)
        want = targets.expected(case, sizes, xs, ws)[group.rank]
        x, w, y = xs[group.rank].clone(), ws[group.rank], torch.empty_like(want)

        def once(call=call, x=x, w=w, y=y, sizes=sizes) -> None:  # type: ignore[no-untyped-def]
            call(x, w, group_sizes=sizes, group=group, strategy="fused:peer", out=y)

        _replay(group, f"fused tokens {operator}", x, y, once, want)


CHECKS = (
    tokens_are_exact, tokens_are_refused_by_a_sentence, tokens_that_all_go_one_way, tokens_of_all_kinds_in_a_row,
    gradients_of_tokens_are_exact, captured_tokens_replay,
)  # fmt: skip


def plain() -> list[str]:
    """All fused operators as on a GPU without TMA: plain tiles, ordinary loads and stores. In a process of its own.

    Bias, and which way weights lie, change from shape to shape: every one more would be a kernel more to compile.
    """
    import triton.language as tl

    from undertow.kernels import (
        fused_columns,
        fused_exchange,
        fused_gather,
        fused_scatter,
        signals,
        turns,
    )

    @tl.core.builtin
    def no_bulk_copies(_semantic=None):  # type: ignore[no-untyped-def]
        return tl.constexpr(False)

    for module in (signals, turns, fused_columns, fused_exchange, fused_gather, fused_scatter):
        module.has_bulk_copies = no_bulk_copies  # type: ignore[attr-defined]
    group = ut.init()
    group.fabric.bulk_copies = False
    report = []
    for operator in matmul_suite.OPERATORS:
        began = time.perf_counter()
        for which, shape in enumerate(
            ((512, 512, 128), (1160, 264, 72), (300, 272, 200), (16, 512, 256), (4, 512, 256))
        ):
            if operator != "matmul_all_reduce" and shape[0] < 64:
                continue
            case = matmul_suite.Case(operator, "fused:peer", torch.bfloat16, shape, SEEDS[which % 2])
            for _ in range(3):
                matmul_suite.verify(group, case)
        report.append(f"plain {operator} {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    for operator in targets.STRATEGIES:
        for which, (experts, rows, n, k) in enumerate(SHAPES):
            case = Case(operator, "fused:peer", torch.bfloat16, experts, rows, n, k, SEEDS[which % len(SEEDS)])
            for _ in range(3):
                targets.verify(group, case)
    group.check()
    return [*report, f"plain tokens {time.perf_counter() - began:.1f} s"]
