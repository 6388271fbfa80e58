"""What a number was measured on: versions, hardware, ranks, commit. A result without these cannot be compared."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def environment(group_facts: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Facts to store beside a measurement; `group_facts` (ranks, link, ...) come from whoever knows the group.

    The host's name is left out on purpose: results are published. The GPU is told only to a process that uses it:
    asking would make a context in one that does not.
    """
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "source": source(),
        "undertow": _version("undertow"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numba": _version("numba"),
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "driver": driver_version(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "gpu": None,
        "sms": None,
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "link": None,
    }
    cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call
    if cuda.is_initialized():
        properties = cuda.get_device_properties(cuda.current_device())
        facts["gpu"] = properties.name
        facts["sms"] = properties.multi_processor_count
    return facts | dict(group_facts or {})


def cpu_model(information: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the kernel gives it, or the architecture where it gives none (as on many Arm boards)."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.machine()


def usable_cores() -> int:
    """Cores this process may run on, which in a container is fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def nccl_version() -> str | None:
    """The version of the NCCL that torch was built with; None without one."""
    if torch.version.cuda is None or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    nccl: Any = torch.cuda.nccl  # carries no types
    return ".".join(str(part) for part in nccl.version())


def driver_version(information: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The NVIDIA driver's version, from the kernel module or else its management library; None without a driver."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", information.read_text())
        if found:
            return found.group(1)
    except OSError:
        pass  # some containers hide the file although the driver is there: ask the library
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if library.nvmlInit_v2() != 0:
        return None
    try:
        return text.value.decode() if library.nvmlSystemGetDriverVersion(text, len(text)) == 0 else None
    finally:
        library.nvmlShutdown()


def commit(package: Path = Path(__file__).parents[1]) -> str | None:
    """The commit of the checkout the package lies in, read from `.git` itself; None for an installed package.

    Only `<checkout>/src/undertow` counts. Searching upwards would report a stranger's commit for a package installed
    in a virtual environment inside somebody else's checkout.
    """
    git = package.parent.parent / ".git"
    if package.parent.name != "src" or not git.exists():
        return None
    try:
        if git.is_file():  # a worktree: the file names the real folder
            git = git.parent / git.read_text().partition("gitdir:")[2].strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        name = head.partition("ref:")[2].strip()
        shared = git / "commondir"
        folders = [git, git / shared.read_text().strip()] if shared.exists() else [git]
        return next((found for folder in folders if (found := _reference(folder, name))), None)
    except OSError:
        return None


def source(package: Path = Path(__file__).parents[1]) -> str:
    """A digest of the package's own files: what ran, whatever the commit says of a tree that was changed since."""
    digest = hashlib.sha256()
    for one in sorted(package.rglob("*.py")):
        digest.update(one.relative_to(package).as_posix().encode() + b"\0" + one.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _reference(git: Path, name: str) -> str | None:
    """The hash that reference `name` stands for, loose or packed."""
    if (git / name).is_file():
        return (git / name).read_text().strip()
    packed = git / "packed-refs"
    if packed.is_file():
        for line in packed.read_text().splitlines():
            value, _, reference = line.partition(" ")
            if reference == name:
                return value
    return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        if distribution == "undertow":  # run from a checkout by PYTHONPATH, without an installation
            from .. import __version__

            return __version__
        return None
