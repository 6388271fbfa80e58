"""What an operation of the backend returns: a torch `Work` for calls on the CPU, and one for calls on a GPU.

On the CPU a group has one queue. Its oldest call runs next, on whichever thread comes first: the queue's own, which
lets asynchronous calls proceed while the caller computes, or one that waits for a call and then need not wait for a
thread to wake up. Most callers wait at once (functional collectives do), so the queue's thread leaves them a moment to
come, unless somebody has asked for a future, and so will not. A callback of a future may wait for a further call, so
while the queue's thread is in one, another stands in for it. A blocking call runs at once on its caller's thread,
after whatever was queued before it. So the calls of a group run one at a time and in the order in which they were made,
as they do on every other rank.

On a GPU the order of calls is the order of streams: asynchronous ones run on the group's stream, which first waits for
the caller's; blocking ones on the caller's; each after the call before it, by an event. `wait` lets the current stream
wait, not the host. What went wrong is raised by `wait` too, or by the next call.

Memory ordering: a call's results are stored before `_over` is set, and the interpreter's lock, which changes hands
between the setting and any reading of it, releases and acquires both. On a GPU, events order.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from ..errors import StillRunning
from ..fabric.group import Group

_cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call
_NO_TIME = timedelta(0)
_MOMENT = 0.0003  # seconds: a few times what a caller takes from the call to its wait


class _Handle(dist.Work):
    """What handles of both devices have in common. `outputs` is what a future of the call holds."""

    def __init__(self, what: str, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.what = what
        self._outputs = list(outputs)

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return -1


class CpuHandle(_Handle):
    """One call in a queue: over when it ran, well or not."""

    def __init__(self, queue: Queue, what: str, call: Callable[[], object], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__(what, outputs)
        self._queue, self._call = queue, call
        self._over = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._told = False

    def run(self) -> None:
        """Whoever has the queue's turn."""
        try:
            self._call()
        except BaseException as error:  # raised again by whoever waits
            self._error = error
        finally:
            with self._queue.futures:
                self._over = True

    def wait(self, timeout: timedelta = _NO_TIME) -> bool:
        if not self._over:
            self._queue.run_until(self, timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if not self._over:
            self._queue.hurry()
        return self._over

    def is_success(self) -> bool:
        return self._over and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    @property
    def is_over(self) -> bool:
        return self._over

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        with self._queue.futures:
            if self._future is None:
                self._future = torch.futures.Future()
            found, over = self._future, self._over
        if over:
            self.tell()
        else:
            self._queue.hurry()
        return found

    def tell(self) -> None:
        """Settle the future, if there is one, without the queue's turn: whoever holds it may then make another call."""
        future = self.claim()
        if future is not None:
            self.settle(future)

    def claim(self) -> torch.futures.Future[list[torch.Tensor]] | None:
        """The future, if there is one that nobody settles yet: whoever gets it must."""
        with self._queue.futures:
            future = None if self._told else self._future
            self._told = self._told or future is not None
        return future

    def settle(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._outputs)
        elif isinstance(self._error, Exception):
            future.set_exception(self._error)  # type: ignore[arg-type]  # the stub names the result's type
        else:  # Ctrl-C and its kin, which a future cannot hold
            future.set_exception(RuntimeError(f"{self.what} was interrupted"))  # type: ignore[arg-type]


class Queue:
    """The calls of one group that have not run yet, oldest first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[CpuHandle] = deque()
        self._turn = threading.Lock()
        self._added: SimpleQueue[None] = SimpleQueue()
        self._calm = threading.Lock()  # locked while the thread may leave callers their moment
        self._calm.acquire()
        self._threads: list[threading.Thread] = []
        self._free = 0  # of them: not in a callback, which may wait for a call that is yet to run
        self._staff = threading.Lock()
        self._closed = False
        self.futures = threading.Lock()

    def add(self, what: str, call: Callable[[], object], outputs: Sequence[torch.Tensor], blocking: bool) -> CpuHandle:
        """Queue a call; a blocking one has run when this returns, and what it raised is raised."""
        handle = CpuHandle(self, what, call, outputs)
        self._waiting.append(handle)
        if blocking:
            handle.wait()
        else:
            with self._staff:
                self._hire()
            self._added.put(None)
        return handle

    def run_until(self, handle: CpuHandle, seconds: float) -> None:
        """Run calls, oldest first, until `handle` is over. With `seconds` only wait: no call is left half run."""
        if seconds > 0:
            future = handle.get_future()
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            if not done.wait(seconds):
                raise StillRunning(what=handle.what, seconds=seconds)
            return
        while not handle.is_over:
            self._run_one()

    def hurry(self) -> None:
        """Let the thread begin at once."""
        with contextlib.suppress(RuntimeError):  # raised if it has been told already
            self._calm.release()

    def close(self) -> None:
        """End the threads. Calls that nobody waited for are run first."""
        self._closed = True
        for _ in self._threads:
            self._added.put(None)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join()

    def _hire(self) -> None:
        """See that a thread is there for what is queued. Under `_staff`."""
        if self._free == 0:
            self._free = 1
            self._added.put(None)
            thread = threading.Thread(target=self._serve, name=f"undertow-{self._name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        while not self._closed or self._waiting:
            self._added.get()
            while self._waiting:
                self._calm.acquire(timeout=_MOMENT)
                handle = self._run_oldest()
                future = handle.claim() if handle is not None else None
                if handle is not None and future is not None:
                    self._settle(handle, future)

    def _settle(self, handle: CpuHandle, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        """Callbacks may wait for further calls of this group, so another thread stands in for this one meanwhile."""
        with self._staff:
            self._free -= 1
            if self._waiting:
                self._hire()
        try:
            handle.settle(future)
        finally:
            with self._staff:
                self._free += 1

    def _run_one(self) -> None:
        handle = self._run_oldest()
        if handle is not None:
            handle.tell()

    def _run_oldest(self) -> CpuHandle | None:
        with self._turn:
            if not self._waiting:
                return None
            handle = self._waiting.popleft()
            handle.run()
            return handle


class CudaHandle(_Handle):
    """One call that has been enqueued; `done` is recorded behind it."""

    def __init__(
        self, group: Group, what: str, outputs: Sequence[torch.Tensor], done: Any, host_waits: bool = False
    ) -> None:
        super().__init__(what, outputs)
        self._group, self._done, self._host_waits = group, done, host_waits
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = _NO_TIME) -> bool:
        """Order the current stream behind the call; a barrier lets the host wait, too."""
        _cuda.current_stream(self._group.device).wait_event(self._done)
        if self._host_waits:
            self._done.synchronize()  # ends in any case: the watchdog releases what waits for a lost rank
        self._group.check()
        return True

    def is_completed(self) -> bool:
        return bool(self._done.query())

    def is_success(self) -> bool:
        return self.is_completed() and not self._group.failed

    def exception(self) -> BaseException | None:
        return None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Made behind the call on a stream of its order, so that whoever waits for it waits for the call."""
        if self._future is None:
            device = self._group.device
            self._future = torch.futures.Future(devices=[device])
            behind = _cuda.Stream(device)
            behind.wait_event(self._done)
            with _cuda.stream(behind):
                self._future.set_result(self._outputs)
        return self._future


class Streams:
    """Where the calls of one group run on its GPU, each behind the one before it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._own = _cuda.Stream(group.device, priority=-1)
        self._last: Any = None  # an event behind the latest call
        self._last_capture = 0  # the capture that it was in; 0 for none
        self._lock = threading.Lock()

    def add(
        self,
        what: str,
        call: Callable[[], object],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        blocking: bool,
        host_waits: bool = False,
    ) -> CudaHandle:
        """Enqueue a call. Events of a capture mean nothing outside it or in another, nor those of outside within it."""
        from ..fabric import stream_memory  # there is a driver: a call on a GPU is being made

        with self._lock, _cuda.device(self._group.device):
            current = _cuda.current_stream(self._group.device)
            capture = stream_memory.capture_of(current.cuda_stream)
            stream = current if blocking else self._own
            if not blocking:
                stream.wait_stream(current)
                for tensor in (*inputs, *outputs):
                    tensor.record_stream(stream)
            if self._last is not None and capture == self._last_capture:
                stream.wait_event(self._last)
            with _cuda.stream(stream):
                call()
            self._last, self._last_capture = _cuda.Event(), capture
            self._last.record(stream)
            return CudaHandle(self._group, what, outputs, self._last, host_waits)


class Several(_Handle):
    """Handles that are waited for together: of calls between `_start_coalescing` and `_end_coalescing`."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__("a coalesced call", [])
        self._works = list(works)

    def wait(self, timeout: timedelta = _NO_TIME) -> bool:
        for work in self._works:
            if timeout > _NO_TIME:
                work.wait(timeout)
            else:
                work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((found for work in self._works if (found := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])


class CopiedBack(_Handle):
    """A call of another backend on copies: what it wrote there is copied to the tensors themselves (`places`, each with
    its copy) once, by whoever sees first that it is over."""

    def __init__(self, what: str, work: dist.Work, places: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(what, [place for place, _ in places])
        self._work, self._places = work, list(places)
        self._copying = threading.Lock()

    def wait(self, timeout: timedelta = _NO_TIME) -> bool:
        self._work.wait(timeout) if timeout > _NO_TIME else self._work.wait()
        self._copy()
        return True

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        with contextlib.suppress(Exception):  # whoever waits is told
            self.wait()
        return True

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        def copied(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            done.value()  # raises what went wrong
            self._copy()
            return self._outputs

        return self._work.get_future().then(copied)

    def _copy(self) -> None:
        with self._copying:
            for place, copy in self._places:
                place.copy_(copy)
            self._places.clear()
