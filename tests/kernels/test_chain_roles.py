"""The kernel whose sums go from rank to rank, on a stand-in for Gluon, its roles in random orders: right sums, nothing
overwritten, and nobody waits for ever. And the same without one of its waits, which must be found."""

from __future__ import annotations

import inspect
import itertools
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gluon_roles import Barrier, Descriptor, Gpu, Pointer, standing_in
from random_orders import Deadlock

from undertow.kernels import fused_chain
from undertow.kernels.signals import RELEASE_EACH
from undertow.plan import chain, fused
from undertow.plan.fused import LINE
from undertow.plan.plan import Plan, Share

TILE, BLOCK_K, CALLS = (16, 16), 4, 3
Changes = Callable[[Any], None]


def run(
    shards: tuple[int, ...], n: int, k: int, ctas: int, seed: int, transposed: bool = True, finished: bool = False,
    changes: Changes = lambda module: None,
) -> None:  # fmt: skip
    """Calls of all ranks, one behind the other on each of them, with small tiles; a CTA more than work."""
    plan = Plan("fused", "peer", ((0, 1),), Share(ctas), tile=TILE, group_bands=3, order="rotated")
    ranks, m, padded = len(shards), sum(shards), fused.padded_rows(shards, plan)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    half = ranks * padded * n
    memory = [Pointer(torch.full((2 * half,), float("nan"))) for _ in shards]
    lines = len(chain.table(shards, n, plan, 0))
    words = [Pointer(torch.zeros(lines * LINE, dtype=torch.int64)) for _ in shards]
    epochs = [torch.zeros(ctas + 1, dtype=torch.int64) for _ in shards]
    factors = [[(drawn(m, k), drawn(k, n)) for _ in shards] for _ in range(CALLS)]
    outs = [[torch.full((rows * n,), float("nan")) for rows in shards] for _ in range(CALLS)]
    bias = drawn(n)
    world = Gpu(seed)

    def launch(rank: int, call: int) -> Callable[[], None]:
        a, b = factors[call][rank]
        if transposed:
            b = b.t()
        block = (TILE[1], BLOCK_K) if transposed else (BLOCK_K, TILE[1])
        table = torch.from_numpy(chain.table(shards, n, plan, rank).copy()).long().flatten()

        def work() -> None:
            fused_chain.fused_chain_kernel(
                Descriptor(a, (TILE[0] // fused_chain.GROUPS, BLOCK_K)), Descriptor(b, block), memory[rank],
                Pointer(outs[call][rank]), Pointer(bias), Pointer(table), Pointer(memory), Pointer(words), words[rank],
                Pointer(epochs[rank]), lines, ctas, k, n, padded, half, rank, (rank - 1) % ranks, (rank + 1) % ranks,
                Pointer(torch.zeros(1)), Pointer(torch.zeros(1)), 0,
                BLOCK_M=TILE[0], BLOCK_N=TILE[1], BLOCK_K=BLOCK_K, STAGES=fused_chain.STAGES, TRANSPOSED=transposed,
                BIAS=finished, ACTIVATION=int(finished),
            )  # fmt: skip

        return work

    def stream(rank: int, program: int) -> Callable[[], None]:
        def work() -> None:
            for call in range(CALLS):
                launch(rank, call)()
                done[rank][call] += 1
                # A launch begins when the one before is over, on all of this rank's CTAs.
                world.pause(lambda call=call: done[rank][call] == ctas + 1)  # type: ignore[misc]

        return work

    done = [[0] * CALLS for _ in shards]
    with standing_in(fused_chain, world, RELEASE_EACH.value, lambda total, ACTIVATION: torch.relu(total)):
        fused_chain._ROWS = 1
        changes(fused_chain)
        for rank in range(ranks):
            for program in range(ctas + 1):
                world.start(program, stream(rank, program))
        world.run()
    for call in range(CALLS):
        whole = torch.stack([a @ b for a, b in factors[call]]).sum(0)
        want = torch.relu(whole + bias) if finished else whole
        for rank, rows in enumerate(want.split(shards)):
            assert torch.equal(outs[call][rank].view(rows.shape), rows), "a wrong sum"


# Shards, n, k, CTAs: one tile and many of a CTA, even and odd numbers, none at all; K of one step, of fewer and of more
# than there are stages, and a tail.
SHAPES = [
    ((16, 16), 16, 4, 1),
    ((33, 5), 40, 3, 2),
    ((20, 17, 1), 24, 30, 1),
    ((16, 16), 16, 18, 3),
    ((16, 16), 48, 16, 1),
]


@pytest.mark.parametrize(("shards", "n", "k", "ctas"), SHAPES)
@pytest.mark.parametrize(("transposed", "finished"), [(True, False), (False, True)])
def test_sums_are_right_in_any_order(
    shards: tuple[int, ...], n: int, k: int, ctas: int, transposed: bool, finished: bool
) -> None:
    for seed in range(4):
        run(shards, n, k, ctas, seed, transposed, finished)


def without(what: str, name: str, group: int | None = None) -> Changes:
    """No "wait" for barriers of this name, or no one who does "arrive" there."""

    def changes(module: Any) -> None:
        allocate, usual = module.gl.allocate_shared_memory, getattr(module.mbarrier, what)
        names = itertools.cycle(["free", "there", "taken", "made"])  # as the kernel allocates them
        left: list[Barrier] = []

        def allocated(dtype: Any, shape: list[int], layout: Any) -> Any:
            found = allocate(dtype, shape, layout)
            if layout == "barriers" and next(names) == name:
                left.extend(one for at, one in enumerate(found.every) if group in (None, at))
            return found

        def unless(barrier: Barrier, *given: Any, **more: Any) -> None:
            if barrier not in left:
                usual(barrier, *given, **more)

        module.gl.allocate_shared_memory = allocated
        setattr(module.mbarrier, what, unless)

    return changes


def before(first: str, then: str) -> Changes:
    """The text of a role with one of its lines moved in front of another."""

    def changes(module: Any) -> None:
        for name in ("_multiply", "_pass_on"):
            text = textwrap.dedent(inspect.getsource(getattr(module, name)))
            lines = text.splitlines()
            moved = [at for at, line in enumerate(lines) if first in line]
            if moved:
                line, at = lines.pop(moved[-1]), max(at for at, line in enumerate(lines) if then in line)
                lines.insert(at, " " * (len(lines[at]) - len(lines[at].lstrip())) + line.lstrip())
                exec("\n".join(lines[1:]), vars(module))  # without its decorator

    return changes


def freed_by_one(module: Any) -> None:
    init = module.mbarrier.init
    module.mbarrier.init = lambda barrier, count: init(barrier, 1)


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(without("wait", "taken", at), id=f"group {1 - at} does not wait its turn") for at in (0, 1)),
        *(pytest.param(without("wait", "made", at), id=f"half {at} is taken too early") for at in (0, 1)),
        pytest.param(without("wait", "free"), id="stages are overwritten"),
        pytest.param(without("wait", "there"), id="stages are read too early"),
        pytest.param(freed_by_one, id="one group frees a stage of both"),
        pytest.param(
            before("mbarrier.arrive(free.index(stage_before", "total = warpgroup_mma_wait(num_outstanding=0"),
            id="the last stage is freed while it is read",
        ),
    ],
)
def test_a_missing_wait_is_found(changes: Changes) -> None:
    def all_orders() -> None:
        for seed in range(40):
            run((16, 16), 48, (4, 24)[seed % 2], 1, seed, changes=changes)

    with pytest.raises(AssertionError):
        all_orders()


@pytest.mark.parametrize(("name", "group"), [("free", None), ("taken", 0), ("taken", 1), ("made", 0), ("made", 1)])
def test_who_waits_for_ever_is_found(name: str, group: int | None) -> None:
    with pytest.raises(Deadlock):
        run((16, 16), 32, 24, 1, 0, changes=without("arrive", name, group))
