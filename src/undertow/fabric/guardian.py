"""The guardian: a small process that cleans up after a launcher, however the launcher ends.

It owns a folder (and, if asked, an MPS daemon inside it) for as long as its standard input stays open. The launcher
holds the other end. When that closes, because the launcher is done or because somebody killed it, the guardian ends
the daemon and removes the folder. A clean-up in the launcher itself would not survive a SIGKILL.

It declares itself the reaper of its descendants, so the daemon, which forks itself away from whoever started it, and
the daemon's server come back to it as children: it waits for exactly the processes it caused, by kernel bookkeeping
and not by process names or pid files.

This file is run as a script and imports the standard library only: a guardian is there in 30 ms.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

PIPE_FOLDER, LOG_FOLDER, SCRATCH_FOLDER = "pipe", "log", "tmp"
READY = "ready"
_PR_SET_CHILD_SUBREAPER = 36
_START_SECONDS = 5.0
_QUIT_SECONDS = 3.0


def ask_daemon(control: str, command: str, environment: Mapping[str, str], timeout: float) -> str | None:
    """The MPS daemon's answer to `command`, or None if there is no daemon that answers in time."""
    try:
        answer = subprocess.run(
            [control],
            input=command + "\n",
            env=environment,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None


def daemon_environment(folder: Path) -> dict[str, str]:
    """The environment of a daemon with folders of its own.

    It must not hide devices: clients count devices among those the daemon sees, and would apply the user's
    CUDA_VISIBLE_DEVICES a second time.
    """
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["CUDA_MPS_PIPE_DIRECTORY"] = str(folder / PIPE_FOLDER)
    environment["CUDA_MPS_LOG_DIRECTORY"] = str(folder / LOG_FOLDER)
    return environment


def start_daemon(control: str, folder: Path) -> str:
    """Start the daemon and its server. Returns "ready", or why not as half a sentence."""
    environment = daemon_environment(folder)
    log = folder / LOG_FOLDER / "start.log"
    with log.open("wb") as output:  # the daemon inherits the stream and would keep a pipe open for ever
        try:
            code = subprocess.run(
                [control, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_START_SECONDS,
                check=False,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{control} did not start: {error}"
    if code != 0:
        said = " ".join(log.read_text(errors="replace").split()) or f"exit code {code}"
        return f"{control} did not start: {said}"
    deadline = time.monotonic() + _START_SECONDS
    asked = False
    while (left := deadline - time.monotonic()) > 0:
        if not asked:  # the daemon's pipe may need a moment
            asked = ask_daemon(control, f"start_server -uid {os.getuid()}", environment, left) is not None
        servers = ask_daemon(control, "get_server_list", environment, left)
        if servers is not None and servers.strip():
            return READY
        time.sleep(0.05)
    return f"the MPS daemon started no server within {_START_SECONDS:g} s"


def end_daemon(control: str, folder: Path) -> None:
    """Ask the daemon to quit, then insist; return when every process that this one caused is gone."""
    environment = daemon_environment(folder)
    for command in ("quit", "quit -t 2"):
        ask_daemon(control, command, environment, _QUIT_SECONDS)
        if _reap_until(time.monotonic() + _QUIT_SECONDS):
            return
    while children := _children():
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        _reap_until(time.monotonic() + 0.2)


def _reap_until(deadline: float) -> bool:
    """Collect ended children; True when none is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def _children() -> list[int]:
    """Children of this process that were not collected yet, adopted ones too."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if int(parent) == os.getpid():
            found.append(int(stat.parent.name))
    return found


def remove_folder(folder: Path) -> None:
    """Remove `folder`, again if a dying process still writes into it."""
    deadline = time.monotonic() + _QUIT_SECONDS
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.05)


def main(parent: str, control: str) -> None:
    """Make a folder below `parent`, print it and its state, and serve until standard input ends.

    `control` is the MPS control program, or empty where no daemon is wanted.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(
            number, lambda *_: None
        )  # lives as long as its launcher; a handler, unlike SIG_IGN, is not inherited
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = Path(tempfile.mkdtemp(prefix="undertow-", dir=parent))
    try:
        for name in (PIPE_FOLDER, LOG_FOLDER, SCRATCH_FOLDER):
            (folder / name).mkdir()
        state = start_daemon(control, folder) if control else READY
        print(json.dumps({"folder": str(folder), "state": state}), flush=True)
        sys.stdin.buffer.read()
    except BrokenPipeError:
        pass  # the launcher is gone already
    finally:
        if control:
            end_daemon(control, folder)
        remove_folder(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
