"""Rank functions for the fused grain: plans nobody would choose, options of the operators, many calls in a row."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import matmul_suite as suite
import torch
import torch.distributed as dist

import undertow as ut
from undertow.errors import AllocationFailed, StrategyUnavailable
from undertow.fabric.symmetric import SymmetricBuffer
from undertow.ops import choose
from undertow.ops import matmul_all_reduce as reduce
from undertow.ops import matmul_reduce_scatter as scatter
from undertow.ops.fused import unwanted
from undertow.plan import fused
from undertow.plan.defaults import fused_plan
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem


def random_plan(problem: Problem, chance: random.Random) -> Plan:
    """Any tile, group of bands and piece that fits; where rows are few, perhaps all ranks sum, or owners of columns."""
    tile = chance.choice((1, 2, 3, 8, 16, 33, 64)), chance.choice((1, 5, 8, 16, 64))
    split, owners = 0, "rows"
    if problem.operator == "matmul_all_reduce" and problem.m <= 33 and chance.random() < 0.8:
        split = chance.choice((0, 0, 0, 1, 2, 3))
        owners = "rows" if split else "columns"
        tile = max(1, problem.m), tile[1]
    plan = dataclasses.replace(
        fused_plan(problem, "peer"), tile=tile, group_bands=chance.randint(1, 9), split=split,
        owners=owners, piece=chance.choice((1, 3, 8, 64)),
    )  # fmt: skip
    if problem.operator == "all_gather_matmul":  # only there all ranks know K
        plan = dataclasses.replace(plan, piece=max(plan.piece, -(-problem.k // fused.LINE)))
    plan.check(problem)
    return plan


def random_plans(seed: int, count: int) -> dict[str, int]:
    """`count` cases, each with a plan of its own; how many there were of each form."""
    group = ut.init()
    every = fused.SCATTER, fused.EXCHANGE, fused.GATHER, fused.DECODE, fused.OWNED
    chance, forms = random.Random(seed), dict.fromkeys(every, 0)
    real = choose.default_plan

    turn = 0

    def planned(problem: Problem, grain: str, lane: str, by_program: bool = False) -> Plan:
        plan = random_plan(problem, random.Random(seed + turn))
        forms[fused.form(problem, plan)] += 1
        return plan

    choose.default_plan = planned
    try:
        for turn in range(count):  # noqa: B007 - read above
            operator, dtype = chance.choice(list(suite.OPERATORS)), chance.choice(suite.CPU_DTYPES)
            shape = chance.choice(suite.SHAPES)
            suite.verify(group, suite.Case(operator, "fused:peer", dtype, shape, chance.randrange(1 << 30)))
    finally:
        choose.default_plan = real
    return forms


def mixed_calls(seed: int, count: int) -> dict[str, int]:
    """`count` calls in a row with random sizes, strategies and operators; how many of each grain."""
    group, chance = ut.init(), random.Random(seed)
    strategies, grains = suite.strategies(), dict.fromkeys(suite.GRAINS, 0)
    fewer = [one for one in strategies if not one.endswith("net")]  # those over the network are slow and many
    for _ in range(count):
        strategy = "fused:peer" if chance.random() < 0.5 else chance.choice(fewer)
        shape = chance.randint(0, 70), chance.randint(1, 40), chance.randint(1, 24)
        operator, dtype = chance.choice(list(suite.OPERATORS)), chance.choice(suite.CPU_DTYPES)
        suite.verify(group, suite.Case(operator, strategy, dtype, shape, chance.randrange(1 << 30)))
        grains[strategy.partition(":")[0]] += 1
    return grains


def norms_and_residuals() -> bool:
    """residual and norm after a fused call give what torch gives of the serial one."""
    group = ut.init()
    for m, n, seed in ((7, 12, 1), (32, 40, 2), (61, 8, 3)):
        case = suite.Case("", "", torch.float32, (m, n, 9), seed)
        xs, ws = suite._factors(group, case)
        norm = torch.nn.LayerNorm(n)
        whole = reduce.reference(xs, ws)
        for call, want in (
            (ut.matmul_all_reduce, whole),
            (ut.matmul_reduce_scatter, scatter.reference(xs, ws)[group.rank]),
        ):
            residual = torch.arange(want.numel(), dtype=torch.float32).view(want.shape) % 5
            summed = torch.relu(want + 1) + residual
            with torch.no_grad():
                y = call(
                    xs[group.rank], ws[group.rank], bias=torch.ones(n), activation="relu", residual=residual, norm=norm,
                    group=group, strategy="fused",
                )  # fmt: skip
                assert torch.equal(residual, summed)
                torch.testing.assert_close(y, norm(summed))
    return True


def ranks_differ_in_k() -> bool:
    """Parts of K of very different lengths, and a rank without columns: all ranks must plan the same."""
    group = ut.init()
    lengths = (1024 * fused.LINE + 1, 1024 * fused.LINE, 1)
    xs, ws = [torch.ones(2 * group.size, k) for k in lengths], [torch.ones(k, 2) for k in lengths]
    x, w = xs[group.rank], ws[group.rank]
    y = ut.matmul_reduce_scatter(x, w, group=group, strategy="fused")
    assert torch.equal(y, scatter.reference(xs, ws)[group.rank])
    assert torch.equal(ut.matmul_all_reduce(x, w, group=group, strategy="fused"), reduce.reference(xs, ws))
    for number in range(4):
        rows = torch.full((group.rank + 1, 3), float(number + group.rank))
        columns = torch.ones(3, (group.rank + number) % group.size)
        y = ut.all_gather_matmul(rows, columns, rows=[1, 2, 3], group=group, strategy="fused")
        all_rows = torch.cat([torch.full((rank + 1, 3), float(number + rank)) for rank in range(group.size)])
        assert torch.equal(y, all_rows @ columns)
    return True


def explained() -> tuple[str, str]:
    """The plan's name and the reason."""
    group = ut.init()
    x, w = torch.ones(8, 3), torch.ones(3, 5)
    ut.matmul_reduce_scatter(x, w, group=group, strategy="fused")
    told = ut.explain()
    assert told is not None
    return told.plan.name, told.choice.reason


