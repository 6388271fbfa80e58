"""Waiting for torch.distributed without being at its mercy."""

from __future__ import annotations

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
        self._done = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._run, args=(call,), name="undertow-wait", daemon=True).start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # raised again by `wait`, in the thread that asked
            self._error = error
        finally:
            self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
