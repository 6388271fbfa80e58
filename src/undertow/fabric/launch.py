"""Starting ranks on this machine, waiting for all of them, and ending them when one fails.

    results = launch(train, ranks=4, args=(config,))

The launcher hosts the store through which the ranks find each other, on a port that the kernel picks, so launches
never collide. It waits on pipes and exit notices, without polling. When a rank fails, the others get a few seconds to
notice by themselves (their own errors say more than a signal), then they are ended. The first cause is what is raised.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
from torch.distributed import TCPStore

from .. import settings
from ..errors import LaunchFailed, LaunchRefused
from . import rank_process
from .flight import FlightRing, write_flight_record
from .flight_writer import RING_BYTES
from .fork_server import ForkedProcess, server
from .rank_process import PRIMARY, Job, Raised, Returned, run_script
from .segment import Segment, available_memory, human
from .virtual_node import PrivateFolder, VirtualNode

__all__ = ["Failure", "launch", "run_script"]

DEVICES = ("auto", "cpu", "cuda")
RANK_BYTES = 350 << 20  # resident memory of a rank that has loaded torch and done a little work
GRACE_SECONDS = 8.0  # for survivors to raise by themselves after the first failure
INTERRUPT_SECONDS = 2.0
TERMINATE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failure as the launcher knows it. Ordered by blame, then by time."""

    rank: int
    kind: str
    cause: str
    traceback: str
    blame: int
    time: float


class _Rank:
    """The launcher's view of one rank: its process, its channel, and what became of it."""

    def __init__(self, number: int, process: ForkedProcess, channel: Connection) -> None:
        self.number = number
        self.process = process
        self.channel = channel
        self.result: bytes | None = None
        self.failure: Failure | None = None
        self.outcome = "running"
        self._listens = True

    @property
    def is_over(self) -> bool:
        return self.process.exit_code is not None

    def waitables(self) -> list[Any]:
        if self.is_over:
            return []
        return [self.process, self.channel] if self._listens else [self.process]

    def receive(self) -> None:
        """Take the rank's report, if it has one; a rank that died in the middle of it has none."""
        if not self._listens:
            return
        self._listens = False
        try:
            report = pickle.loads(self.channel.recv_bytes())
        except (EOFError, OSError):
            return
        if isinstance(report, Returned):
            self.result, self.outcome = report.result, "returned"
        elif isinstance(report, Raised):
            self.outcome = report.cause
            self.failure = Failure(self.number, report.kind, report.cause, report.traceback, report.blame, report.time)

    def collect(self, ending: str) -> None:
        """The process has ended: take what it sent, then its exit code. `ending` is how we ended it, if we did."""
        if self.channel.poll():
            self.receive()
        code = self.process.collect()
        if self.failure is not None or (self.result is not None and code == 0):
            return
        cause = _exit_cause(code) + (" after it had returned" if self.result is not None else "")
        if code == 0:
            cause = "exit code 0 before it returned a result"
        self.outcome = f"ended by the launcher: {cause}" if ending else cause
        if not ending:
            self.failure = Failure(self.number, "exit", cause, "", PRIMARY, time.time())


class _Crew:
    """All ranks of one launch. Leaving the context leaves no process."""

    def __init__(self) -> None:
        self.ranks: list[_Rank] = []
        self._ending = ""

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.end((signal.SIGKILL, None))
        for rank in self.ranks:
            rank.channel.close()
            rank.process.close()

    def start(self, job: Job) -> None:
        """Start the next rank."""
        ours, theirs = Pipe()
        with theirs:
            process = server.fork(theirs.fileno())
        self.ranks.append(_Rank(len(self.ranks), process, ours))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died at once: `run` will see how
            ours.send_bytes(pickle.dumps(job))

    def run(self) -> None:
        """Wait until every rank is over. After a failure the others have GRACE_SECONDS, then they are ended."""
        deadline: float | None = None
        while any(not rank.is_over for rank in self.ranks):
            if deadline is None and any(rank.failure for rank in self.ranks):
                deadline = time.monotonic() + GRACE_SECONDS
            if not self._step(deadline):
                self.end((signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, None))

    def end(self, *stages: tuple[signal.Signals, float | None]) -> None:
        """Send each signal in turn to whoever still runs, and give it that many seconds (None: as long as it takes)."""
        for number, seconds in stages:
            living = [rank for rank in self.ranks if not rank.is_over]
            if living:
                self._ending = number.name
            for rank in living:
                rank.process.send_signal(number)
            deadline = None if seconds is None else time.monotonic() + seconds
            while any(not rank.is_over for rank in self.ranks) and self._step(deadline):
                pass

    def _step(self, deadline: float | None) -> bool:
        """Wait for news and take it in; False when the deadline came first."""
        waitables = {id(source): (rank, source) for rank in self.ranks for source in rank.waitables()}
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready: list[Any] = wait([source for _, source in waitables.values()], timeout)
        for source in ready:
            rank, _ = waitables[id(source)]
            if source is rank.process:
                rank.collect(self._ending)
            else:
                rank.receive()
        return bool(ready)


