"""Atomics, copies and waits on raw addresses: the CPU fabric's device code, compiled by Numba.

Memory ordering is in the names. A *release* makes every earlier store of this thread visible to whoever *acquires*
the same word. x86 would forgive a missing one; the generated LLVM says what was asked for, and a test reads it.

Waits spin briefly (two free cores: the word changes within a microsecond), then give the core away (more ranks than
cores: the writer needs it), then sleep in small steps. They run without the GIL and return after a *slice* of at
most 50 ms, so that Python can look at Ctrl-C, deadlines and lost ranks in between.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ARRIVED, SLICE_OVER, ABORTED = 0, 1, 2

SPINS = 4000  # about 40 us of polling with a pause in between
YIELDS = 200
SLEEPS = 250  # of 100 us: the slice ends after at most 50 ms even where the kernel rounds sleeps up
SLEEP_MICROSECONDS = 100

_RELAX = {"x86_64": "llvm.x86.sse2.pause"}.get(platform.machine(), "")


def _atomic(emit: Callable[[Any, Any, Any], Any], result: Any, *arguments: Any) -> Any:
    """A Numba intrinsic that emits one LLVM operation on a 32-bit word at an address."""

    def declare(typing_context: Any, *given: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            word = builder.inttoptr(values[0], ir.IntType(32).as_pointer())
            return emit(context, builder, (word, *values[1:]))

        return result(types.uintp, *arguments), generate

    return declare


@intrinsic  # type: ignore[untyped-decorator]
def load_acquire(typing_context: Any, address: Any) -> Any:
    """The word at `address`; later loads of this thread happen after it."""

    def emit(_: Any, builder: Any, values: Any) -> Any:
        return builder.load_atomic(values[0], ordering="acquire", align=4)

    return _atomic(emit, types.int32)(typing_context, address)


@intrinsic  # type: ignore[untyped-decorator]
def store_release(typing_context: Any, address: Any, value: Any) -> Any:
    """Set the word at `address`; earlier stores of this thread are visible before it."""

    def emit(context: Any, builder: Any, values: Any) -> Any:
        builder.store_atomic(values[1], values[0], ordering="release", align=4)
        return context.get_dummy_value()

    return _atomic(emit, types.void, types.int32)(typing_context, address, value)


@intrinsic  # type: ignore[untyped-decorator]
def add_release(typing_context: Any, address: Any, amount: Any) -> Any:
    """Add to the word at `address` and return what it was; earlier stores of this thread are visible before it."""

    def emit(_: Any, builder: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", values[0], values[1], ordering="release")

    return _atomic(emit, types.int32, types.int32)(typing_context, address, amount)


@intrinsic  # type: ignore[untyped-decorator]
def exchange_if_equal(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Replace `expected` by `value` in one step, acquiring and releasing; whether it was `expected`."""

    def emit(_: Any, builder: Any, values: Any) -> Any:
        pair = builder.cmpxchg(values[0], values[1], values[2], ordering="acq_rel", failordering="acquire")
        return builder.extract_value(pair, 1)

    return _atomic(emit, types.boolean, types.int32, types.int32)(typing_context, address, expected, value)


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(typing_context: Any, destination: Any, source: Any, count: Any) -> Any:
    """memcpy of `count` bytes between two addresses that do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(64)
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, word])
        arguments = [builder.inttoptr(values[0], pointer), builder.inttoptr(values[1], pointer), values[2]]
        builder.call(memcpy, [*arguments, ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def relax(typing_context: Any) -> Any:
    """Tell the core that this is a polling loop."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if _RELAX:
            pause = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), _RELAX)
            builder.call(pause, [])
        return context.get_dummy_value()

    return types.void(), generate


_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


def _compiled(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return numba.njit(signature, nogil=True, cache=True)  # type: ignore[no-any-return]


@_compiled("int32(uintp)")
def load(address: int) -> Any:
    """The word at `address`, acquired."""
    return load_acquire(address)


@_compiled("void(uintp, int32)")
def store(address: int, value: int) -> None:
    """Set the word at `address`, releasing this thread's earlier stores."""
    store_release(address, value)


@_compiled("int32(uintp, int32)")
def add(address: int, amount: int) -> Any:
    """Add to the word at `address`, releasing this thread's earlier stores; what it was before."""
    return add_release(address, amount)


@_compiled("boolean(uintp, int32, int32)")
def compare_and_set(address: int, expected: int, value: int) -> Any:
    """Replace `expected` by `value` at `address` in one step; whether it was `expected`."""
    return exchange_if_equal(address, expected, value)


@_compiled("void(uintp, uintp, int64)")
def copy(destination: int, source: int, count: int) -> None:
    """Copy `count` bytes."""
    copy_bytes(destination, source, count)


@_compiled("void(uintp, uintp, int64, uintp, int32)")
def copy_then_add(destination: int, source: int, count: int, signal: int, amount: int) -> None:
    """Copy `count` bytes, then release-add `amount`: who acquires the signal sees the bytes."""
    copy_bytes(destination, source, count)
    add_release(signal, amount)


@_compiled("int32(uintp, int32, uintp)")
def wait(signal: int, target: int, abort: int) -> Any:
    """Wait for one slice until the word at `signal` reaches `target` (cyclic compare), acquiring it.

    Returns ARRIVED, SLICE_OVER or ABORTED (the word at `abort` became non-zero).
    """
    for _ in range(SPINS):
        if numba.int32(load_acquire(signal) - target) >= 0:
            return ARRIVED
        relax()
    for _ in range(YIELDS):
        if numba.int32(load_acquire(signal) - target) >= 0:
            return ARRIVED
        _sched_yield()
    for _ in range(SLEEPS):
        if numba.int32(load_acquire(signal) - target) >= 0:
            return ARRIVED
        if load_acquire(abort) != 0:
            return ABORTED
        _usleep(SLEEP_MICROSECONDS)
    return SLICE_OVER


@_compiled("int32(uintp, int32, uintp, uintp, uintp, int64)")
def wait_then_copy(signal: int, target: int, abort: int, destination: int, source: int, count: int) -> Any:
    """`wait`, then copy `count` bytes if the signal arrived: one call on the latency path."""
    status = wait(signal, target, abort)
    if status == ARRIVED:
        copy_bytes(destination, source, count)
    return status
