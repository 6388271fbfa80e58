"""Matmuls over the host-staged lane: parcels of all sizes, messages longer than the ring, and what profile measures.

`operator_checks` runs them. Inputs are -1, 0 and 1 with an inner size of 32: sums stay far below 256, exact in bf16.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import torch

import undertow as ut
from undertow.plan.defaults import default_plan
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem

INNER = 32
OPERATORS = ("matmul_all_reduce", "matmul_reduce_scatter", "matmul_all_to_all")
# The largest: 134 MB, of one parcel more chunks than the ring has, for two ranks as for four.
SHAPES = ((8192, 8192), (1536, 1024), (1160, 264), (515, 130), (7, 24))


class Factors:
    """x [m, 32] and w [32, n] of all ranks, and what each operator gives this one."""

    def __init__(self, group: ut.Group, m: int, n: int) -> None:
        generator = torch.Generator(device=group.device).manual_seed(m + n)

        def drawn(rows: int, columns: int) -> torch.Tensor:
            made = torch.randint(-1, 2, (rows, columns), generator=generator, device=group.device)
            return made.to(torch.bfloat16)

        ranks, rank = group.size, group.rank
        xs, ws = [drawn(m, INNER) for _ in range(ranks)], [drawn(INNER, n) for _ in range(ranks)]
        self.x, self.w = xs[rank], ws[rank]
        total = torch.zeros(m, n, device=group.device)
        arriving = []
        for x, w in zip(xs, ws, strict=True):
            product = x.float() @ w.float()
            total += product
            arriving.append(torch.tensor_split(product, ranks)[rank].to(torch.bfloat16))
        whole = total.to(torch.bfloat16)
        self.want = {
            "matmul_all_reduce": whole,
            "matmul_reduce_scatter": torch.tensor_split(whole, ranks)[rank].contiguous(),
            "matmul_all_to_all": torch.cat(arriving),
        }


def _verify(group: ut.Group, operator: str, factors: Factors, plan: Plan) -> None:
    want = factors.want[operator]
    out = torch.full_like(want, float("nan"))
    getattr(ut, operator)(factors.x, factors.w, group=group, plan=plan, out=out)
    wrong = int((out != want).sum())
    group.check()
    assert wrong == 0, f"{operator} {list(want.shape)}, {plan.name} in {plan.parcels}: {wrong} wrong elements"


def _problem(group: ut.Group, operator: str, m: int, n: int) -> Problem:
    return Problem.of(
        operator, m, n, INNER, dtype="bfloat16", ranks=group.size, device="cuda",
        multiprocessors=group.fabric.multiprocessors,
    )  # fmt: skip


def _cut(plan: Plan, extent: int, chance: random.Random, unit: int = 1) -> Plan:
    """At random places, multiples of `unit`; the first and the last parcel are short in every other plan."""
    places = range(unit, extent, unit)
    stops = set(chance.sample(places, min(len(places), chance.randrange(1, 12))))
    if places and chance.random() < 0.5:
        stops |= {places[0], places[-1]}
    return replace(plan, parcels=tuple(itertools.pairwise([0, *sorted(stops), extent])))


def staged_copies_are_exact(group: ut.Group) -> None:
    """Usual plans, one parcel (the longest messages), parcels at random; each twice, so that rings are used again."""
    chance = random.Random(11)
    for m, n in SHAPES:
        factors = Factors(group, m, n)
        for operator in OPERATORS:
            problem = _problem(group, operator, m, n)
            signaled = default_plan(problem, "signaled", "dma")
            grid = problem.grid(signaled)
            unit = grid.columns if signaled.layout == "natural" else 1
            plans = [Plan("serial", "dma", ((0, m),)), default_plan(problem, "serial", "dma"), signaled]
            plans += [replace(signaled, parcels=((0, grid.tiles),))]
            for _ in range(3):
                plans.append(_cut(signaled, grid.tiles, chance, unit))
                plans.append(_cut(Plan("chunked", "dma", ((0, m),)), m, chance))
            if operator == "matmul_all_to_all":  # a matmul on all SMs: own rows wait for one, and nobody for them
                every = replace(signaled.share, multiprocessors=None)
                plans.append(replace(_cut(signaled, grid.tiles, chance, unit), share=every))
            for plan in plans:
                for _ in range(2):
                    _verify(group, operator, factors, plan)


def copy_engines_are_measured(group: ut.Group) -> None:
    """The constants of the staged lane are sane, and say what bare communication of another size takes."""
    from undertow.ops import profile_engines
    from undertow.ops.profile import communication, meeting
    from undertow.ops.profile_timing import together
    from undertow.plan.staged import last_arrival

    def bare(operator: str, nbytes: int, parcels: int) -> Callable[[], object]:
        return communication(group, operator, "dma", nbytes, torch.bfloat16, parcels)

    align = meeting(group, "dma")
    found = profile_engines.engines(group, bare, align, rounds=3)
    assert found is not None, "ranks share a GPU, so lane dma is staged"
    assert 5e9 < found.out_speed < 5e11, found
    assert 5e9 < found.in_speed < 5e11, found
    assert found.sum_speed_alone > 1e10, found
    for operator in OPERATORS:
        assert 0 <= found.parcel_seconds(operator) < 5e-3, found
    assert 0 <= found.call < 2e-2, found
    for nbytes, parcels in ((32 << 20, 3), (64 << 20, 6)):
        took = together(group, bare("matmul_reduce_scatter", nbytes, parcels), align, rounds=3).seconds
        pieces = [nbytes / parcels / group.size] * parcels
        said = found.end + last_arrival(
            found.ahead, "matmul_reduce_scatter", group.size, True, pieces, [0.0] * parcels
        )  # fmt: skip
        if group.rank == 0:
            print(f"  {nbytes >> 20} MiB in {parcels}: {took * 1e3:.2f} ms, predicted {said * 1e3:.2f}", flush=True)
        assert 0.7 < said / took < 1.4, (found, nbytes, parcels, took, said)


def captured_uneven_parcels_replay(group: ut.Group) -> None:
    """1000 replays with new inputs, a rank's host or device delayed now and then: copies of several rows in a graph."""
    from gpu_checks import _replay

    chance = random.Random(5)
    factors = Factors(group, 1536, 1024)
    for operator in OPERATORS:
        problem = _problem(group, operator, 1536, 1024)
        plan = default_plan(problem, "signaled", "dma")
        grid = problem.grid(plan)
        plan = _cut(plan, grid.tiles, chance, grid.columns)
        want, x = factors.want[operator], factors.x.clone()
        y = torch.empty_like(want)

        def call(operator: str = operator, plan: Plan = plan, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            getattr(ut, operator)(x, factors.w, group=group, plan=plan, out=y)

        _replay(group, f"{operator} in {plan.parcels}", x, y, call, want)


def matmuls_are_measured(group: ut.Group) -> None:
    """The curves over k and rows are sane, survive their file, and say what matmuls of other sizes take."""
    from undertow.fabric import profile
    from undertow.ops import profile_matmul
    from undertow.ops.profile import meeting
    from undertow.ops.profile_timing import together
    from undertow.plan.machine import FORMAT, Machine
    from undertow.plan.matmuls import matmul_seconds

    align = meeting(group, "dma")
    content, _ = profile.measure(group, quick=True, only=("dma",))
    machine = Machine.from_dict({"format": FORMAT, **content})
    work = profile_matmul.costs(group, machine, lambda call: together(group, call, align, rounds=3))
    machine = replace(machine, work=work)
    assert Machine.from_dict(machine.to_dict()) == machine
    assert all(0.3 < factor < 5 for _, factor in (*work.tiles, *work.library)), work
    assert work.read_speed is not None
    assert 5e10 < work.read_speed < 1e13, work
    assert 0 <= work.stagger < 1, work
    for m, k in ((2048, 6144), (6144, 3072), (512, 8192)):
        x = torch.randn(m, k, dtype=torch.bfloat16, device=group.device)
        w = torch.randn(8192, k, dtype=torch.bfloat16, device=group.device).t()
        y = x.new_empty(m, 8192)
        took = together(group, lambda x=x, w=w, y=y: torch.mm(x, w, out=y), align, rounds=3)
        problem = replace(_problem(group, "matmul_all_reduce", m, 8192), k=k)
        said = matmul_seconds(problem, machine, group.fabric.multiprocessors, m)
        if group.rank == 0:
            print(f"  {m} x 8192 x {k}: {took.seconds * 1e3:.2f} ms, predicted {said * 1e3:.2f}", flush=True)
        assert 0.6 < said / took.seconds < 1.6, (work, m, k, took, said)


CHECKS = (staged_copies_are_exact, copy_engines_are_measured, matmuls_are_measured, captured_uneven_parcels_replay)
