"""A process with torch loaded that forks ranks, so that a launch costs milliseconds and not `import torch` per rank.

Why not `multiprocessing`'s fork server: it listens on a socket in a temporary folder, which a SIGKILL of the launcher
leaves behind; it imports the user's main module before the rank's environment can be set; its children keep it alive
after the launcher's death; and its list of modules to load is one for the whole program. This one is reached through
an unnamed socket pair. The launcher's end is the only thing that keeps it alive, and ranks die with it
(PR_SET_PDEATHSIG), so nothing outlives a killed launcher.

The server never touches CUDA: a context does not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable

from ..errors import LaunchRefused

PRELOADED = (
    "torch",
    "torch.distributed",
    "undertow",
    "undertow.fabric.atomics",  # compiled by Numba when imported
    "undertow.fabric.cpu",
    "undertow.fabric.registry",
    "undertow.fabric.rank_process",
    "undertow.ops.matmul_all_reduce",
)
_PR_SET_PDEATHSIG = 1
_NUMBER = struct.Struct("<q")
_DESCRIPTORS = 4  # sent with each request: channel, status, standard output, standard error


class ForkedProcess:
    """A process forked by the server, which is its parent: its exit status arrives through a pipe."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        try:
            self.handle = os.pidfd_open(pid)
        except ProcessLookupError:  # ended and collected already
            self.handle = -1
        self._status = status
        self.exit_code: int | None = None

    def fileno(self) -> int:
        """Becomes readable when the process has ended."""
        return self._status

    def collect(self) -> int:
        """The exit code, negative for a signal. Call it when `fileno` is readable."""
        if self.exit_code is None:
            data = os.read(self._status, _NUMBER.size)
            # Nothing came: the server itself was killed, and the kernel then killed this process.
            self.exit_code = _NUMBER.unpack(data)[0] if data else -signal.SIGKILL
        return self.exit_code

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process, and the processes it started if it has a group of its own already."""
        if self.exit_code is not None or self.handle < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, 0)  # still there, so its number is still its own
            if os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                signal.pidfd_send_signal(self.handle, number)

    def close(self) -> None:
        os.close(self._status)
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class ForkServer:
    """The launcher's side: starts the server at first use and asks it for processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def fork(self, channel: int) -> ForkedProcess:
        """A new process that runs `rank_process.main` on `channel`, with this process's standard streams."""
        with self._lock:
            connection = self._ensure()
            status_read, status_write = os.pipe()
            try:
                socket.send_fds(connection, [b"f"], [channel, status_write, *_standard_streams()])
                answer = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
                if len(answer) < _NUMBER.size:
                    raise LaunchRefused(reason="the process that starts ranks ended; its standard error says why")
            except BaseException:  # Ctrl-C in the middle of a request too: the next answer would be for the last one
                os.close(status_read)
                self._kill()
                raise
            finally:
                os.close(status_write)
        return ForkedProcess(int(_NUMBER.unpack(answer)[0]), status_read)

    def stop(self) -> None:
        """End the server (and with it whatever it still has running) and wait for it."""
        with self._lock:
            running = self._server
            self._forget()
            if running is not None:
                running.wait()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's server, which would otherwise outlive the parent."""
        self._lock = threading.Lock()
        self._forget()

    def _ensure(self) -> socket.socket:
        if self._socket is not None and self._server is not None and self._server.poll() is None:
            return self._socket
        self._forget()
        ours, theirs = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]
        serving = f"from undertow.fabric import fork_server; fork_server.serve({theirs.fileno()})"
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {serving}"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the launcher, which passes it on
            )
        self._socket = ours
        return ours

    def _kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._forget()

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._server = None


def _standard_streams() -> list[int]:
    """Standard output and error of this process; the null device for one that is closed."""
    streams = []
    for descriptor in (1, 2):
        try:
            os.fstat(descriptor)
            streams.append(descriptor)
        except OSError:
            streams.append(_null())
    return streams


def _null() -> int:
    global _null_descriptor
    if _null_descriptor < 0:
        _null_descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    return _null_descriptor


# -- the server's side ---------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Load the modules, then fork on request until the launcher closes its end."""
    for name in PRELOADED:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    requests = socket.socket(fileno=descriptor)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    statuses: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_ended(statuses)
        if requests.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(requests, 1, _DESCRIPTORS)
            if not message:
                os._exit(0)  # the launcher is gone; with this process the kernel ends the ranks that are left
            channel, status, *streams = descriptors
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                for open_descriptor in (wake_read, wake_write, status, requests.detach(), *statuses.values()):
                    os.close(open_descriptor)
                _become_rank(channel, streams, parent)
            try:
                requests.sendall(_NUMBER.pack(pid))
            except BrokenPipeError:
                os._exit(0)
            statuses[pid] = status
            for sent in (channel, *streams):
                os.close(sent)


def _report_ended(statuses: dict[int, int]) -> None:
    """Send the exit code of every ended rank to its launcher."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        pid = ended.si_pid
        if ended.si_code != os.CLD_EXITED or ended.si_status != 0:
            # What a failed rank started goes with it. Before it is reaped: its number cannot have been given away yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        pipe = statuses.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(pipe)


def _become_rank(channel: int, streams: list[int], parent: int) -> None:
    """Turn the forked process into a rank; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(parent)
        os.setpgid(0, 0)  # what the rank starts can be ended together with it
        for stream, number in zip(streams, (1, 2), strict=True):
            os.dup2(stream, number)
            os.close(stream)
        # Line by line: what a rank prints is seen at once, and lines of different ranks do not mix.
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
        from .rank_process import main

        code = main(channel)
    except BaseException:  # after the report, or before there could be one: standard error is what is left
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies; if it died before we asked, die now."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _flush() -> None:
    flushes: tuple[Callable[[], None], ...] = (sys.stdout.flush, sys.stderr.flush)
    for flush in flushes:
        with contextlib.suppress(OSError, ValueError):  # a reader that went away is no failure of the rank
            flush()


_null_descriptor = -1
server = ForkServer()
atexit.register(server.stop)
os.register_at_fork(after_in_child=server.abandon)
