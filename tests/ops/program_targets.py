"""Rank functions for the tests of matmuls whose communication is a collective program."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import matmul_suite as suite
import torch
from matmul_targets import sentence, usable

import undertow as ut
from undertow import collective as co
from undertow.collective import cpu_interpreter as interpreter
from undertow.collective.bind import INSTRUCTION_ROW, INSTRUCTIONS
from undertow.collective.cpu_runtime import CpuExecutable
from undertow.collective.schedule import MOVE
from undertow.fabric.timeline import Recorder, recording
from undertow.ops import matmul_all_reduce as reduce
from undertow.ops import matmul_reduce_scatter as scatter
from undertow.ops import program as ops_program
from undertow.ops import replicated_matmul as ops_replicated
from undertow.ops.product import CountedTileProduct
from undertow.plan.plan import Plan

PARCELS = 4


@co.program("all_reduce", chunks=lambda ranks: PARCELS * ranks)
def mine(c: co.Trace) -> None:
    """A user's own: parcel after parcel, each summed in as many parts as there are ranks."""
    for parcel in range(PARCELS):
        for rank in range(c.ranks):
            c.tile_ready(c.rank(rank).input[parcel * c.ranks : (parcel + 1) * c.ranks], parcel)
        for owner in range(c.ranks):
            total = c.rank(owner).input[parcel * c.ranks + owner].copy(c.rank(owner).output[parcel * c.ranks + owner])
            for other in c.others(owner):
                total.reduce(c.rank(other).input[parcel * c.ranks + owner])
            for other in c.others(owner):
                total.copy(other)


@co.program("all_reduce", chunks=lambda ranks: ranks)
def turned(c: co.Trace) -> None:
    """A ring in which every rank computes first what it sends first."""
    for rank in range(c.ranks):
        for step in range(c.ranks):
            c.tile_ready(c.rank(rank).input[(rank - step) % c.ranks], step)
    co.LIBRARY["ring"](c)


@co.program("reduce_scatter", chunks=2)
def own_last(c: co.Trace) -> None:
    """A user's own: the shards of others are computed first, a rank's own last."""
    for rank in range(c.ranks):
        for step, shard in enumerate([*c.others(rank), rank]):
            c.tile_ready(c.rank(rank).input[2 * shard : 2 * shard + 2], step)
    for shard in range(c.ranks):
        total = c.rank(shard).input[2 * shard : 2 * shard + 2].copy(c.rank(shard).output[0:2])
        for other in c.others(shard):
            total.reduce(c.rank(other).input[2 * shard : 2 * shard + 2])


PROGRAMS: dict[str, tuple[co.Program, ...]] = {
    "matmul_all_reduce": (*(co.LIBRARY[one] for one in ("ring", "two_shot", "halving_doubling")), mine, turned),
    "matmul_reduce_scatter": (
        *(co.LIBRARY[f"reduce_scatter_{one}"] for one in ("ring", "direct", "halving")), own_last,
    ),
}  # fmt: skip
CALLS = {"matmul_all_reduce": ut.matmul_all_reduce, "matmul_reduce_scatter": ut.matmul_reduce_scatter}


def verify(group: ut.Group, case: suite.Case, program: co.Program, **options: Any) -> None:
    """One call, exact, whatever stood in the output before."""
    xs, ws = suite._factors(group, case)
    bias, activation = suite._bias(case, case.shape[1], group.device), suite._activation(case)
    wide = suite._wide(xs), suite._wide(ws)
    want = reduce.reference(*wide) if case.operator == "matmul_all_reduce" else scatter.reference(*wide)[group.rank]
    want = suite._finished(want.to(case.dtype), bias, activation)
    out = suite._poisoned(want.shape, case, group)
    CALLS[case.operator](
        xs[group.rank], ws[group.rank], bias=bias, activation=activation, group=group, program=program,
        strategy=case.strategy, out=out, **options,
    )  # fmt: skip
    suite._exactly(case, group, out, want)


def programs_are_exact(seed: int, part: float) -> int:
    """Programs × lanes × dtypes × shapes, a seeded part of them; how many there were."""
    group = ut.init()
    chance, count = random.Random(seed), 0
    for operator, programs in PROGRAMS.items():
        for program, lane, dtype, shape in itertools.product(programs, suite.LANES, suite.CPU_DTYPES, suite.SHAPES):
            case = suite.Case(operator, f"signaled:{lane}", dtype, shape, chance.randrange(1 << 30))
            if chance.random() < part:
                verify(group, case, program)
                count += 1
    return count


