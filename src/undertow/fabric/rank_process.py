"""One rank of a launch, from the fork to its end: environment, call, report.

The environment is set before anything of the user's is imported, and before anything touches CUDA. What comes back
is bytes through a socket, never a file: the pickled result, or what went wrong in words.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import settings
from ..errors import DeviceLost, RankLost
from .flight import FlightRing
from .logs import LEVELS, get_logger

PRIMARY, SUSPECT, SECONDARY = 0, 1, 2
SHUTDOWN_SECONDS = 2.0  # for a failed rank to close its fabric
_PEER_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused")

importing_main = False  # while a rank imports the launcher's main module, which must not launch again


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank needs to know. `cores` are the ones it is bound to, none for all. `call` is the pickled (function,
    args, kwargs): opened after all else is set.
    """

    environment: dict[str, str]
    preparation: dict[str, Any]
    threads: int
    cores: tuple[int, ...]
    call: bytes


@dataclass(frozen=True, slots=True)
class Returned:
    """The pickled result."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception in words, so that the launcher need not be able to import its class."""

    kind: str
    cause: str
    traceback: str
    blame: int
    time: float


Report = Returned | Raised


class _TensorPickler(pickle.Pickler):
    """Sends tensors as the bytes they show: device memory comes to the host, a view leaves its buffer behind."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta:
            return NotImplemented
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        shown = value.numel() * value.element_size()
        if value.device.type == "cpu" and value.untyped_storage().nbytes() == shown:
            return NotImplemented
        copy = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return _restore_tensor, (copy, isinstance(value, torch.nn.Parameter), value.requires_grad)


def _restore_tensor(copy: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    if is_parameter:
        return torch.nn.Parameter(copy, requires_grad)
    return copy.requires_grad_(requires_grad)


def pack(value: Any) -> bytes:
    """Pickle `value` by value: no shared memory, no descriptors."""
    buffer = io.BytesIO()
    _TensorPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def main(channel: int) -> int:
    """Run the job that arrives through `channel`; returns the exit code of this process."""
    connection = Connection(channel)
    try:
        job: Job = pickle.loads(connection.recv_bytes())
    except EOFError:
        return 1  # the launcher is gone: nobody is left to be told
    try:
        _prepare(job)
        function, args, kwargs = pickle.loads(job.call)
        result = pack(_run(function, args, kwargs))
        FlightRing.mine().leave()
        _shut_down()
    except BaseException as error:  # whatever ended the rank is reported, not hidden
        report, code = _describe(error)
        connection.send_bytes(pickle.dumps(report))
        _leave_within(SHUTDOWN_SECONDS, code)
        _shut_down(f"it failed with {type(error).__name__}")
        atexit._run_exitfuncs()
        return code
    connection.send_bytes(pickle.dumps(Returned(result)))
    threading._shutdown()  # type: ignore[attr-defined]  # joins the user's threads, as the end of any program does
    atexit._run_exitfuncs()
    return 0


def run_script(path: str, argv: Sequence[str]) -> None:
    """Run a Python script as this rank's main program: the function behind `undertow run`."""
    sys.argv = [path, *argv]
    sys.path[0:1] = [str(Path(path).resolve().parent)]
    runpy.run_path(path, run_name="__main__")


def _prepare(job: Job) -> None:
    """Make this fork of the server look like a fresh process of the launcher."""
    global importing_main
    os.environ.clear()
    os.environ.update(job.environment)
    tempfile.tempdir = None  # found anew from this rank's TMPDIR
    np.random.seed()  # the server's state would be every rank's and every launch's
    level = settings.LOG.get().strip().upper()
    if level in LEVELS:
        get_logger().setLevel(level)
    if job.threads:
        torch.set_num_threads(job.threads)
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    FlightRing.mine()  # claims the slot, so that even a rank without a call has its pid in the record
    importing_main = True
    try:
        spawn.prepare(job.preparation)
    finally:
        importing_main = False


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
        return None


def _describe(error: BaseException) -> tuple[Raised, int]:
    """The report of an exception, and the exit code that goes with it."""
    kind = type(error).__name__
    text = "".join(traceback.format_exception(type(error), error, _user_frames(error)))
    code = 1
    cause = f"{kind}: {error}" if str(error) else kind
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        cause = f"exit code {code}" if isinstance(error.code, int) else f"exit code 1: {error.code}"
        text = ""
    return Raised(kind, cause, text, _blame(error), time.time()), code


def _user_frames(error: BaseException) -> Any:
    """The traceback without the frames of this file, which would only push the user's out of sight."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__ and frame.tb_next is not None:
        frame = frame.tb_next
    return frame


def _blame(error: BaseException) -> int:
    """Whether an error is a first cause, the echo of another rank's, or perhaps one (a connection that broke)."""
    if isinstance(error, (RankLost, DeviceLost, KeyboardInterrupt)):
        return SECONDARY
    if isinstance(error, (dist.DistError, ConnectionError)):
        return SUSPECT
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_GONE):
        return SUSPECT
    return PRIMARY


def _leave_within(seconds: float, code: int) -> None:
    """End this process in time even if closing the fabric waits for the others: its death is what tells them."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _shut_down(failure: str = "") -> None:
    """Close the groups if this rank ever made one; after a failure, let go of what its streams wait for."""
    registry = sys.modules.get("undertow.fabric.registry")
    if registry is not None:
        if failure:
            registry.abort(failure)
        registry.shutdown()
