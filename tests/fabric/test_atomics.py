"""x86 forgives a missing acquire or release, so the tests read what was asked of the compiler."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import numba
import numpy as np
import pytest

from undertow.fabric import atomics


def llvm(function: object) -> str:
    """The LLVM text of a compiled function, compiled afresh: a cached one has no text."""
    dispatcher = numba.njit(function.signatures[0], nogil=True)(function.py_func)  # type: ignore[attr-defined]
    (text,) = dispatcher.inspect_llvm().values()
    return str(text)


def positions(text: str, pattern: str) -> list[int]:
    return [match.start() for match in re.finditer(pattern, text)]


@pytest.mark.parametrize("function", [atomics.load, atomics.wait, atomics.wait_then_copy])
def test_every_look_at_a_signal_acquires(function: object) -> None:
    text = llvm(function)
    assert positions(text, r"load atomic i32, .* acquire")
    assert not positions(text, r"load atomic i32, .* (monotonic|unordered)")


def test_the_copy_comes_before_the_release() -> None:
    text = llvm(atomics.copy_then_signal)
    copies, signals = positions(text, r"call void @llvm\.memcpy"), positions(text, r"atomicrmw add .* seq_cst")
    assert len(copies) == len(signals) >= 1
    assert all(copy < release for copy, release in zip(copies, signals, strict=True))


@pytest.mark.parametrize("function", [atomics.signal_set, atomics.signal_add])
def test_a_signal_is_changed_before_the_count_of_sleepers_is_read(function: object) -> None:
    text = llvm(function)
    changes = positions(text, r"atomicrmw (xchg|add) .* seq_cst")
    looks = positions(text, r"load atomic i32, .* seq_cst")
    wakes = positions(text, r"call i64 .*@syscall")
    assert len(changes) == len(looks) == len(wakes) >= 1
    assert all(change < look < wake for change, look, wake in zip(changes, looks, wakes, strict=True))


def test_a_sleeper_counts_itself_before_it_looks_again() -> None:
    text = llvm(atomics.wait)
    counts, looks = positions(text, r"atomicrmw add .* seq_cst"), positions(text, r"load atomic i32, .* seq_cst")
    sleeps = positions(text, r"call i64 .*@syscall")
    assert counts[0] < looks[0] < sleeps[0] < counts[-1]


def test_store_and_exchange_release() -> None:
    assert positions(llvm(atomics.store), r"store atomic i32 .* release")
    assert positions(llvm(atomics.compare_and_set), r"cmpxchg .* acq_rel acquire")


def words(*values: int) -> tuple[np.ndarray, list[int]]:
    array = np.zeros((len(values), 32), dtype=np.int32)
    array[:, 0] = values
    return array, [int(array[row : row + 1].ctypes.data) for row in range(len(values))]


@pytest.mark.parametrize(
    ("seen", "target", "reached"),
    [
        (5, 5, True),
        (6, 5, True),
        (4, 5, False),
        (-(2**31), 2**31 - 1, True),  # one past the largest value is larger
        (2**31 - 1, -(2**31), False),
        (0, -1, True),
    ],
)
def test_comparison_is_cyclic(seen: int, target: int, reached: bool) -> None:
    _keep, (signal, abort) = words(seen, 0)
    assert (atomics.wait(signal, target, abort, atomics.SPINS) == atomics.ARRIVED) == reached


def test_a_slice_is_short_and_an_abort_ends_it() -> None:
    array, (signal, abort) = words(0, 0)
    began = time.perf_counter()
    assert atomics.wait(signal, 1, abort, atomics.SPINS) == atomics.SLICE_OVER
    assert time.perf_counter() - began < 0.5  # 50 ms wanted; a busy machine may take longer
    array[1, 0] = 1
    assert atomics.wait(signal, 1, abort, atomics.SPINS) == atomics.ABORTED


def test_waiting_lets_other_threads_run() -> None:
    """Without the GIL: the signal comes from a thread that needs it."""
    array, (signal, abort) = words(0, 0)

    def later() -> None:
        time.sleep(0.02)
        array[0, 0] = 1

    thread = threading.Thread(target=later)
    thread.start()
    while atomics.wait(signal, 1, abort, atomics.SPINS) != atomics.ARRIVED:
        pass
    thread.join()


@pytest.mark.parametrize("function", [atomics.signal_set, atomics.signal_add])
def test_whoever_sleeps_is_woken(function: Callable[[int, int], object]) -> None:
    """By the writer, not by the clock: over many sleeps, far less time passes than a sleeper takes by itself."""
    _keep, (signal, answer, abort) = words(0, 0, 0)
    rounds = 200

    def answering() -> None:
        for number in range(1, rounds + 1):
            while atomics.wait(signal, number, abort, 0) != atomics.ARRIVED:
                pass
            atomics.signal_set(answer, number)

    thread = threading.Thread(target=answering)
    thread.start()
    times = []
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        function(signal, number if function is atomics.signal_set else 1)
        while atomics.wait(answer, number, abort, 0) != atomics.ARRIVED:
            pass
        times.append(time.perf_counter() - began)
    thread.join()
    assert sorted(times)[rounds // 2] < 1e-3  # tens of microseconds; 2 ms where nobody is woken


def test_sleepers_are_counted_and_leave() -> None:
    array, (signal, abort) = words(0, 0)
    assert atomics.wait(signal, 1, abort, 0) == atomics.SLICE_OVER
    assert array[0, atomics.SLEEPERS // 4] == 0


def test_compare_and_set() -> None:
    array, (word,) = words(3)
    assert not atomics.compare_and_set(word, 4, 9)
    assert atomics.compare_and_set(word, 3, 9)
    assert array[0, 0] == 9


@pytest.mark.parametrize("count", [0, 1, 7, 4096, 100_003])
def test_copies_are_exact(count: int) -> None:
    source = np.random.default_rng(count).integers(0, 255, count + 16, dtype=np.uint8)
    target = np.zeros(count + 16, dtype=np.uint8)
    atomics.copy(int(target.ctypes.data) + 3, int(source.ctypes.data) + 5, count)
    assert np.array_equal(target[3 : 3 + count], source[5 : 5 + count])
    assert not target[:3].any()
    assert not target[3 + count :].any()


def test_a_paced_copy_takes_as_long_as_its_link_would() -> None:
    source = np.random.default_rng(1).integers(0, 255, 100_000, dtype=np.uint8)
    target = np.zeros(100_000, dtype=np.uint8)
    begin = time.perf_counter_ns() + 1_000_000
    # 0.01 bytes a nanosecond: 10 ms, and the millisecond before it begins.
    atomics.copy_paced(int(target.ctypes.data), int(source.ctypes.data), 100_000, 30_000, begin, 0.01)
    taken = time.perf_counter_ns() - begin
    assert np.array_equal(target, source)
    assert taken >= 10_000_000
    assert taken < 200_000_000  # a busy machine wakes it late, but not so late


def test_a_moment_that_has_passed_is_not_waited_for() -> None:
    target = np.zeros(1000, dtype=np.uint8)
    began = time.perf_counter_ns()
    atomics.copy_paced(int(target.ctypes.data), int(target.ctypes.data), 0, 100, 0, 1.0)
    source = np.ones(1000, dtype=np.uint8)
    atomics.copy_paced(int(target.ctypes.data), int(source.ctypes.data), 1000, 100, 0, 1.0)
    assert time.perf_counter_ns() - began < 100_000_000
    assert target.all()
