"""Stands in for nvidia-cuda-mps-control: a daemon and a server that sleep, and the commands that Undertow sends.

Behaviour by FAKE_MPS: `refuse` (the daemon does not start), `serverless` (no server ever comes), `stubborn` (`quit` is
ignored).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent"))
behaviour = os.environ.get("FAKE_MPS", "")


def start(name: str) -> None:
    """Start a sleeping process that belongs to nobody, as a daemon does."""
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        if os.fork() == 0:
            (folder / name).write_text(str(os.getpid()))
            time.sleep(120)
        os._exit(0)
    os.wait()
    while not (folder / name).exists() or not (folder / name).read_text():
        time.sleep(0.005)


def is_alive(name: str) -> bool:
    try:
        os.kill(int((folder / name).read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


if sys.argv[1:] == ["-d"]:
    if behaviour == "refuse":
        sys.exit("no permission")
    start("daemon.pid")
    sys.exit(0)

if not is_alive("daemon.pid"):
    sys.exit("Cannot find MPS control daemon process")
for line in sys.stdin:
    if line.startswith("start_server -uid") and behaviour != "serverless":
        start("server.pid")
    elif line.startswith("get_server_list") and is_alive("server.pid"):
        print((folder / "server.pid").read_text())
    elif line.startswith("quit") and behaviour != "stubborn":
        for name in ("server.pid", "daemon.pid"):
            if is_alive(name):
                os.kill(int((folder / name).read_text()), signal.SIGTERM)
