"""A virtual node: several ranks on one GPU, under CUDA MPS where it can be had.

MPS lets the kernels of several processes run at the same time; without it the driver gives each process the whole
card for a slice of time. Both are correct, only the first one overlaps.

A daemon that already runs is used and left alone. One that we start has private folders and belongs to a guardian
process (see guardian.py), which ends it when this context is left, or when this process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from ..errors import InvalidArgument, VirtualNodeUnavailable
from . import guardian
from .logs import get_logger

MODES = ("auto", "off", "require")
SHARING = 4  # ranks of a GPU which has room for two contexts of each
DEFAULT_PIPE_FOLDER = "/tmp/nvidia-mps"  # where nvidia-cuda-mps-control looks when nothing is said
_ASK_SECONDS = 2.0
_LONGEST_PARENT = 48  # characters: sockets below it must stay within the 107 that the kernel allows


def control_program() -> str | None:
    """The MPS control program, or None where there is none."""
    return shutil.which("nvidia-cuda-mps-control")


class PrivateFolder:
    """A temporary folder that is removed when the context is left or this process dies, with its guardian process."""

    def __init__(self, control: str = "") -> None:
        self.path = Path()
        self.state = ""
        self._control = control
        self._guardian: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrivateFolder:
        parent = tempfile.gettempdir()
        if len(parent) > _LONGEST_PARENT and os.access("/tmp", os.W_OK):
            parent = "/tmp"
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, parent, self._control],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher; the guardian follows it
        )
        try:
            assert self._guardian.stdout is not None
            line = self._guardian.stdout.readline()
            if not line:
                raise OSError(f"no temporary folder could be made in {parent}")
            answer = json.loads(line)
        except BaseException:
            self._end()
            raise
        self.path, self.state = Path(answer["folder"]), str(answer["state"])
        return self

    def __exit__(self, kind: object, error: object, traceback: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        """Close the pipe that keeps the guardian waiting, and wait for it."""
        if self._guardian is None:
            return
        assert self._guardian.stdin is not None
        assert self._guardian.stdout is not None
        self._guardian.stdin.close()
        self._guardian.wait()
        self._guardian.stdout.close()
        self._guardian = None

    @property
    def scratch(self) -> Path:
        """The part of the folder that ranks may use as their TMPDIR."""
        return self.path / guardian.SCRATCH_FOLDER

    def scratch_environment(self) -> dict[str, str]:
        """Variables that send a rank's temporary files here. Compiler caches stay where they are, to be found again."""
        environment = {"TMPDIR": str(self.scratch)}
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            user = str(os.getuid())
            with contextlib.suppress(KeyError):
                import pwd

                user = pwd.getpwuid(os.getuid()).pw_name
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"torchinductor_{user}")
        return environment


class VirtualNode:
    """`ranks` processes on `devices` GPUs. Enter it before the ranks start, leave it after they ended.

    mode "auto" uses MPS if it can be had and says so in one sentence if not; "require" raises
    VirtualNodeUnavailable instead; "off" wants time slicing.
    """

    def __init__(self, ranks: int, mode: str = "auto", devices: int = 1) -> None:
        if mode not in MODES:
            raise InvalidArgument(argument="mps", was=repr(mode), must=f"one of {', '.join(MODES)}")
        self.ranks = ranks
        self.mode = mode
        self.uses_mps = False
        self.owns_daemon = False
        self._ranks_per_device = -(-ranks // devices)
        self._mps_environment: dict[str, str] = {}
        self._folder = PrivateFolder()

    def __enter__(self) -> VirtualNode:
        control = None if self.mode == "off" else control_program()
        running = self._running_daemon(control) if control else None
        if control and running is None:
            self._folder = PrivateFolder(control)
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._folder)
            if running is not None:
                self._mps_environment = running
            elif self.mode != "off":
                reason = self._folder.state if control else "the program nvidia-cuda-mps-control is not installed"
                if control and reason == guardian.READY:
                    self.owns_daemon = True
                    self._mps_environment = {
                        "CUDA_MPS_PIPE_DIRECTORY": str(self._folder.path / guardian.PIPE_FOLDER),
                        "CUDA_MPS_LOG_DIRECTORY": str(self._folder.path / guardian.LOG_FOLDER),
                    }
                else:
                    self._do_without(reason)
            self.uses_mps = bool(self._mps_environment)
            undo.pop_all()
        return self

    def __exit__(self, kind: object, error: object, traceback: TracebackType | None) -> None:
        self._folder.__exit__(kind, error, traceback)

    def rank_environment(self, rank: int) -> dict[str, str]:
        """What rank `rank` must have in its environment before it touches CUDA."""
        # 32 connections each exhausted the card's hardware channels at 4 MPS clients ("out of memory", "device busy").
        # Seven contexts (`copy_context.py`) found room with 16 each, and eight did not.
        each = self._ranks_per_device
        connections = min(32, max(8, (52 if each <= SHARING else 64) // each))
        environment = {
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": str(connections),
            "CUDA_MODULE_LOADING": "EAGER",  # a kernel loaded behind a waiting stream hangs
            "NCCL_HOSTID": f"undertow-{os.getpid()}-{rank}",  # NCCL refuses two ranks of one host on one GPU
            "NCCL_SOCKET_IFNAME": "lo",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog reports losses; NCCL would end the process
            **self._folder.scratch_environment(),
        }
        if self.uses_mps:
            # No percentage: it would limit how many SMs a rank has but not which. Measured at 4 ranks, their sets
            # overlapped, and equal matmuls took 11.9 to 14.9 ms; with grids of a quarter of the card, all took 12.8.
            environment |= self._mps_environment
        elif "CUDA_MPS_PIPE_DIRECTORY" in os.environ or Path(DEFAULT_PIPE_FOLDER).is_dir():
            # A daemon that is not wanted, or does not answer: an empty folder keeps the driver from talking to it.
            environment["CUDA_MPS_PIPE_DIRECTORY"] = str(self._folder.path / guardian.PIPE_FOLDER)
        return environment

    def _running_daemon(self, control: str) -> dict[str, str] | None:
        """The variables that lead to a daemon which somebody else runs, or None."""
        folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_PIPE_FOLDER)
        if not Path(folder).is_dir():
            return None
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder}
        if guardian.ask_daemon(control, "get_server_list", environment, _ASK_SECONDS) is None:
            return None
        found = {"CUDA_MPS_PIPE_DIRECTORY": folder}
        if "CUDA_MPS_LOG_DIRECTORY" in os.environ:
            found["CUDA_MPS_LOG_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"]
        return found

    def _do_without(self, reason: str) -> None:
        if self.mode == "require":
            remedy = "install or permit MPS, or choose mps='off' for time slicing"
            raise VirtualNodeUnavailable(ranks=self.ranks, reason=reason, remedy=remedy)
        get_logger().warning("The %d ranks share the GPU by time slicing, because %s.", self.ranks, reason)
