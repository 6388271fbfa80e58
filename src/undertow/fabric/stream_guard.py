"""The watchdog's hand inside the GPU: streams cannot time out, so somebody must know what they wait for.

Every stream wait of this rank is registered with its target. When the group fails, outputs of the calls in flight are
poisoned (enqueued behind the waits, so the poison comes last), and then every registered word is set to its target,
again and again: a replayed graph clears words and waits anew.

Whether a stream hangs is read from a pinned word of its own. The stream sets it to BUSY when a call (or a wait outside
any call) begins and to IDLE when it ends; the watchdog turns BUSY into SEEN. A word that stays SEEN belongs to one and
the same call. Only constants are written, so a captured call is watched too.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

import torch

from .. import errors
from . import atomics, stream_memory
from .base import WORD_STRIDE, poison
from .logs import get_logger

if TYPE_CHECKING:
    from .group import Group

IDLE, BUSY, SEEN = 0, 1, 2
_KERNEL_LATE = 2  # what kernels report when a signal did not come in time; see kernels/signals.py
_STREAMS = 64  # streams watched at a time; more of them share words, which only delays the verdict
_RELEASING_SECONDS = 20.0
_RELEASING_PERIOD = 0.002


class StreamGuard:
    """Watches the streams of one rank on one group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._device = group.device
        step = WORD_STRIDE // 4
        self._words = torch.zeros((2 + _STREAMS) * step, dtype=torch.int32, pin_memory=True)
        self.abort, self.error = self._words[0:1], self._words[step : step + 1]
        self._busy_of: dict[int, int] = {}  # stream handle -> address of its word
        self._stream = stream_memory.new_stream(self._device, priority=-1)
        self._waits: dict[int, tuple[int, bool]] = {}
        self._running: list[tuple[torch.cuda.Stream, weakref.ref[torch.Tensor]]] = []
        self._captured: list[weakref.ref[torch.Tensor]] = []
        self._depth = 0
        self._seen_since: dict[int, float] = {}
        self._bound_threads = threading.local()
        self._closed = False
        group.on_abort(self._on_abort)
        group.on_every_tick(self._tick)

    def _expect(self, address: int, target: int, on_host: bool) -> None:
        """A stream of this rank is about to wait for `target` at `address`."""
        known = self._waits.get(address)
        if known is None or known[0] < target:
            self._waits[address] = (target, on_host)

    def forget(self, first: int, last: int) -> None:
        """The words in [first, last) are freed."""
        for address in [one for one in self._waits if first <= one < last]:
            del self._waits[address]

    def enter(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """A call begins on the current stream."""
        self._depth += 1
        stream = torch.cuda.current_stream(self._device)
        if torch.cuda.is_current_stream_capturing():
            self._captured = [one for one in self._captured if one() is not None]
            self._captured.extend(weakref.ref(output) for output in outputs)
        else:
            self._running = [(stream, weakref.ref(output)) for output in outputs]
        if self._depth == 1:
            stream_memory.write(stream.cuda_stream, self._busy(stream.cuda_stream), BUSY)

    def leave(self) -> None:
        """The call's last work was enqueued."""
        self._depth -= 1
        if self._depth == 0:
            stream = stream_memory.current_stream(self._device)
            stream_memory.write(stream, self._busy(stream), IDLE)

    def wait(self, address: int, target: int, on_host: bool) -> None:
        """Hold the current stream until the word reaches `target`, watched."""
        self._expect(address, target, on_host)
        stream = stream_memory.current_stream(self._device)
        alone = self._depth == 0  # inside a call, the call's own word is watched and joins all its streams
        if alone:
            stream_memory.write(stream, self._busy(stream), BUSY)
        stream_memory.wait(stream, address, target)
        if alone:
            stream_memory.write(stream, self._busy(stream), IDLE)

    def _busy(self, stream: int) -> int:
        """Address of the stream's word."""
        address = self._busy_of.get(stream)
        if address is None:
            index = 2 + len(self._busy_of) % _STREAMS
            address = self._words.data_ptr() + index * WORD_STRIDE
            self._busy_of[stream] = address
        return address

    def _is_busy(self) -> bool:
        return any(atomics.load(address) != IDLE for address in set(self._busy_of.values()))

    def _bind(self) -> None:
        """Driver calls need the device's context on the calling thread."""
        if not getattr(self._bound_threads, "done", False):
            torch.cuda.set_device(self._device)
            stream_memory.allow_other_captures()
            self._bound_threads.done = True

    def close(self) -> None:
        self._closed = True

    def _tick(self, now: float) -> None:
        if self._closed:
            return
        try:
            self._bind()
            stream_memory.query(self._stream.cuda_stream, self._group.rank)
        except errors.DeviceLost as error:
            self._closed = True
            self._group.fail(error)
            return
        if int(self.error[0]) == _KERNEL_LATE:
            self._group.fail(self._group.why_waiting(None, "a kernel waited for a signal until its deadline"))
            return
        for address in set(self._busy_of.values()):
            state = atomics.load(address)
            if state == BUSY:
                if atomics.compare_and_set(address, BUSY, SEEN):
                    self._seen_since[address] = now
            elif state == SEEN and now - self._seen_since[address] > self._group.deadline:
                waited = f"a stream has been in one call for {self._group.deadline:g} s"
                self._group.fail(self._group.why_waiting(None, waited))
                return

    def _on_abort(self, error: errors.UndertowError) -> None:
        if not self._closed and not isinstance(error, errors.DeviceLost):
            threading.Thread(target=self._let_go, name="undertow-release", daemon=True).start()

    def _let_go(self) -> None:
        """Poison first, release second. On a thread of its own: the watchdog must go on watching."""
        self.abort.fill_(1)
        try:
            self._bind()
            if self._is_busy():
                for stream, output in self._running:
                    tensor = output()
                    if tensor is not None:
                        with torch.cuda.stream(stream):
                            poison(tensor)
            until = time.monotonic() + _RELEASING_SECONDS
            while time.monotonic() < until and not self._closed:
                self._release_once()
                time.sleep(_RELEASING_PERIOD)
        except (errors.UndertowError, RuntimeError) as failure:  # the context went with the lost rank
            get_logger().error("Could not release the streams of rank %d: %s", self._group.rank, failure)

    def _release_once(self) -> None:
        for address, (target, on_host) in list(self._waits.items()):
            if on_host:
                atomics.store(address, target)
            else:
                stream_memory.write(self._stream.cuda_stream, address, target)
        if not self._is_busy():
            return
        for output in self._captured:
            tensor = output()
            if tensor is not None:
                with torch.cuda.stream(self._stream):
                    poison(tensor)
