"""Blocking calls in threads that serve one call after the other."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from undertow.fabric.works import InThread


class Held:
    """Something that a call holds."""


def finished(call: object) -> InThread:
    work = InThread(call)  # type: ignore[arg-type]
    assert work.await_completion(10)
    return work


def test_calls_one_after_the_other_share_a_thread() -> None:
    seen: set[int] = set()
    for _ in range(50):
        finished(lambda: seen.add(threading.get_ident()))
    assert len(seen) <= 3  # the thread may not stand among the idle ones yet when the next call comes


def test_a_call_that_never_ends_keeps_its_thread_to_itself() -> None:
    end = threading.Event()
    stuck = InThread(lambda: end.wait(30))
    assert not stuck.await_completion(0.02)
    finished(lambda: None).wait()
    end.set()
    assert stuck.await_completion(10)


def test_what_a_call_holds_is_let_go() -> None:
    held = Held()
    gone = weakref.ref(held)
    work = finished(lambda held=held: None)
    del held
    gc.collect()
    assert gone() is None
    work.wait()


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_whatever_a_call_raises_is_raised_by_wait(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("so")

    with pytest.raises(kind, match="so"):
        finished(fail).wait()
