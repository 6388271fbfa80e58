"""Triton's language as warps of `triton_warps.py` speak it: as much of it as the kernels use."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import inline_assembly
import numpy as np
from triton_warps import THREADS, WARPS, Element, Gpus, Pointer, PointerTo, Tensor, Warp, tensor


class Outcome:
    """What a scalar atomic found. Who uses it meets the others: it comes from the first warp."""

    def __init__(self, find: Callable[[], int]) -> None:
        self._find, self._found = find, False
        self._value = 0

    def value(self) -> int:
        if not self._found:
            self._value, self._found = self._find(), True
        return self._value

    def __eq__(self, other: object) -> Any:
        return self.value() == other

    def __lt__(self, other: Any) -> Any:
        return self.value() < other

    def __floordiv__(self, other: Any) -> Any:
        return tensor(self.value() // other)

    __hash__ = None  # type: ignore[assignment]


class _Memory:
    """What touches it."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus = gpus

    @property
    def warp(self) -> Warp:
        found = self.gpus.current.place
        assert isinstance(found, Warp)
        return found

    def load(
        self, pointer: Pointer, mask: Any = None, other: Any = None, volatile: bool = False, eviction_policy: str = ""
    ) -> Tensor:
        """All elements, by each warp. Volatile ones in two parts, between which others run."""
        kind = pointer.dtype.element_ty.kind
        shape = np.broadcast_shapes(pointer.address.shape, np.shape(mask) if mask is not None else ())
        addresses = np.broadcast_to(pointer.address, shape).reshape(-1)
        wanted = np.ones(addresses.shape, bool) if mask is None else np.broadcast_to(mask, shape).reshape(-1)
        found = np.full(addresses.shape, 0 if other is None else other, kind)
        for part in np.array_split(np.flatnonzero(wanted), 2 if volatile else 1):
            if len(part):
                self.gpus.pause()
                found[part] = self.warp.load(np.asarray(addresses[part]), kind)
        return tensor(found.reshape(shape))

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        shape = np.broadcast_shapes(pointer.address.shape, np.shape(value), np.shape(mask) if mask is not None else ())
        held = self.warp.held(int(np.prod(shape)), once=True)
        if mask is not None:
            held = held[np.broadcast_to(mask, shape).reshape(-1)[held]]
        if len(held):
            self.gpus.pause()
            values = np.broadcast_to(np.asarray(value).astype(pointer.dtype.element_ty.kind), shape).reshape(-1)
            self.warp.store(np.asarray(np.broadcast_to(pointer.address, shape).reshape(-1)[held]), values[held])

    def atomic_add(self, pointer: Pointer, value: int, sem: str, scope: str) -> Outcome:
        """By the first warp. One that adds nothing and finds nothing new waits until something has changed."""
        warp, cta = self.warp, self.warp.cta
        warp.atomics += 1
        number = warp.atomics
        if warp.number == 0:
            self.gpus.pause()
            address = np.asarray(pointer.address).reshape(1)
            if sem in ("release", "acq_rel"):
                warp.covered()
            if value == 0 and cta.polled:
                warp.wait_for_change(cta.polled)
            before = warp.load(address, pointer.dtype.element_ty.kind)
            cta.results[number] = cta.published = int(before[0])
            if value:
                self.gpus.put(address, before + value)
            else:
                cta.polled = dict([warp.seen(int(address[0])), warp.seen(None)])

        def find() -> int:
            warp.meet()
            if number not in cta.results:
                # Warps that decide by their own clocks may part: then what was published last is still there, and those
                # who still wait do so for time to pass.
                warp.wait_for_change(dict([warp.seen(None)]))
                return cta.published
            return cta.results[number]

        return Outcome(find)


class _Assembly:
    """`inline_asm_elementwise`: a thread for each element that a warp holds."""

    def __init__(self, memory: _Memory) -> None:
        self.memory = memory

    def __call__(
        self, text: Any, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int, _semantic: Any = None
    ) -> Any:
        warp = self.memory.warp
        kinds = dtype if isinstance(dtype, list) else [dtype]
        given = np.broadcast_arrays(*(one.address if isinstance(one, Pointer) else np.asarray(one) for one in args))
        shape = given[0].shape if given else ()
        flat = [one.reshape(-1) for one in given]
        masks = [(1 << 8 * one.dtype.itemsize) - 1 for one in flat]
        found = [np.zeros(shape, kind.kind) for kind in kinds]
        held = warp.held(int(np.prod(shape)), once=False)
        for some in held.reshape(THREADS, -1).T:
            threads = [
                inline_assembly.run(
                    text, [int(one[at]) & mask for one, mask in zip(flat, masks, strict=True)], len(kinds),
                    warp.number * THREADS + thread, warp,
                )
                for thread, at in enumerate(some)
            ]  # fmt: skip
            for at, results in zip(some, _together(threads, warp), strict=True):
                for kept, result in zip(found, results, strict=True):
                    kept.reshape(-1)[at] = np.array(result, "u4").view(kept.dtype)
        tensors = [tensor(one) for one in found]
        return tensors if isinstance(dtype, list) else tensors[0]