@contextmanager
def last_parcel_waits_for_a_move() -> Iterator[None]:
    """The last parcel is not computed before a move of the program is over: if none ever were, this would be seen."""
    made: list[CpuExecutable] = []
    real_executable, real_reach = ops_program._executable, CountedTileProduct.reach

    def executable(*arguments: Any) -> Any:
        made.append(real_executable(*arguments))
        return made[-1]

    def reach(self: CountedTileProduct, parcel: int) -> None:
        deadline = time.monotonic() + 20
        if parcel == len(self._blocks) - 1:
            while not has_moved(made[-1]):
                assert time.monotonic() < deadline, "nothing moves before the last parcel"
                time.sleep(0.0005)
        real_reach(self, parcel)

    ops_program._executable, CountedTileProduct.reach = executable, reach  # type: ignore[method-assign]
    try:
        yield
    finally:
        ops_program._executable, CountedTileProduct.reach = real_executable, real_reach  # type: ignore[method-assign]


def has_moved(executable: CpuExecutable) -> bool:
    """Whether the log of the call that is being recorded holds a move: the interpreter adds a row when one is over."""
    address = int(executable._state[interpreter.LOG])
    if not address:
        return False
    log = (ctypes.c_int64 * 2).from_address(address)
    rows = (ctypes.c_int64 * (interpreter.LOG_ROW * log[1])).from_address(address + 8 * interpreter.LOG_HEADER)
    code = next(reversed(executable._bound.values())).code
    kinds = [code[code[INSTRUCTIONS] + one * INSTRUCTION_ROW] for one in rows[1 :: interpreter.LOG_ROW]]
    return MOVE in kinds


def moves_before_the_end() -> dict[str, tuple[int, int]]:
    """For every program: how many moves of chunks were over before the last parcel was computed, and all moves."""
    group = ut.init()
    found = {}
    x, w = torch.ones(64, 70), torch.ones(70, 32)
    for operator, programs in PROGRAMS.items():
        for program in programs:
            recorder = Recorder(group.rank, "cpu")
            with recording(recorder), last_parcel_waits_for_a_move():
                CALLS[operator](x, w, program=program, strategy="signaled:peer")
            events = recorder.timeline().events
            computed = max(one.end_ns for one in events if one.name == "matmul")
            moves = [one for one in events if "->" in str(one.details.get("instruction"))]
            assert all(one.name == program.name for one in moves)
            found[program.name] = sum(one.end_ns < computed for one in moves), len(moves)
    return found


def refusals() -> dict[str, str]:
    """One sentence each, on all ranks, and the group goes on."""
    group = ut.init()
    x, w = torch.ones(24, 8), torch.ones(8, 5)
    ring, shards = co.LIBRARY["ring"], co.LIBRARY["reduce_scatter_ring"]
    good = planned(x, w, ring)
    different = (co.LIBRARY["two_shot"], mine)[group.rank % 2]
    found = {
        "contract": sentence(lambda: ut.matmul_all_reduce(x, w, program=shards)),
        "other contract": sentence(lambda: ut.matmul_reduce_scatter(x, w, program=ring)),
        "no program": sentence(lambda: ut.matmul_all_reduce(x, w, program="ring")),  # type: ignore[arg-type]
        "ranks": sentence(lambda: ut.matmul_all_reduce(x, w, program=for_five)),
        "half tied": sentence(lambda: ut.matmul_all_reduce(x, w, program=half_tied)),
        "grain": sentence(lambda: ut.matmul_all_reduce(x, w, program=ring, strategy="serial")),
        "lane": sentence(lambda: ut.matmul_all_reduce(x, w, program=ring, strategy="signaled:wire")),
        "plan of another": sentence(lambda: ut.matmul_all_reduce(x, w, program=mine, plan=good)),
        "plan without": sentence(lambda: ut.matmul_all_reduce(x, w, program=ring, plan=replace(good, program=""))),
        "unknown": sentence(lambda: ut.matmul_all_reduce(x, w, plan=replace(good, program="nobody"))),
        "parcels": sentence(lambda: ut.matmul_all_reduce(x, w, program=mine, plan=replace(good, program="mine"))),
        "packed": sentence(lambda: ut.matmul_all_reduce(x, w, plan=replace(good, layout="packed"))),
        "no taker": sentence(lambda: ut.matmul_all_to_all(x, w, plan=replace(good, order="proportional"))),
        "not all the same": sentence(lambda: ut.matmul_all_reduce(x, w, program=different)),
    }
    for name in PROGRAMS:
        found[f"usable, {name}"] = str(usable(group, name))
        verify(group, suite.Case(name, "auto", torch.float32, (23, 29, 31), 5), PROGRAMS[name][0])
    return found


@co.program("all_reduce", ranks=5)
def for_five(c: co.Trace) -> None:
    co.LIBRARY["ring"](c)