def a_missing_word_is_an_error() -> str:
    """A rank that never tells its tiles leaves the others no hang but an error at the deadline."""
    from undertow.ops import fused_cpu

    group = ut.init()
    if group.rank == 1:
        fused_cpu.Turn.tell = lambda self, rank, word: None  # type: ignore[method-assign]
    try:
        ut.matmul_reduce_scatter(torch.ones(4, 3), torch.ones(3, 5), group=group, strategy="fused")
    except ut.UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return "not noticed"


# A word that has another writer in the next call: (word, holder, target, teller). In call n it is set at `target` by
# `holder`, in call n + 1 by `teller`, who can get there while `holder` has not yet set it for call n.
CONTESTED = {"gather": (4, 2, 0, 1), "decode": (2, 2, 1, 0), "scatter": (19, 0, 2, 1)}


def contested_words() -> dict[str, tuple[bool, bool]]:
    """`contested_word` of every form, with either rank held back."""
    cases = [(form, late) for form in CONTESTED for late in ("holder", "target")]
    return {f"{form}, late {late}": contested_word(form, late) for form, late in cases}


def contested_word(form: str, late: str) -> tuple[bool, bool]:
    """Whether the target took one call's word for the other's, and whether both results are exact.

    `late`: who is held back, "holder" until `teller` has set the word for the next call, and where the target is then
    seen to wait; or "target", too, until both have set it.
    """
    group = ut.init()
    calls = {
        "gather": (_rows_of(2), _rows_of(4)), "decode": (_reduced(5, 1), _reduced(5, 3)),
        "scatter": (_reduced(6, 0), _reduced(9, 0)),
    }[form]  # fmt: skip
    assert calls[1](group, 1)  # the larger one makes room for both
    assert calls[0](group, 3)
    word, *roles = CONTESTED[form]
    with _held_back(group, word, roles, late) as held:
        exact = calls[0](group, 5)
        held.over()
        exact = calls[1](group, 7) and exact
    return held.early, exact


class _Held:
    """Words of its own, on every rank: 0 the next call's word is set, 1 go on, 2 this call's word is set."""

    def __init__(self, group: ut.Group, roles: list[int]) -> None:
        self.signals, self.rank = group.fabric.signals(3), group.rank
        self.holder, self.target, self.teller = roles
        self.call, self.early = 1, False

    def over(self) -> None:
        """The first call is over; the holder goes on where the target did not wait for it."""
        self.call = 2
        if self.rank == self.target and self.early:
            self.signals.set(self.holder, 1, 1)


