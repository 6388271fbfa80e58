"""The watchdog's hand inside the GPU: streams cannot time out, so somebody must know what they wait for.

Every stream wait of this rank is registered with its target. When the group fails, the abort word is set, and then
every registered word is set to its target, again and again: a replayed graph clears words and waits anew. The last
operation of every guarded call is a kernel that poisons the outputs if the abort word is set. It stands in the stream's
own order, also in a captured graph, so nothing of the call can come after it. A call whose kernels poison what they
could not make right says so (`poisons_itself`), and ends without.

Whether a stream hangs is read from a pinned word of its own. The stream sets it to BUSY before the first wait of a call
(or a wait outside any call) and to IDLE when the call ends; the watchdog turns BUSY into SEEN. A word that stays SEEN
belongs to one and the same call. Only constants are written, so a captured call is watched too. Kernels that wait keep
a deadline of their own and report: a call without waits of streams writes no word. Few operations more cost a short
call, such as one layer of a decode step, more than its communication does.

The driver may not answer: a launch that finds its queue full waits with the context's lock, perhaps for the very wait
that is to be released. So whatever needs the driver has a thread of its own, and words in host memory, which is where
the streams of lanes wait for other ranks, never wait for one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import errors
from ..kernels.poison import poison_if_aborted
from . import atomics, stream_memory
from .base import WORD_STRIDE
from .logs import get_logger

if TYPE_CHECKING:
    from .group import Group

IDLE, BUSY, SEEN = 0, 1, 2
_STREAMS = 1024  # words for as many streams
_HASTE_SECONDS = 20.0  # for so long words are released at the short period, then at the long one
_SHORT_PERIOD, _LONG_PERIOD = 0.002, 0.05


@dataclass(slots=True)
class _Call:
    """`stream`: where it began. `watched`: whether that stream's word is BUSY. `poisons`: whether it ends by that."""

    stream: int
    watched: bool = False
    poisons: bool = True