@co.program("all_reduce", chunks=2)
def half_tied(c: co.Trace) -> None:
    c.tile_ready(c.rank(0).input[0], 0)
    co.LIBRARY["double_binary_tree"](c)


def planned(x: torch.Tensor, w: torch.Tensor, program: co.Program) -> Plan:
    ut.matmul_all_reduce(x, w, program=program)
    said = ut.explain()
    assert said is not None
    return said.plan


def plans_name_their_program() -> list[bool]:
    """A plan carries a library program by itself; a user's own must come along."""
    group = ut.init()
    case = suite.Case("matmul_all_reduce", "auto", torch.float64, (61, 67, 5), 5)
    found = []
    for program in (co.LIBRARY["ring"], mine):
        verify(group, case, program)
        said = ut.explain()
        assert said is not None
        plan = Plan.from_json(said.plan.to_json())
        found += [plan.program == program.name, said.reason == f"Program {program.name} was given."]
        verify(group, case, program, plan=plan)
        xs, ws = suite._factors(group, case)
        x, w = xs[group.rank], ws[group.rank]
        if program is not mine:
            bare = ut.matmul_all_reduce(x, w, group=group, plan=plan)
            found.append(torch.equal(bare, ut.matmul_all_reduce(x, w, group=group, strategy="serial:peer")))
        else:
            alone = sentence(lambda: ut.matmul_all_reduce(x, w, group=group, plan=plan))  # noqa: B023
            found.append("plan.program is 'mine', but must be a program of the library" in alone)
    return found


def in_runs(runs: int) -> co.Program:
    """A new program, equal to the last one of as many runs."""

    @co.program("all_reduce", chunks=runs)
    def gathered(c: co.Trace) -> None:
        for rank in range(c.ranks):
            for run in range(runs):
                c.tile_ready(c.rank(rank).input[run], run)
        for run in range(runs):
            total = c.rank(0).input[run].copy(c.rank(0).output[run])
            for other in c.others(0):
                total.reduce(c.rank(other).input[run])
            for other in c.others(0):
                total.copy(other)

    return gathered


def few_bands_and_many_programs() -> tuple[list[bool], int]:
    """More runs than bands of tiles, whatever their number; and what a program costs that is made anew in each step."""
    group = ut.init()
    right = []
    for runs in (7, 8, 9):
        y = ut.matmul_all_reduce(torch.ones(5, 3), torch.ones(3, 4), group=group, program=in_runs(runs))
        right.append(bool((y == 3 * group.size).all()))
    counts = []
    for _ in range(12):
        ut.matmul_all_reduce(torch.ones(64, 3), torch.ones(3, 32), group=group, program=in_runs(4))
        counts.append(len(os.listdir("/proc/self/fd")))
    return right, counts[-1] - counts[0]


def strategies_may_choose_one() -> list[str]:
    """As on a GPU over `peer`: the plan of a strategy names a program. What was explained, call by call."""
    from undertow.ops import choose
    from undertow.plan.defaults import program_plan

    group, usual = ut.init(), choose.default_plan
    ran: list[str] = []
    real = ops_program._executable

    def executable(fabric: Any, call: ops_program.ProgramCall, longest: int) -> Any:
        ran.append(call.plan.program)
        return real(fabric, call, longest)

    ops_program._executable = executable  # type: ignore[assignment]
    choose.default_plan = lambda *given: program_plan(given[0], given[2], "two_shot") if given[3] else usual(*given)  # type: ignore
    try:
        for shape, dtype in itertools.product(((64, 40, 8), (33, 7, 5)), (torch.float32, torch.bfloat16)):
            for seed in range(4):  # with and without bias and activation
                case = suite.Case("matmul_all_reduce", "signaled:peer", dtype, shape, seed)
                before, bare = (
                    len(ran),
                    suite._bias(case, 1, group.device) is None and suite._activation(case) == "none",
                )
                suite.verify(group, case)
                follows = bare or dtype == torch.float32
                assert (len(ran) > before) == follows, (case, "16-bit sums are rounded once" if not follows else "")
                assert bool(ut.explain().plan.program) == follows  # type: ignore[union-attr]
        _gradients_that_not_all_want(group)
    finally:
        choose.default_plan, ops_program._executable = usual, real
    return ran


def _gradients_that_not_all_want(group: ut.Group) -> None:
    """Where one rank's weight is frozen, it has nothing to compute beside what moves: the others do, and all move it
    alike."""
    x = torch.ones(64, 8, requires_grad=True)
    w = torch.ones(8, 40, requires_grad=group.rank > 0)
    y = ops_replicated.replicated_matmul(x, w, group=group, strategy="signaled:peer")
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert bool((x.grad == 40 * group.size).all())
    assert (w.grad is None) == (group.rank == 0)