@contextmanager
def _held_back(group: ut.Group, word: int, roles: list[int], late: str) -> Iterator[_Held]:
    """Hooks on words told and waited for. They wait for other ranks, never for a time."""
    from undertow.ops import fused_cpu

    held = _Held(group, roles)
    tell, wait = fused_cpu.Turn.tell, fused_cpu.Turn.wait
    group.barrier()

    def told(turn: fused_cpu.Turn, to: int, told_word: int) -> None:
        here = (told_word, to) == (word, held.target)
        if here and held.call == 1 and group.rank == held.holder:
            held.signals.wait(1 if late == "holder" else 0, 1)
        tell(turn, to, told_word)
        if here and held.call == 1 and group.rank == held.holder:
            held.signals.set(held.target, 2, 1)
        if here and held.call == 2 and group.rank == held.teller:
            for other in (held.target, held.holder):
                held.signals.set(other, 0, 1)

    def waited(turn: fused_cpu.Turn, asked: int, sender: int) -> None:
        if asked == word and held.call == 1 and group.rank == held.target:
            if late == "holder":
                held.signals.wait(0, 1)
                seen = turn._stage.signals.read(turn._words + asked)
                held.early = seen >= turn._stage.epoch  # and nobody set it for this call
                if not held.early:
                    held.signals.set(held.holder, 1, 1)
            else:
                held.signals.wait(2, 1)
        wait(turn, asked, sender)

    fused_cpu.Turn.tell, fused_cpu.Turn.wait = told, waited  # type: ignore[method-assign]
    try:
        yield held
    finally:
        fused_cpu.Turn.tell, fused_cpu.Turn.wait = tell, wait  # type: ignore[method-assign]


def _rows_of(rows: int) -> Callable[[ut.Group, int], bool]:
    """all_gather_matmul of so many rows of each rank, a line for each row."""

    def call(group: ut.Group, seed: int) -> bool:
        shards = [torch.full((rows, 4), float(seed + rank)) for rank in range(group.size)]
        w = torch.ones(4, 3)
        y = ut.all_gather_matmul(shards[group.rank], w, group=group, strategy="fused")
        return torch.equal(y, torch.cat(shards) @ w)

    return call


def _reduced(rows: int, split: int) -> Callable[[ut.Group, int], bool]:
    """matmul_all_reduce of so many rows, a line for each, or with K in `split` parts."""

    def call(group: ut.Group, seed: int) -> bool:
        xs = [torch.full((rows, 6), float(seed + rank)) for rank in range(group.size)]
        w = torch.ones(6, 4)
        plan = Plan("fused", "peer", ((0, 1),), tile=(rows if split else 1, 4), own_last=True, split=split)
        y = ut.matmul_all_reduce(xs[group.rank], w, group=group, plan=plan)
        return torch.equal(y, sum(xs) @ w)

    return call


def no_room() -> list[str]:
    """A fused call of every form that finds no room is refused on all ranks, and the group goes on."""
    group, said = ut.init(), []
    group.fabric.lane("peer")
    x, w = torch.ones(8, 4), torch.ones(4, 4)
    calls: tuple[Callable[[str], torch.Tensor], ...] = (
        lambda strategy: ut.matmul_reduce_scatter(x, w, group=group, strategy=strategy),
        lambda strategy: ut.matmul_all_reduce(x, w, group=group, strategy=strategy),
        lambda strategy: ut.all_gather_matmul(x, w, group=group, strategy=strategy),
    )
    real = group.fabric.buffer

    def full(shape: tuple[int, ...] | int, dtype: torch.dtype) -> SymmetricBuffer:
        group.fabric._agree_on_allocation("no room" if group.rank == 1 else "")
        return real(shape, dtype)

    for call in calls:
        group.fabric.buffer = full  # type: ignore[method-assign]
        try:
            call("fused")
        except AllocationFailed as error:
            said.append(str(error))
        finally:
            group.fabric.buffer = real  # type: ignore[method-assign]
        assert not group.failed
        assert torch.equal(call("serial"), call("fused"))
    return said


def other_groups() -> tuple[str, str, str]:
    """Why `auto` leaves fused plans out: alone, beside another group, and where a part of the GPU is not known."""
    group = ut.init()
    alone = unwanted(group)
    others = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    beside = unwanted(group)
    group.fabric.unknown_sharers = "nobody knows"
    try:
        ut.matmul_reduce_scatter(torch.ones(6, 2), torch.ones(2, 2), group=group, strategy="fused")
        said = ""
    except StrategyUnavailable as error:
        said = str(error)
    del others
    return alone, beside, said