class StreamGuard:
    """Watches the streams of one rank on one group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._device = group.device
        step = WORD_STRIDE // 4
        self._words = torch.zeros((2 + _STREAMS) * step, dtype=torch.int32, device="cpu", pin_memory=True)
        self.abort, self.error = self._words[0:1], self._words[step : step + 1]
        self._busy_of: dict[int, int] = {}  # stream handle -> address of its word
        self._stream = stream_memory.new_stream(self._device, priority=-1)
        self._waits: dict[int, tuple[int, bool]] = {}
        self._calls: list[_Call] = []  # the innermost last
        self._seen_since: dict[int, float] = {}
        self._closed = False
        self._ask = threading.Event()
        threading.Thread(target=self._ask_the_driver, name="undertow-device", daemon=True).start()
        poison_if_aborted(torch.zeros(8, device=self._device), self.abort)  # loaded now: later it stands behind waits
        torch.cuda.synchronize(self._device)
        group.on_abort(self._on_abort)
        group.on_every_tick(self._tick)
        group.on_check(self._look)

    def expect(self, address: int, target: int, on_host: bool) -> None:
        """A stream of this rank is about to wait for `target` at `address`."""
        known = self._waits.get(address)
        if known is None or known[0] < target:
            self._waits[address] = (target, on_host)

    def forget(self, first: int, last: int) -> None:
        """The words in [first, last) are freed."""
        for address in [one for one in self._waits if first <= one < last]:
            del self._waits[address]

    def enter(self) -> None:
        """A call begins on the current stream."""
        self._calls.append(_Call(stream_memory.current_stream(self._device)))

    def watch(self) -> None:
        """Streams of the call, if we are in one, may wait from here on: it is in time, or the group fails."""
        if self._calls and not self._calls[0].watched:  # the outermost joins all streams
            self._calls[0].watched = True
            stream = self._calls[0].stream
            stream_memory.write(stream, self._busy(stream), BUSY)

    def poisons_itself(self) -> None:
        """The call's kernels poison its outputs if they must; nothing that follows them can undo it."""
        if self._calls:
            self._calls[-1].poisons = False

    def leave(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """All work of the call was enqueued; should it be aborted, its `outputs` are poisoned last."""
        call = self._calls.pop()  # whatever happens: it would be taken for the outermost of later calls
        try:
            for output in outputs if call.poisons else ():
                poison_if_aborted(output, self.abort)
        finally:
            if call.watched:
                stream_memory.write(call.stream, self._busy(call.stream), IDLE)

    def wait(self, address: int, target: int, on_host: bool) -> None:
        """Hold the current stream until the word reaches `target`, watched."""
        self.expect(address, target, on_host)
        stream = stream_memory.current_stream(self._device)
        self.watch()
        alone = not self._calls
        if alone:
            stream_memory.write(stream, self._busy(stream), BUSY)
        stream_memory.wait(stream, address, target)
        if alone:
            stream_memory.write(stream, self._busy(stream), IDLE)

    def perform(self, stream: int, packed: bytes) -> None:
        """Waits and writes as `stream_memory.packed` made them, on `stream`, in one stop. Waits are `expect`ed."""
        self.watch()
        if not self._calls:
            busy = self._busy(stream)
            begin, end = (stream_memory.packed([(False, busy, state)]) for state in (BUSY, IDLE))
            packed = begin + packed + end
        stream_memory.batch(stream, packed)

    def _busy(self, stream: int) -> int:
        """Address of the stream's word."""
        address = self._busy_of.get(stream)
        if address is None:
            if len(self._busy_of) == _STREAMS:
                reason = f"calls on more than {_STREAMS} streams cannot be watched; use fewer, longer-lived streams"
                raise errors.UndertowError(reason=f"{reason}.")
            index = 2 + len(self._busy_of)
            address = self._words.data_ptr() + index * WORD_STRIDE
            self._busy_of[stream] = address
        return address

    def _bind(self) -> None:
        """Driver calls need the device's context on the calling thread, one of the guard's own. By the driver itself:
        `torch.cuda.set_device` asks for it with the interpreter's lock, and not at all where the first GPU is meant."""
        stream_memory.meet(self._device)
        stream_memory.allow_other_captures()

    def close(self) -> None:
        self._closed = True
        self._ask.set()

    def _ask_the_driver(self) -> None:
        """The thread that learns whether the context is lost, once for each tick that finds it idle."""
        try:
            self._bind()
            while True:
                self._ask.wait()
                self._ask.clear()
                if self._closed:
                    return
                stream_memory.query(self._stream.cuda_stream, self._group.rank)
        except errors.UndertowError as error:
            if not self._closed:
                self._closed = isinstance(error, errors.DeviceLost)
                self._group.fail(error)

    def _tick(self, now: float) -> None:
        if self._closed:
            return
        self._ask.set()
        if self._look():
            return
        for address in list(self._busy_of.values()):
            state = atomics.load(address)
            if state == BUSY:
                if atomics.compare_and_set(address, BUSY, SEEN):
                    self._seen_since[address] = now
            elif state == SEEN and now - self._seen_since[address] > self._group.deadline:
                waited = f"a stream has been in one call for {self._group.deadline:g} s"
                self._group.fail(self._group.why_waiting(None, waited))
                return

    def _look(self) -> bool:
        """Whether a kernel has reported; then the group fails: who settles and checks must not take poison for results.

        One was late. It sets the abort word, and those who then give up may write their code over its own.
        """
        if self._closed or atomics.load(self.error.data_ptr()) == 0:
            return False
        self._group.fail(self._group.why_waiting(None, "a kernel waited for a signal until its deadline"))
        return True

    def _on_abort(self, error: errors.UndertowError) -> None:
        """On threads of their own: the watchdog must watch on.

        Where the proxy's context is lost, torch's may not be (that, `_ask_the_driver` would find): who waits in it is
        let go by what needs no driver.
        """
        if self._closed:
            return
        self.abort.fill_(1)
        on_device = () if isinstance(error, errors.DeviceLost) else (self._release_on_device,)
        for release in (self._release_on_host, *on_device):
            threading.Thread(target=self._let_go, args=(release,), name="undertow-release", daemon=True).start()

    def _let_go(self, release: Callable[[], None]) -> None:
        """Again and again: a replayed graph waits anew."""
        haste = time.monotonic() + _HASTE_SECONDS
        try:
            while not self._closed:
                release()
                time.sleep(_SHORT_PERIOD if time.monotonic() < haste else _LONG_PERIOD)
        except errors.UndertowError as failure:  # the context went with the lost rank
            get_logger().error("Could not release the streams of rank %d: %s", self._group.rank, failure)

    def _release_on_host(self) -> None:
        for address, (target, on_host) in list(self._waits.items()):
            if on_host:
                atomics.store(address, target)

    def _release_on_device(self) -> None:
        waits = [(address, target) for address, (target, on_host) in list(self._waits.items()) if not on_host]
        if waits:
            self._bind()
        for address, target in waits:
            stream_memory.write(self._stream.cuda_stream, address, target)
