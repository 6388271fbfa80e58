"""Waiting for torch.distributed without being at its mercy."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Protocol


class Work(Protocol):
    """The part of torch.distributed's Work that is needed to wait without hanging."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


class InThread:
    """A blocking call that nothing can interrupt, made into a `Work`: a thread makes the call, the caller can leave."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._done = threading.Event()
        self._error: BaseException | None = None
        _hand_over(self)

    def run(self) -> None:
        """Make the call; in the thread that was found for it."""
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:  # raised again by `wait`, in the thread that asked
            self._error = error
        finally:
            self._call = None  # what it holds must not live as long as this
            self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def await_completion(self, seconds: float) -> bool:
        """Sleep until the call is over, so long at most; whether it is."""
        return self._done.wait(seconds)

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


# Threads whose last call is over, for the next one; a thread whose call never ends is never among them.
_idle: list[queue.SimpleQueue[InThread]] = []


def _hand_over(work: InThread) -> None:
    try:
        _idle.pop().put(work)  # one step: two callers never find the same one
    except IndexError:
        inbox: queue.SimpleQueue[InThread] = queue.SimpleQueue()
        inbox.put(work)
        threading.Thread(target=_serve, args=(inbox,), name="undertow-wait", daemon=True).start()


def _serve(inbox: queue.SimpleQueue[InThread]) -> None:
    while True:
        inbox.get().run()
        _idle.append(inbox)


os.register_at_fork(after_in_child=_idle.clear)  # a child has none of these threads
