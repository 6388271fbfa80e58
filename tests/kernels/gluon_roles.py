"""The roles of a warp-specialised Gluon kernel, run without a GPU: its own Python, on a stand-in for Gluon's language.

Roles hand over at every barrier, load and store of shared memory (`random_orders.py`). It is drawn at random, too, when
a bulk copy lands and when a wgmma reads its stages, between its issue and the wait for it. So a hand-over that is
missing shows as wrong numbers, one that never comes as `Deadlock`. A role or group is one thread here: what its own
warps must wait for, and all of memory ordering, is for those who read the PTX.
"""

from __future__ import annotations

import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from random_orders import Role, World, plain


class Gpu(World):
    """With bulk copies, which are under way, and each role's own wgmma, which read in their order."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.issued: defaultdict[Role, deque[Multiplication]] = defaultdict(deque)  # not waited for

    def events(self) -> Iterator[tuple[float, Callable[[], None]]]:
        yield from super().events()
        for every in self.issued.values():
            reads = [one.read for one in every if not one.done]
            if reads:
                yield self.pace, reads[0]


class Barrier:
    """An mbarrier: a phase is over when all have arrived and all bytes that were expected have come."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, arrivals: int = 1, expected: int = 0, came: int = 0) -> None:
        self.missing -= arrivals
        self.bytes += expected - came
        assert self.missing >= 0, "more arrivals than a phase has"
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def over(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Pointer:
    """Elements of a tensor, or of a list of pointers."""

    def __init__(self, memory: Any, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = types.SimpleNamespace(element_ty=getattr(memory, "dtype", None))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)

    def to(self, dtype: Any) -> Pointer:
        return self


class Block:
    """Some of shared memory."""

    def __init__(self, world: World, data: torch.Tensor) -> None:
        self.world, self.data, self.dtype = world, data, data.dtype
        self.type = types.SimpleNamespace(shape=list(data.shape))

    def index(self, at: int) -> Block:
        return Block(self.world, self.data[at])

    def permute(self, order: tuple[int, ...]) -> Block:
        return Block(self.world, self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Block:
        return Block(self.world, self.data.view(shape))

    def load(self, layout: Any) -> torch.Tensor:
        self.world.pause()
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        """In pieces, between which others run."""
        for mine, given in zip(self.data.chunk(4), value.chunk(4), strict=True):
            self.world.pause()
            mine.copy_(given)


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, count: int) -> None:
        self.every = [Barrier() for _ in range(count)]

    def index(self, at: int) -> Barrier:
        return self.every[at]


class Descriptor:
    """A matrix as bulk copies read it: zeros beyond its ends."""

    def __init__(self, matrix: torch.Tensor, block: tuple[int, int]) -> None:
        self.matrix, self.block, self.dtype, self.layout = matrix, block, matrix.dtype, None
        self.block_type = types.SimpleNamespace(nbytes=block[0] * block[1] * matrix.element_size())

    def read(self, row: int, column: int) -> torch.Tensor:
        found = torch.zeros(self.block, dtype=self.dtype)
        there = self.matrix[row : row + self.block[0], column : column + self.block[1]]
        found[: there.shape[0], : there.shape[1]] = there
        return found


class Multiplication:
    """A wgmma under way."""

    def __init__(self, a: Block, b: Block, total: torch.Tensor | Multiplication) -> None:
        self.a, self.b, self.total = a, b, total
        self.done = False

    def read(self) -> None:
        before = self.total if isinstance(self.total, torch.Tensor) else self.total.total
        assert isinstance(before, torch.Tensor)
        self.total, self.done = before + self.a.data.float() @ self.b.data.float(), True


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, torch.Tensor) and condition.dim():
        return torch.where(condition, yes, no)
    return yes if condition else no


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0, volatile: bool = False) -> Any:
    if isinstance(pointer.memory, list):
        return pointer.memory[int(pointer.at)]
    if mask is None:
        return pointer.memory[pointer.at].clone()
    at, inside = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(mask))
    found = torch.full(at.shape, other, dtype=pointer.memory.dtype)
    found[inside] = pointer.memory[at[inside]]
    return found


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    if mask is None:
        pointer.memory[pointer.at] = value
        return
    at, inside = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(mask))
    pointer.memory[at[inside]] = value[inside]


