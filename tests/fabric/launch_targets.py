"""Rank functions for the launch tests: importable by name, as any rank function must be.

Run as a script, it is a launcher whose ranks sleep, for the tests that interrupt or kill a launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from typing import Any

import torch
import torch.distributed as dist

from undertow.errors import RankLost
from undertow.fabric.flight import FlightRing
from undertow.fabric.launch import launch


def rank() -> int:
    return int(os.environ["RANK"])


def say_rank(prefix: str, suffix: str = "") -> str:
    return f"{prefix}{rank()}{suffix}"


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def facts() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "cuda_initialised": torch.cuda.is_initialized(),
        "folder": os.getcwd(),
        "import_seconds": _seconds_to_import_torch(),
    }


def _seconds_to_import_torch() -> float:
    start = time.perf_counter()
    import torch.distributed

    return time.perf_counter() - start if torch.distributed else -1.0


def tensors() -> dict[str, torch.Tensor]:
    whole = torch.arange(1 << 20, dtype=torch.float32)
    return {
        "plain": torch.full((3, 2), float(rank()), dtype=torch.bfloat16),
        "view": whole[10:14],
        "transposed": torch.arange(6).view(2, 3).T,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "computed": torch.ones(2, requires_grad=True) * 2,
        "empty": torch.empty(0, 4),
    }


def all_reduce_with_gloo() -> float:
    dist.init_process_group("gloo")
    value = torch.tensor([float(rank())])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return float(value)


def random_numbers() -> tuple[float, float]:
    import random

    import numpy as np

    return random.random(), float(np.random.rand())


def print_both() -> None:
    print(f"out {rank()}")
    print(f"err {rank()}", file=sys.stderr)


def fail_on(failing: int, delay: float = 0.0) -> None:
    if rank() == failing:
        time.sleep(delay)
        raise ValueError(f"bad luck on rank {failing}")
    time.sleep(60)


def echo_of_a_failure() -> None:
    """Rank 1 fails late and truly; the others notice a loss before the launcher can know why."""
    if rank() == 1:
        time.sleep(0.3)
        raise ValueError("the first cause")
    raise RankLost(rank=1, group="test", reason="its process died")


def kill_self_in_gloo(victim: int) -> None:
    """The survivors' connections break: a RuntimeError of torch, reported at nearly the same moment."""
    dist.init_process_group("gloo")
    dist.barrier()
    if rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def die_in_a_call(victim: int) -> None:
    ring = FlightRing.mine()
    ring.end(ring.begin('{"group": "g", "call": 1, "operator": "first", "shape": "2x2", "plan": "p"}'))
    if rank() == victim:
        ring.begin('{"group": "g", "call": 2, "operator": "last", "shape": "4x4", "plan": "p"}')
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def leave_with(code: int, how: str) -> None:
    if rank() == 0:
        time.sleep(0.2)
        return
    if how == "_exit":
        os._exit(code)
    sys.exit(code)


def return_unpicklable() -> Any:
    return lambda: None


class Stubborn:
    """Can be sent, cannot be rebuilt."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    if "RANK" not in os.environ:
        raise ValueError("not here")


def return_stubborn() -> Stubborn:
    return Stubborn()


def sleep_ignoring_sigterm() -> None:
    if rank() == 0:
        raise ValueError("first")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def fail_with_a_fabric_that_hangs() -> None:
    group = types.ModuleType("undertow.fabric.registry")
    group.shutdown = lambda: time.sleep(60)  # type: ignore[attr-defined]
    group.abort = lambda reason: None  # type: ignore[attr-defined]
    sys.modules["undertow.fabric.registry"] = group
    raise ValueError("first")


def announce_and_sleep() -> None:
    print(f"pid {os.getpid()}", flush=True)
    time.sleep(60)


def nested() -> list[str]:
    return launch(say_rank, 2, "cpu", args=("inner",))


if __name__ == "__main__":
    launch(announce_and_sleep, int(sys.argv[1]), "cpu")


def leave_a_child_behind(marker: str, how: str) -> None:
    """Start a process of its own, then fail."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", marker])
    if how == "raise":
        raise ValueError("gone")
    os.kill(os.getpid(), signal.SIGKILL)
