"""The kernel that takes columns as it comes, on a stand-in for Gluon, its roles in random orders: right sums whoever
multiplies, and nobody waits for ever. And the same without one of its waits or arrivals, which must be found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gluon_roles import Barrier, Deadlock, Descriptor, Pointer, Tile, World, standing_in

from undertow.kernels import fused_stream
from undertow.plan.fused import LINE

BLOCK_K, COLUMNS, CALLS = 4, 16, 3
UNTOUCHED = -7  # what a call that has no work must leave as it is
BARRIERS = ["free", "there", "mail_free", "mail_there", "summed", "made"]  # as the kernel allocates them
Changes = Callable[[Any], None]


def take(world: World, given: list[Any]) -> Any:
    """The number of the next block, which no other CTA gets."""
    world.pause()
    (counter,) = given
    at = int(counter.at[0])
    counter.memory[at] += 1
    return torch.full_like(counter.at, int(counter.memory[at]) - 1)


def packets(world: World) -> dict[str, Callable[..., Any]]:
    """As `send` and `settle`: a word is stored and read whole, others run between one word and the next."""

    def send(place: Pointer, data: torch.Tensor, flag: torch.Tensor, wanted: torch.Tensor) -> None:
        inside = wanted.flatten()
        places, words = place.at.flatten()[inside], (flag << 32 | data).flatten()[inside]
        for at, word in zip(places.chunk(2), words.chunk(2), strict=True):
            world.pause()
            place.memory[at] = word.as_subclass(torch.Tensor)

    def settle(places: tuple[Pointer, ...], wanted: torch.Tensor, flag: torch.Tensor, watch: Any) -> list[Tile]:
        inside, epoch = [wanted >> bit & 1 != 0 for bit in range(len(places))], int(flag[0])
        rest = [(one.memory, one.at[here]) for one, here in zip(places, inside, strict=True)]

        def there() -> bool:
            while rest and bool((rest[0][0][rest[0][1]] >> 32 == epoch).all()):
                rest.pop(0)
            return not rest

        world.pause(there)
        found = [torch.zeros_like(wanted) for _ in places]
        for one, here, words in zip(places, inside, found, strict=True):
            words[here] = one.memory[one.at[here]] & 0xFFFFFFFF
        return [words.as_subclass(Tile) for words in (*found, torch.zeros_like(wanted))]

    return {"send": send, "settle": settle}


def run(
    ranks: int, rows: int, n: int, k: int, ctas: int, seed: int, stages: int = 7, finished: bool = False,
    changes: Changes = lambda module: None,
) -> None:  # fmt: skip
    """Calls of all ranks, one behind the other on each of them, behind one of which no CTA works, as it is loaded."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).bfloat16()

    half, blocks, steps, tall = ranks * rows * n // 2, -(-n // COLUMNS), -(-k // BLOCK_K), 8 if rows <= 8 else 16
    memory = [Pointer(torch.zeros(2 * half, dtype=torch.int64)) for _ in range(ranks)]
    epochs = torch.zeros(ranks, ctas + 1, dtype=torch.int64)
    taken = torch.full((ranks, 2 * LINE), UNTOUCHED)
    taken[:, [0, LINE]] = 0
    factors = [[(drawn(rows, k), drawn(n, k)) for _ in range(ranks)] for _ in range(CALLS)]
    outs = torch.full((CALLS + 1, ranks, rows * n), UNTOUCHED, dtype=torch.bfloat16)
    bias = drawn(n)
    world = World(seed)
    done = [[0] * (CALLS + 1) for _ in range(ranks)]

    def launch(rank: int, call: int, active: int, counts: torch.Tensor) -> None:
        x, w = factors[call][rank]
        fused_stream.fused_stream_kernel(
            Descriptor(x, (tall, BLOCK_K)), Descriptor(w, (COLUMNS, BLOCK_K)), Pointer(outs[call][rank]), Pointer(bias),
            Pointer(memory), memory[rank], Pointer(counts), Pointer(taken[rank]), torch.tensor(rows), torch.tensor(n),
            active, half, rank, None, None, 0, STEPS=steps, STAGES=stages, RANKS=ranks, BIAS=finished,
            ACTIVATION=int(finished),
        )  # fmt: skip

    def stream(rank: int) -> Callable[[], None]:
        def work() -> None:
            for call in (-1, *range(CALLS)):  # the first one finds no work
                idle = call < 0
                launch(rank, call, 0 if idle else ctas, torch.zeros(ctas + 1).long() if idle else epochs[rank])
                done[rank][call] += 1
                # A launch begins when the one before is over, on all of this rank's CTAs.
                world.pause(lambda call=call: done[rank][call] == ctas + 1)  # type: ignore[misc]

        return work

    def count_out(finished: Pointer, failed: int, deadline_ns: int) -> None:
        assert failed == 0

    def multiply(weights: torch.Tensor, factor: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total + weights.float() @ factor.float()

    functions = packets(world) | {"mma_v2": multiply, "count_out": count_out, "finished_of": lambda epochs: epochs}
    functions |= {"activated": lambda total, ACTIVATION: torch.relu(total) if ACTIVATION else total}
    functions |= {"fence_async_shared": lambda: None}  # of memory ordering
    with standing_in(fused_stream, world, {fused_stream._TAKE.value: take}, **functions):
        changes(fused_stream)
        for rank, program in itertools.product(range(ranks), range(ctas + 1)):
            world.start(program, stream(rank))
        world.run()
    assert (outs[CALLS] == UNTOUCHED).all(), "a call without work has stored something"
    for call in range(CALLS):
        whole = sum((x.float() @ w.float().t() for x, w in factors[call]), torch.zeros(rows, n))
        want = torch.relu(whole + bias) if finished else whole
        for rank in range(ranks):
            assert torch.equal(outs[call][rank].view(rows, n), want.bfloat16()), "a wrong sum"
    assert (epochs == CALLS).all()
    count = taken[:, [LINE * (CALLS % 2), LINE * (1 - CALLS % 2)]]
    assert (count == torch.tensor([blocks, 0])).all(), "a block is not taken once, or the next call does not begin anew"
    assert (taken == UNTOUCHED).sum() == ranks * (2 * LINE - 2)


# Ranks, rows, N, K, CTAs, stages. Both heights of a tile, whole or not; blocks fewer than CTAs, as many, and so many
# that sums are taken on the way; the last one whole, or a pair of its columns; K of one step and of many, more and
# fewer than there are stages or workers, with a tail and without; a stage always the same worker's, or another's.
SHAPES = [
    (2, 8, 16, 4, 2, 7),
    (2, 3, 50, 3, 2, 8),
    (3, 16, 96, 18, 2, 7),
    (2, 11, 130, 9, 1, 8),
    (3, 1, 34, 45, 4, 9),
    (2, 5, 176, 16, 2, 12),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("finished", [False, True])
def test_sums_are_right_in_any_order(shape: tuple[int, int, int, int, int, int], finished: bool) -> None:
    ranks, rows, n, k, ctas, stages = shape
    for seed in range(2):
        run(ranks, rows, n, k, ctas, 2 * seed + finished, stages, finished)


def without(what: str, name: str) -> Changes:
    """No "wait" for barriers of this name, or nobody who does "arrive" there or "expect" bytes."""

    def changes(module: Any) -> None:
        allocate, usual = module.gl.allocate_shared_memory, getattr(module.mbarrier, what)
        names = itertools.cycle(BARRIERS)
        left: list[Barrier] = []

        def allocated(dtype: Any, shape: list[int], layout: Any) -> Any:
            found = allocate(dtype, shape, layout)
            if layout == "barriers" and next(names) == name:
                left.extend(found.every)
            return found

        def unless(barrier: Barrier, *given: Any, **more: Any) -> None:
            if barrier not in left:
                usual(barrier, *given, **more)

        module.gl.allocate_shared_memory = allocated
        setattr(module.mbarrier, what, unless)

    return changes


class Alone:
    """A stage's second barrier `there`, if it had but one: the bit says which of the times that it is filled."""

    def __init__(self, barrier: Barrier, bit: int) -> None:
        self.init, self.arrive = barrier.init, barrier.arrive
        self.over: Callable[[int], bool] = lambda parity: barrier.over(bit)


def one_barrier_of_a_stage(module: Any) -> None:
    allocate = module.gl.allocate_shared_memory
    names = itertools.cycle(BARRIERS)

    def allocated(dtype: Any, shape: list[int], layout: Any) -> Any:
        found = allocate(dtype, shape, layout)
        if layout == "barriers" and next(names) == "there":
            stages = shape[0] // 2
            found.every = [Alone(found.every[at % stages], at // stages) for at in range(2 * stages)]
        return found

    module.gl.allocate_shared_memory = allocated


def never_cleared(module: Any) -> None:
    store = module.gl.store

    def unless(pointer: Pointer, value: Any, mask: Any = None) -> None:
        if len(pointer.memory) != 2 * LINE:
            store(pointer, value, mask)

    module.gl.store = unless


def shared_out(module: Any) -> None:
    """Two CTAs that find the same number."""
    take_once = module.gl.inline_asm_elementwise
    module.gl.inline_asm_elementwise = lambda *given, **how: take_once(*given, **how) // 2


def one_frees_for_all(module: Any) -> None:
    init = module.mbarrier.init
    module.mbarrier.init = lambda barrier, count: init(barrier, 1)


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(without("wait", name), id=f"no wait for {name}") for name in BARRIERS),
        pytest.param(one_barrier_of_a_stage, id="one bit for two workers"),
        pytest.param(never_cleared, id="the count is never cleared"),
        pytest.param(shared_out, id="blocks are taken twice"),
        pytest.param(one_frees_for_all, id="one worker frees what all read"),
    ],
)
def test_a_missing_wait_is_found(changes: Changes) -> None:
    def all_orders() -> None:
        for seed in range(30):
            run(2, 4, 16 * 14, (4, 20)[seed % 2], 1 + seed % 2, seed, changes=changes)

    with pytest.raises(AssertionError):
        all_orders()


@pytest.mark.parametrize(
    ("what", "name"), [("expect", "there"), *(("arrive", name) for name in BARRIERS if name != "there")]
)
def test_who_waits_for_ever_is_found(what: str, name: str) -> None:
    with pytest.raises(Deadlock):
        run(2, 4, 16 * 6, 20, 1, 0, changes=without(what, name))