def _cores_of(rank: int, ranks: int, device: str, env: Mapping[str, str]) -> tuple[int, ...]:
    """A rank's share of the cores, if there is at least one for each: its helper threads then never take another's
    core, and two ranks that wait for each other never share one. None otherwise, and for ranks that compute on a GPU.
    """
    cores = sorted(os.sched_getaffinity(0))
    bind = env.get(settings.BIND.name, settings.BIND.get()) not in ("", "0")
    if device != "cpu" or ranks > len(cores) or ranks == 1 or not bind:
        return ()
    return tuple(cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks])


def launch(
    fn: Callable[..., Any],
    ranks: int,
    device: str = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    deadline: float | None = None,
    *,
    mps: str | None = None,
    env: Mapping[str, str] | None = None,
    port: int = 0,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `ranks` processes of this machine and return their results, by rank.

    device: "cpu", "cuda", or "auto" (cuda if there is a GPU). More ranks than GPUs make a virtual node, for which
    `mps` is "auto", "off" or "require" (default: UNDERTOW_MPS). deadline: seconds after which a rank's wait for
    another is an error. env: more environment variables for the ranks. port: of the store; 0 picks a free one.

    `fn`, arguments and results travel by pickle; tensors arrive on the CPU. Raises LaunchFailed with the first cause;
    its `facts["outcomes"]` says what became of each rank.
    """
    gpus = _check(fn, ranks, device, port)
    call = _pack_call(fn, args, kwargs)
    chosen = "cuda" if gpus else "cpu"
    with contextlib.ExitStack() as stack:
        store = _host_store(port)
        segment = Segment.create(ranks * RING_BYTES, "flight rings")
        stack.callback(segment.close)
        rings = FlightRing.many(segment, ranks)
        environments = _device_environments(stack, ranks, gpus, settings.MPS.get() if mps is None else mps)
        threads = 1 if chosen == "cpu" and ranks > 1 else 0
        preparation = _preparation(call)
        crew = stack.enter_context(_Crew())
        try:
            for rank in range(ranks):
                environment = {
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
                    **environments[rank],
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank is a client of the store hosted here
                    settings.FLIGHT_RING.name: rings[rank].path,
                    settings.DEVICE.name: chosen,
                    **({"OMP_NUM_THREADS": "1"} if threads else {}),
                    **({settings.DEADLINE.name: str(deadline)} if deadline is not None else {}),
                    **(env or {}),
                }
                crew.start(Job(environment, preparation, threads, _cores_of(rank, ranks, chosen, env or {}), call))
            crew.run()
        except KeyboardInterrupt:
            crew.end((signal.SIGINT, INTERRUPT_SECONDS), (signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, None))
            raise
        failures = [rank.failure for rank in crew.ranks if rank.failure is not None]
        if failures:
            raise _failed(failures, crew, rings)
        return [_unpack_result(rank, crew, rings) for rank in crew.ranks]


def _exit_cause(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal
        name = ""
    return f"killed by signal {-code}{name}"


def _failed(failures: list[Failure], crew: _Crew, rings: list[FlightRing]) -> LaunchFailed:
    """The error of the first cause, with the flight record written."""
    first = min(failures, key=lambda failure: (failure.blame, failure.time))
    cause = f"rank {first.rank}: {first.cause}"
    try:
        flight = f"\nFlight record: {write_flight_record(None, dict(enumerate(rings)), cause)}"
    except OSError as error:  # a full disk must not hide the cause
        flight = f"\nNo flight record could be written: {error}"
    return LaunchFailed(
        rank=first.rank,
        ranks=len(crew.ranks),
        cause=first.cause,
        traceback="\n" + first.traceback.rstrip() if first.traceback else "",
        flight=flight,
        kind=first.kind,
        outcomes=[rank.outcome for rank in crew.ranks],
    )


def _unpack_result(rank: _Rank, crew: _Crew, rings: list[FlightRing]) -> Any:
    assert rank.result is not None
    try:
        return pickle.loads(rank.result)
    except Exception as error:  # anything can happen in the user's own unpickling
        cause = f"its result cannot be rebuilt by the launcher: {type(error).__name__}: {error}"
        failure = Failure(rank.number, type(error).__name__, cause, "", PRIMARY, time.time())
        raise _failed([failure], crew, rings) from error


def _check(fn: Callable[..., Any], ranks: int, device: str, port: int) -> int:
    """Refuse what cannot work, before anything is started. Returns the number of GPUs to use, 0 for the CPU."""
    if rank_process.importing_main:
        remedy = "put the launch under if __name__ == '__main__'"
        raise LaunchRefused(reason=f"a rank is importing your script, which launches again; {remedy}")
    if not callable(fn):
        raise LaunchRefused(reason=f"fn is {fn!r}, but must be a function")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise LaunchRefused(reason=f"ranks is {ranks!r}, but must be a whole number of at least 1")
    if device not in DEVICES:
        raise LaunchRefused(reason=f"device is {device!r}, but must be one of {', '.join(DEVICES)}")
    if not 0 <= port < 65536:
        raise LaunchRefused(reason=f"port is {port}, but must be between 0 and 65535")
    available = available_memory()
    if ranks * RANK_BYTES > available:
        wanted = f"{ranks} ranks need about {human(ranks * RANK_BYTES)} of memory"
        raise LaunchRefused(reason=f"{wanted}, and {human(available)} is available")
    gpus = 0 if device == "cpu" else torch.cuda.device_count()  # asks the driver's library: makes no context
    if device == "cuda" and gpus == 0:
        raise LaunchRefused(reason="device is 'cuda', but torch finds no GPU on this machine")
    return gpus


def _pack_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """The call as bytes, or a refusal that says what another process could not find."""
    name = getattr(fn, "__qualname__", repr(fn))
    remedy = "define it at the top level of a module"
    if getattr(fn, "__module__", "") == "__main__" and not _main_can_be_imported():
        raise LaunchRefused(reason=f"function {name} was typed into an interactive session; {remedy}")
    try:
        rank_process.pack(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchRefused(reason=f"another process cannot import function {name}; {remedy}") from error
    try:
        return rank_process.pack((fn, tuple(args), dict(kwargs or {})))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchRefused(reason=f"an argument of {name} cannot be sent to another process: {error}") from error


def _main_can_be_imported() -> bool:
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return main.__spec__ is not None or (path is not None and os.path.exists(path))


def _preparation(call: bytes) -> dict[str, Any]:
    """What makes a rank resemble this process: paths, arguments, and the main module if the call refers to it."""
    preparation: dict[str, Any] = {
        "sys_path": [entry or os.getcwd() for entry in sys.path],
        "sys_argv": sys.argv,
        "dir": os.getcwd(),
    }
    main = sys.modules["__main__"]
    if b"__main__" in call and main.__spec__ is not None:
        preparation["init_main_from_name"] = main.__spec__.name
    elif b"__main__" in call and main.__file__ is not None:
        preparation["init_main_from_path"] = os.path.abspath(main.__file__)
    return preparation


def _host_store(port: int) -> TCPStore:
    """The ranks' meeting point, in this process and on the loopback interface only."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        problem = (
            "is in use by another program" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        )
        raise LaunchRefused(reason=f"port {port} {problem}") from error
    number = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1", number, is_master=True, wait_for_workers=False, use_libuv=True, master_listen_fd=listener.detach()
    )


def _device_environments(stack: contextlib.ExitStack, ranks: int, gpus: int, mps: str) -> list[dict[str, str]]:
    """Each rank's variables for its device. What must live as long as the ranks is entered into `stack`."""
    if gpus == 0:
        return [{} for _ in range(ranks)]
    if ranks > gpus:
        node = stack.enter_context(VirtualNode(ranks, mps, gpus))
        return [{**node.rank_environment(rank), settings.DEVICE_INDEX.name: str(rank % gpus)} for rank in range(ranks)]
    folder = stack.enter_context(PrivateFolder())  # symmetric memory keeps sockets in TMPDIR
    said = {**settings.DRIVER, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}  # the watchdog reports losses; NCCL would abort
    common = {name: os.environ.get(name, value) for name, value in said.items()} | folder.scratch_environment()
    return [{**common, settings.DEVICE_INDEX.name: str(rank)} for rank in range(ranks)]
