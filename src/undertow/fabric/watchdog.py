"""The thread that knows who died: one per process, for all its groups.

Local deaths arrive through pidfds (a zombie is dead for a pidfd, alive for `kill(pid, 0)`). Deaths on other nodes
arrive through the store: whoever sees one announces it there, and each node's first rank keeps a heartbeat that the
next node's first rank watches, so that a node lost as a whole is noticed too.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Protocol

from ..errors import UndertowError
from .logs import get_logger

TICK_SECONDS = 0.2
_STOP_SECONDS = 1.0  # for the thread to finish what it is doing


class Watched(Protocol):
    """What the watchdog asks of a group."""

    def watched_processes(self) -> dict[int, int]:
        """Process id of each local peer, by rank."""

    def on_exit(self, rank: int) -> None:
        """The process of `rank` is gone."""

    def on_tick(self, now: float) -> None:
        """Called a few times a second: deadlines of streams, news from other nodes."""

    def fail(self, error: UndertowError) -> None:
        """Record the cause and release whatever waits."""


class Watchdog:
    """Polls pidfds and ticks its groups until the last one is removed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: list[Watched] = []
        self._descriptors: dict[int, tuple[Watched, int]] = {}
        self._wake_read, self._wake_write = os.pipe()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def add(self, group: Watched) -> None:
        """Watch the processes of `group`; a process that is gone already is reported on the watchdog's thread."""
        with self._lock:
            self._groups.append(group)
            for rank, pid in group.watched_processes().items():
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:
                    threading.Thread(target=group.on_exit, args=(rank,), daemon=True).start()
                    continue
                self._descriptors[descriptor] = (group, rank)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="undertow-watchdog", daemon=True)
                self._thread.start()
        self._wake()

    def remove(self, group: Watched) -> None:
        with self._lock:
            self._groups = [one for one in self._groups if one is not group]
            for descriptor, (listener, _) in list(self._descriptors.items()):
                if listener is group:
                    del self._descriptors[descriptor]
                    os.close(descriptor)
            last = None if self._groups else self._thread
        self._wake()
        if last is not None:
            self._await(last)

    def stop(self) -> None:
        """Watch nobody any more."""
        for group in list(self._groups):
            self.remove(group)

    @staticmethod
    def _await(thread: threading.Thread) -> None:
        """A thread that outlives the interpreter aborts the process as soon as it touches an object of torch's."""
        if thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

    def _wake(self) -> None:
        os.write(self._wake_write, b"w")

    def _run(self) -> None:
        next_tick = time.monotonic()
        while True:
            with self._lock:
                if not self._groups:
                    self._thread = None
                    return
                descriptors = list(self._descriptors)
            poller = select.poll()
            poller.register(self._wake_read, select.POLLIN)
            for descriptor in descriptors:
                poller.register(descriptor, select.POLLIN)
            ready = poller.poll(max(0.0, next_tick - time.monotonic()) * 1000)
            self._handle([descriptor for descriptor, _ in ready])
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                self._tick_all()

    def _tick_all(self) -> None:
        with self._lock:
            groups = list(self._groups)  # not kept while polling: this thread must not be the last to let go of one
        for group in groups:
            self._tick(group)

    def _tick(self, group: Watched) -> None:
        try:
            group.on_tick(time.monotonic())
        except Exception as error:  # a dead watchdog is a hang for everybody: whatever it was, the group hears of it
            get_logger().exception("The watchdog failed")
            group.fail(UndertowError(reason=f"The watchdog failed: {type(error).__name__}: {error}"))

    def _handle(self, ready: list[int]) -> None:
        exits: list[tuple[Watched, int]] = []
        with self._lock:
            for descriptor in ready:
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)
                    continue
                # A group removed and another added since the poll may have taken the number over: look again.
                if descriptor in self._descriptors and _is_readable(descriptor):
                    exits.append(self._descriptors.pop(descriptor))
                    os.close(descriptor)
        for group, rank in exits:
            group.on_exit(rank)


def _is_readable(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return any(events & select.POLLIN for _, events in poller.poll(0))


def is_dead(pid: int) -> bool:
    """Whether a process of this node has ended; one that nobody has collected yet counts."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return _is_readable(descriptor)
    finally:
        os.close(descriptor)


_instance: Watchdog | None = None
_instance_lock = threading.Lock()


def instance() -> Watchdog:
    """This process's watchdog; a forked child gets its own."""
    global _instance
    with _instance_lock:
        if _instance is None or _instance._pid != os.getpid():
            _instance = Watchdog()
        return _instance
