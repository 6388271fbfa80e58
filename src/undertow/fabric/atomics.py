"""Atomics, copies and waits on raw addresses: the CPU fabric's device code, compiled by Numba.

Memory ordering is in the names. A *release* makes every earlier store of this thread visible to whoever *acquires*
the same word. x86 would forgive a missing one; the generated LLVM says what was asked for, and a test reads it.

Waits spin briefly (two free cores: the word changes within a microsecond), then sleep until the writer wakes them; they
never yield, for whoever yields on a busy core comes last when it is his turn. They run without the GIL and return after
a *slice* of at most 50 ms, so that Python can look at Ctrl-C, deadlines and lost ranks in between.

A *signal* is a word with another one behind it, which counts who sleeps: so a writer makes a system call only if
somebody does. Sleeper: count itself, look at the signal, sleep unless it has changed since. Writer: change the signal,
look at the count. Both change first and look then, in one order for all (sequentially consistent), so one of them sees
the other. A sleeper looks by itself after 2 ms, too, as a word may be written by those who know nothing of this.
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

from . import machine_code

ARRIVED, SLICE_OVER, ABORTED = 0, 1, 2

SPINS = 1000  # about 10 us of polling with a pause in between, where every rank has a core
SPINS_CROWDED = 100  # where it has not: whoever is waited for may need this one
SLEEPS = 25  # of 2 ms
SLEEPERS = 4  # bytes from a signal to the count of those who sleep
_SLEEP_NANOSECONDS = 2_000_000
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1) if platform.system() == "Linux" else -1
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 2**31 - 1
_MONOTONIC, _ABSOLUTE = 1, 1  # CLOCK_MONOTONIC, TIMER_ABSTIME

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
def add_in_order(typing_context: Any, address: Any, amount: Any) -> Any:
    """As `add_release`, and in one order with all others of these: later looks of this thread come after it."""

    def emit(_: Any, builder: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", values[0], values[1], ordering="seq_cst")

    return _atomic(emit, types.int32, types.int32)(typing_context, address, amount)


@intrinsic  # type: ignore[untyped-decorator]
def exchange_in_order(typing_context: Any, address: Any, value: Any) -> Any:
    """Set the word and return what it was; ordered as `add_in_order`."""

    def emit(_: Any, builder: Any, values: Any) -> Any:
        return builder.atomic_rmw("xchg", values[0], values[1], ordering="seq_cst")

    return _atomic(emit, types.int32, types.int32)(typing_context, address, value)


@intrinsic  # type: ignore[untyped-decorator]
def load_in_order(typing_context: Any, address: Any) -> Any:
    """As `load_acquire`, in one order with the two above."""

    def emit(_: Any, builder: Any, values: Any) -> Any:
        return builder.load_atomic(values[0], ordering="seq_cst", align=4)

    return _atomic(emit, types.int32)(typing_context, address)


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


@intrinsic  # type: ignore[untyped-decorator]
def sleep_while(typing_context: Any, address: Any, seen: Any) -> Any:
    """Sleep until somebody wakes the sleepers of the word at `address`, 2 ms at most.

    Not if the word is not `seen` any more, where the system can tell that and going to sleep apart from a change.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        if _FUTEX < 0:  # a system without: look again after a short sleep
            usleep = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
            function = cgutils.get_or_insert_function(builder.module, usleep, "usleep")
            builder.call(function, [ir.Constant(ir.IntType(32), _SLEEP_NANOSECONDS // 1000)])
            return context.get_dummy_value()
        timeout = cgutils.alloca_once(builder, ir.ArrayType(word, 2))
        builder.store(ir.Constant(timeout.type.pointee, [0, _SLEEP_NANOSECONDS]), timeout)
        _call_futex(builder, values[0], _FUTEX_WAIT, builder.sext(values[1], word), builder.ptrtoint(timeout, word))
        return context.get_dummy_value()

    return types.void(types.uintp, types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def wake_all(typing_context: Any, address: Any) -> Any:
    """End the sleep of all who wait for the word at `address`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        none = ir.Constant(ir.IntType(64), 0)
        if _FUTEX >= 0:
            _call_futex(builder, values[0], _FUTEX_WAKE, ir.Constant(ir.IntType(64), _ALL), none)
        return context.get_dummy_value()

    return types.void(types.uintp), generate


@intrinsic  # type: ignore[untyped-decorator]
def sleep_until(typing_context: Any, nanoseconds: Any) -> Any:
    """Sleep until the monotonic clock (`time.perf_counter_ns` on Linux) shows `nanoseconds`; not if it already does."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word, number = ir.IntType(64), ir.IntType(32)
        moment = cgutils.alloca_once(builder, ir.ArrayType(word, 2))
        second = ir.Constant(word, 10**9)
        for index, value in enumerate((builder.sdiv(values[0], second), builder.srem(values[0], second))):
            place = [ir.Constant(number, 0), ir.Constant(number, index)]
            builder.store(value, builder.gep(moment, place, inbounds=True))
        kind = ir.FunctionType(number, [number, number, moment.type, moment.type])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_nanosleep")
        clock, absolute = ir.Constant(number, _MONOTONIC), ir.Constant(number, _ABSOLUTE)
        builder.call(function, [clock, absolute, moment, ir.Constant(moment.type, None)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def now(typing_context: Any) -> Any:
    """The monotonic clock, in nanoseconds, as for `sleep_until`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word, number = ir.IntType(64), ir.IntType(32)
        moment = cgutils.alloca_once(builder, ir.ArrayType(word, 2))
        kind = ir.FunctionType(number, [number, moment.type])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [ir.Constant(number, _MONOTONIC), moment])
        seconds, rest = (
            builder.load(builder.gep(moment, [ir.Constant(number, 0), ir.Constant(number, index)], inbounds=True))
            for index in range(2)
        )
        return builder.add(builder.mul(seconds, ir.Constant(word, 10**9)), rest)

    return types.int64(), generate


def _call_futex(builder: Any, address: Any, operation: int, value: Any, timeout: Any) -> None:
    """The system call, for memory that processes share."""
    word = ir.IntType(64)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(word, [word], var_arg=True), "syscall")
    number, what, none = (ir.Constant(word, each) for each in (_FUTEX, operation, 0))
    builder.call(function, [number, address, what, value, timeout, none, none])


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiled when it is defined, once for all processes; it runs without the GIL."""
    return lambda function: machine_code.compiled(function, signature)


@compiled("int32(uintp)")
def load(address: int) -> Any:
    """The word at `address`, acquired."""
    return load_acquire(address)


@compiled("void(uintp, int32)")
def store(address: int, value: int) -> None:
    """Set the word at `address`, releasing this thread's earlier stores."""
    store_release(address, value)


@compiled("boolean(uintp, int32, int32)")
def compare_and_set(address: int, expected: int, value: int) -> Any:
    """Replace `expected` by `value` at `address` in one step; whether it was `expected`."""
    return exchange_if_equal(address, expected, value)


@compiled("void(uintp, uintp, int64)")
def copy(destination: int, source: int, count: int) -> None:
    """Copy `count` bytes."""
    copy_bytes(destination, source, count)


@compiled("void(uintp, uintp, int64, int64, int64, float64)")
def copy_paced(destination: int, source: int, count: int, block: int, begin: int, speed: float) -> None:
    """Copy `count` bytes as a link of `speed` bytes a nanosecond would that begins at `begin` (nanoseconds), asleep
    for most of the time: so many bytes at a time as `block` says, none done before its moment.
    """
    for first in range(0, count, block):
        size = min(block, count - first)
        copy_bytes(destination + first, source + first, size)
        sleep_until(begin + numba.int64((first + size) / speed))


@compiled("void(uintp, int32)")
def signal_set(signal: int, value: int) -> None:
    """Set a signal and wake who waits for it; releases this thread's earlier stores."""
    exchange_in_order(signal, value)
    if load_in_order(signal + SLEEPERS) != 0:
        wake_all(signal)


@compiled("int32(uintp, int32)")
def signal_add(signal: int, amount: int) -> Any:
    """Add to a signal and wake who waits for it; releases this thread's earlier stores. What it was before."""
    before = add_in_order(signal, amount)
    if load_in_order(signal + SLEEPERS) != 0:
        wake_all(signal)
    return before


@compiled("void(uintp, uintp, int64, uintp, int32)")
def copy_then_signal(destination: int, source: int, count: int, signal: int, amount: int) -> None:
    """Copy `count` bytes, then `signal_add`: who acquires the signal sees the bytes."""
    copy_bytes(destination, source, count)
    signal_add(signal, amount)


@compiled("int32(uintp, int32, uintp, int64)")
def wait(signal: int, target: int, abort: int, spins: int) -> Any:
    """Wait for one slice until the signal reaches `target` (cyclic compare), acquiring it; poll `spins` times at first.

    Returns ARRIVED, SLICE_OVER or ABORTED (the word at `abort` became non-zero).
    """
    for _ in range(spins):
        if numba.int32(load_acquire(signal) - target) >= 0:
            return ARRIVED
        relax()
    for _ in range(SLEEPS):
        if load_acquire(abort) != 0:
            return ABORTED
        add_in_order(signal + SLEEPERS, 1)
        seen = load_in_order(signal)
        if numba.int32(seen - target) < 0:
            sleep_while(signal, seen)
        add_in_order(signal + SLEEPERS, -1)
        if numba.int32(load_acquire(signal) - target) >= 0:
            return ARRIVED
    return SLICE_OVER


@compiled("int32(uintp, int32, uintp, int64, uintp, uintp, int64)")
def wait_then_copy(signal: int, target: int, abort: int, spins: int, destination: int, source: int, count: int) -> Any:
    """`wait`, then copy `count` bytes if the signal arrived: one call on the latency path."""
    status = wait(signal, target, abort, spins)
    if status == ARRIVED:
        copy_bytes(destination, source, count)
    return status