def language(world: World, poll: str, release: str) -> types.SimpleNamespace:
    """As much of Gluon's language as the kernel uses. `poll`, `release`: its assembly, whose sense this knows."""

    def assembly(text: Any, constraints: str, given: list[Any], **how: Any) -> Any:
        if text == poll:
            pointer, target, wanted = given[:3]
            word, least = int(pointer.at[0]), int(target[0])
            if wanted[0]:
                world.pause(lambda: 0 <= int(pointer.memory[word]) - least < 16)
        else:
            assert text == release
            world.pause()
            pointer, value, wanted = given
            pointer.memory[pointer.at[wanted != 0]] = value[wanted != 0].to(pointer.memory.dtype)
            world.pause()  # others may see it before this role goes on
        return torch.zeros_like(given[1])

    def shared(dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            return Barriers(shape[0])
        return Block(world, torch.full(shape, float("nan"), dtype=dtype))

    def specialise(roles: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
        program = world.current.place
        started = [world.start(program, lambda one=one: one[0](*one[1])) for one in roles]  # type: ignore[misc]
        world.pause(lambda: all(role.over for role in started))

    return types.SimpleNamespace(
        program_id=lambda axis: world.current.place, load=_load, store=_store, where=_where,
        maximum=lambda a, b: max(int(a), int(b)), max=lambda value, axis: value.max(), cdiv=lambda a, b: -(-a // b),
        multiple_of=lambda value, by: value, static_range=range, thread_barrier=world.pause,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), inline_asm_elementwise=assembly,
        arange=lambda first, end, layout: torch.arange(first, end), allocate_shared_memory=shared,
        warp_specialize=specialise, float32=torch.float32, int32=torch.int64, int64=torch.int64,
        **dict.fromkeys(
            ("NVMMADistributedLayout", "SwizzledSharedLayout", "BlockedLayout", "SliceLayout"), lambda *shape: None
        ),
    )  # fmt: skip


def barriers(world: World) -> types.SimpleNamespace:
    """As `mbarrier`."""

    def arrive(barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        world.pause()
        if pred:
            barrier.arrive(count)
            world.pause()  # others may see it before this role goes on

    return types.SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=lambda barrier, count: barrier.init(count), arrive=arrive,
        wait=lambda barrier, phase: world.pause(lambda: barrier.over(phase)),
        expect=lambda barrier, size: barrier.arrive(1, expected=size),
    )  # fmt: skip


@contextmanager
def standing_in(module: Any, world: Gpu, release: str, activated: Callable[..., Any]) -> Iterator[None]:
    """The module's device functions as plain ones, on this world."""

    def copy(descriptor: Descriptor, corner: list[int], barrier: Barrier, block: Block) -> None:
        def land() -> None:
            block.data.copy_(descriptor.read(int(corner[0]), int(corner[1])))
            barrier.arrive(0, came=descriptor.block_type.nbytes)

        block.data.fill_(float("nan"))  # from now on it may be written
        world.under_way.append(land)
        world.pause()

    def multiply(a: Block, b: Block, total: Any, is_async: bool) -> Multiplication:
        world.issued[world.current].append(Multiplication(a, b, total))
        return world.issued[world.current][-1]

    def wait(num_outstanding: int, deps: tuple[Any]) -> Any:
        world.pause()
        issued = world.issued[world.current]
        while len(issued) > num_outstanding:
            first = issued.popleft()
            if not first.done:
                first.read()
        return deps[0] if num_outstanding or isinstance(deps[0], torch.Tensor) else deps[0].total

    poll = module._POLL.value
    with plain(module):
        module.gl, module.mbarrier = language(world, poll, release), barriers(world)
        module.tma = types.SimpleNamespace(async_copy_global_to_shared=copy)
        module.warpgroup_mma, module.warpgroup_mma_wait, module.activated = multiply, wait, activated
        yield
