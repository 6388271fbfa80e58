"""GPUs on which Triton kernels run without a GPU: their own Python, each warp of each CTA a thread of control.

Every warp runs the whole program with its own values. Warps hand over (`random_orders.py`) at every access to memory,
at every barrier, and where they look at the clock. What is taken from the compiled code, where barriers can be seen:

- a scalar atomic or store is its CTA's first warp's. The result of an atomic comes to the other warps behind a barrier
  that follows it, if anybody uses it; nothing else makes warps meet there
- a tensor's elements belong to warps, which load and store them at times of their own. Everything that a program loads
  is loaded by each warp for itself; so is what is computed of that, and no barrier comes with it (`tl.dot` and sums
  have some, which is left out). Stores of an element are one warp's, inline assembly runs in all that hold it
- only the maximum of what the CTA's threads have one element each of meets in a barrier

Memory. A store waits in its CTA until it lands, in parts and at any time, behind older ones only where these are to the
same place. What a CTA has stored lands before a release of it if the same warp stored it, or one with which it has met
in a barrier since; and before the launch that follows sees this one as ended. Atomics are at once. Loads see what has
landed, and of what has not what a release would cover; they are neither late nor out of date: between the load of a
number and the barrier behind it a thread does nothing that others see. All of memory has one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from random_orders import PACES, World

WARPS, THREADS = 2, 4  # of a CTA, of a warp: small, as are the lines of memory
LANDING = (1 / 32, 2, 64)  # paces of stores: some land late
_REGION = 40  # bits of an address that tell where in a region


@dataclass(frozen=True)
class Element:
    """A type of elements."""

    kind: Any

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * np.dtype(self.kind).itemsize


@dataclass(frozen=True)
class PointerTo:
    element_ty: Element


class Tensor(np.ndarray):  # type: ignore[type-arg]
    """Values of a warp."""

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        if isinstance(kind, PointerTo):
            return Pointer(self, kind.element_ty)
        return self.view(kind.kind) if bitcast else self.astype(kind.kind)


def tensor(value: Any, kind: Any = None) -> Tensor:
    return np.asarray(value, dtype=kind).view(Tensor)


class Pointer:
    """Addresses of elements of one type."""

    def __init__(self, address: Any, element: Element) -> None:
        self.address, self.dtype = tensor(address, np.int64), PointerTo(element)

    def __add__(self, more: Any) -> Pointer:
        size = self.dtype.element_ty.primitive_bitwidth // 8
        return Pointer(self.address + np.asarray(more, np.int64) * size, self.dtype.element_ty)

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        return self.address.to(kind)


@dataclass(eq=False)
class Store:
    """What waits to land."""

    warp: Warp
    addresses: Any
    values: Any
    pace: float
    after: list[Store]
    landed: bool = False
    met: bool = False  # the CTA's warps have met since

    def touches(self, addresses: Any, size: int) -> bool:
        """Whether these elements, or what is between them, lie where it lands, or between that."""
        ends_before = self.addresses.max() + self.values.itemsize <= addresses.min()
        return not (ends_before or addresses.max() + size <= self.addresses.min())


class Cta:
    def __init__(self, launch: Launch, program: int) -> None:
        self.launch, self.program = launch, program
        self.warps = [Warp(self, number) for number in range(WARPS)]
        self.running, self.arrived, self.meetings = WARPS, 0, 0
        self.brought: defaultdict[int, bool] = defaultdict(bool)
        self.results: dict[int, int] = {}  # of atomics
        self.published = 0  # the last of them
        self.polled: dict[Any, int] = {}
        self.parts: defaultdict[int, list[Any]] = defaultdict(list)
        self.waiting: list[Store] = []

    def meet_if_all(self) -> None:
        """A barrier is over when all have arrived that have not ended."""
        if self.arrived and self.arrived == self.running:
            self.arrived, self.meetings = 0, self.meetings + 1
            for one in self.waiting:
                one.met = True


class Warp:
    def __init__(self, cta: Cta, number: int) -> None:
        self.cta, self.number, self.gpu = cta, number, cta.launch.stream.world
        self.atomics = self.maxima = 0

    def meet(self, brings: bool = False) -> bool:
        """The CTA's barrier: whether anybody brought true."""
        self.gpu.pause()
        cta, mine = self.cta, self.cta.meetings
        cta.brought[mine] |= brings
        cta.arrived += 1
        cta.meet_if_all()
        if cta.meetings == mine:
            self.gpu.pause(lambda: cta.meetings != mine)
        return cta.brought[mine]

    def follows(self, one: Store) -> bool:
        """Whether that store comes before whatever this warp does now."""
        return one.met or one.warp is self

    def covered(self, addresses: Any = None, size: int = 0) -> None:
        """What a release of this warp covers lands; or only what lies where these elements do."""
        for one in list(self.cta.waiting):
            if not one.landed and self.follows(one) and (addresses is None or one.touches(addresses, size)):
                for older in [*one.after, one]:
                    self.gpu.land(older)

    def load(self, addresses: Any, kind: Any) -> Any:
        if self.cta.waiting:
            self.covered(addresses, np.dtype(kind).itemsize)
        return self.gpu.memory(addresses, kind)

    def store(self, addresses: Any, values: Any) -> None:
        """In two parts."""
        self.cta.launch.stream.live_on()
        for where, what in zip(np.array_split(addresses, 2), np.array_split(values, 2), strict=True):
            if len(where):
                older = [one for one in self.cta.waiting if self.follows(one) and one.touches(where, what.itemsize)]
                self.cta.waiting.append(Store(self, where, what, self.gpu.draw.choice(LANDING), older))
                self.gpu.waiting.append(self.cta.waiting[-1])

    def held(self, size: int, once: bool) -> Any:
        """Which of `size` elements are this warp's: in whole parts, or (few) one a thread, and again in those left."""
        every = WARPS * THREADS
        if size >= every:
            return np.arange(self.number * size // WARPS, (self.number + 1) * size // WARPS)
        threads = np.arange(self.number * THREADS, (self.number + 1) * THREADS)
        return threads[threads < size] if once else threads % size

    def read(self, address: int, size: int, acquire: bool) -> int:
        self.gpu.pause()
        return int(self.load(np.array([address]), f"u{size}")[0])

    def write(self, address: int, size: int, value: int, release: bool) -> None:
        self.gpu.pause()
        if release:
            self.covered()
        self.store(np.array([address]), np.array([value], f"u{size}"))

    def time(self, patient: bool = False) -> int:
        self.gpu.pause()
        return self.gpu.idle_clock if patient else self.gpu.clock

    def seen(self, address: int | None) -> tuple[Any, int]:
        if address is None:
            return "clock", self.gpu.clock
        return address >> _REGION, self.gpu.writes[address >> _REGION]

    def wait_for_change(self, seen: dict[Any, int]) -> None:
        def changed() -> bool:
            clock = self.gpu.clock
            return any((clock if place == "clock" else self.gpu.writes[place]) != was for place, was in seen.items())

        self.gpu.pause(changed)


@dataclass(eq=False)
class Launch:
    """A grid, at work, from when its stream may begin it. `work`: the kernel, with all of its arguments."""

    stream: Stream
    work: Callable[[], None]
    ctas: int
    before: Launch | None
    begun: int = 0
    ended: int = 0
    said: set[int] = field(default_factory=set)  # that the next one may begin, and not ended
    every: list[Cta] = field(default_factory=list)

    def lets_in(self) -> bool:
        return self.ended + len(self.said) == self.ctas

    def over(self) -> bool:
        return self.ended == self.ctas and not any(cta.waiting for cta in self.every)


class Stream:
    """Launches of a rank, one behind the other. `room`: how many CTAs there are places for, on a GPU of its own or of
    several. `early`: a launch may begin when the one before lets it in."""

    def __init__(self, world: Gpus, room: list[int], early: bool) -> None:
        self.world, self.room, self.early = world, room, early
        self.launches: list[Launch] = []
        self.asked = 0  # launches that the host has asked for
        self.pace = world.draw.choice(PACES)
        self.silent: tuple[int, int] | None = None  # a launch, and a CTA of it that never begins
        self.stores: int | None = None  # with which its GPU is lost; what it has stored may still land

    def add(self, ctas: int, work: Callable[[], None]) -> None:
        self.launches.append(Launch(self, work, ctas, self.launches[-1] if self.launches else None))

    def live_on(self) -> None:
        """Before each store."""
        if self.stores is not None:
            if not self.stores:
                self.world.abandon(lambda warp: warp.cta.launch.stream is self)
            self.stores -= 1

    def events(self) -> Iterator[tuple[float, Callable[[], None]]]:
        if self.stores == -1:
            return
        if self.asked < len(self.launches):
            yield self.pace, self._ask
        for launch in self.launches[: self.asked]:
            if launch.begun == launch.ctas:
                continue
            before = launch.before
            if self.room[0] and (before is None or (before.lets_in() if self.early else before.over())):
                yield self.pace, lambda launch=launch: self._begin(launch)  # type: ignore[misc]
            return

    def _ask(self) -> None:
        self.asked += 1

    def _begin(self, launch: Launch) -> None:
        self.room[0] -= 1
        cta = Cta(launch, launch.begun)
        launch.begun += 1
        launch.every.append(cta)
        if self.silent == (self.launches.index(launch), cta.program):
            return
        for warp in cta.warps:
            self.world.start(warp, lambda warp=warp: self._run(warp))  # type: ignore[misc]

    def _run(self, warp: Warp) -> None:
        cta, launch = warp.cta, warp.cta.launch
        with np.errstate(over="ignore", invalid="ignore"):  # poison, which may be read by the next call
            launch.work()
        cta.running -= 1
        cta.meet_if_all()
        if not cta.running:
            launch.said.discard(cta.program)
            launch.ended += 1
            self.room[0] += 1


class Gpus(World):
    """All of the ranks' GPUs, and their memory."""

    def __init__(self, seed: int, hurry: int = 0, jumps: int = 0) -> None:
        """`hurry`: how often time passes while others could go on; `jumps`: how often when nobody can. `idle_clock`: as
        if time passed only then."""
        super().__init__(seed)
        self.regions: list[Any] = []
        self.writes: defaultdict[int, int] = defaultdict(int)
        self.waiting: list[Store] = []
        self.streams: list[Stream] = []
        self.rush = self.draw.choice((1 / 4, 2, 16))  # the pace of time
        self.clock, self.idle_clock, self.hurry, self.jumps = 1, 1, hurry, jumps

    def hold(self, array: Any) -> int:
        """The address of this memory."""
        assert array.flags.c_contiguous
        self.regions.append(array.reshape(-1).view(np.uint8))
        return len(self.regions) - 1 << _REGION

    def memory(self, addresses: Any, kind: Any) -> Any:
        region, at = self._place(addresses, kind)
        return region[at]

    def land(self, one: Store) -> None:
        if not one.landed:
            one.landed = True
            one.warp.cta.waiting.remove(one)
            self.waiting.remove(one)
            self.put(one.addresses, one.values)

    def put(self, addresses: Any, values: Any) -> None:
        region, at = self._place(addresses, values.dtype)
        region[at] = values
        self.writes[int(addresses.flat[0]) >> _REGION] += 1

    def events(self) -> Iterator[tuple[float, Callable[[], None]]]:
        for one in self.waiting:
            if all(older.landed for older in one.after):
                yield one.pace, lambda one=one: self.land(one)  # type: ignore[misc]
        for stream in self.streams:
            yield from stream.events()
        if self.hurry:
            yield self.rush, self._hurry

    def stuck(self) -> bool:
        self.jumps -= 1
        self.clock += 1
        self.idle_clock += 1
        return self.jumps >= 0

    def _hurry(self) -> None:
        self.hurry -= 1
        self.clock += 1

    def _place(self, addresses: Any, kind: Any) -> tuple[Any, Any]:
        first = int(addresses.flat[0]) >> _REGION
        inside = np.asarray(addresses) - (first << _REGION)
        size = np.dtype(kind).itemsize
        region = self.regions[first].view(kind)
        assert not (inside % size).any()
        assert inside.min() >= 0
        assert inside.max() < len(region) * size, "beyond the end of memory"
        return region, inside // size