def _together(threads: list[Any], warp: Warp) -> list[list[int]]:
    """The threads of a warp, one after the other up to each barrier."""
    results: list[Any] = [None] * len(threads)
    sent: bool | None = None
    while True:
        brought = []
        for at, thread in enumerate(threads):
            try:
                brought.append(thread.send(sent))
            except StopIteration as end:
                results[at] = end.value
        if not brought:
            return results
        assert len(brought) == len(threads), "some threads of a warp miss a barrier"
        sent = warp.meet(any(brought))


def _where(condition: Any, yes: Any, no: Any) -> Tensor:
    return tensor(np.where(np.asarray(condition), np.asarray(yes), np.asarray(no)))


def _split(value: Tensor) -> tuple[Tensor, Tensor]:
    return value[..., 0], value[..., 1]


def language(gpus: Gpus) -> types.SimpleNamespace:
    """As `triton.language`, for all the modules of a kernel."""
    memory = _Memory(gpus)
    elements = {name: Element(getattr(np, name)) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16")}
    elements |= {name: Element(getattr(np, name)) for name in ("float16", "float32")}

    def maximum(value: Tensor, axis: int) -> Any:
        """Of one element a thread: among all warps. Of anything else: each warp's own."""
        warp = memory.warp
        if value.shape != (WARPS * THREADS,):
            return value.max(axis)
        warp.maxima += 1
        parts = warp.cta.parts[warp.maxima]
        parts.append(value[warp.held(value.size, once=True)].max())
        warp.meet()
        return tensor(max(parts))

    def static_assert(condition: Any, message: str = "") -> None:
        assert condition, message

    return types.SimpleNamespace(
        **elements, constexpr=None, pointer_type=PointerTo, load=memory.load, store=memory.store,
        atomic_add=memory.atomic_add, debug_barrier=lambda: memory.warp.meet(),
        inline_asm_elementwise=_Assembly(memory),
        program_id=lambda axis: tensor(memory.warp.cta.program, np.int32),
        num_programs=lambda axis: tensor(memory.warp.cta.launch.ctas, np.int32),
        where=_where, max=maximum, sum=lambda value, axis: value.sum(axis), static_assert=static_assert,
        maximum=lambda a, b: tensor(np.maximum(a, b)), minimum=lambda a, b: tensor(np.minimum(a, b)),
        cdiv=lambda a, b: -(-a // b), multiple_of=lambda value, by: value, static_range=range,
        range=lambda *bounds, **how: range(*bounds), cast=lambda value, kind: tensor(value, kind.kind),
        zeros=lambda shape, kind: tensor(np.zeros(shape, kind.kind)), zeros_like=lambda one: tensor(np.zeros_like(one)),
        full=lambda shape, value, kind: tensor(np.full(shape, value, kind.kind)),
        arange=lambda first, end: tensor(np.arange(first, end, dtype=np.int32)), split=_split,
        reshape=lambda one, to: one.reshape(to), permute=lambda one, axes: one.transpose(axes),
        join=lambda low, high: tensor(np.stack([low, high], -1)),
        dot=lambda a, b, total: tensor(total + a.astype(np.float32) @ b.astype(np.float32)),
    )  # fmt: skip


def launching(gpus: Gpus, patient: bool) -> types.SimpleNamespace:
    """What a launch has to do with the one before and the one behind it, and the clock: `patient`, the idle one."""

    def wait() -> None:
        before = gpus.current.place.cta.launch.before
        gpus.pause(lambda: before is None or before.over())

    def let_in() -> None:
        gpus.pause()
        cta = gpus.current.place.cta
        cta.launch.said.add(cta.program)

    return types.SimpleNamespace(
        gdc_wait=wait, gdc_launch_dependents=let_in, globaltimer=lambda: gpus.current.place.time(patient)
    )
