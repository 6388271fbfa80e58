"""Every `UNDERTOW_*` environment variable, in one table. `docs/settings.md` is checked against it by a test."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Setting:
    """One environment variable: its name, the value used when it is unset, and what it does."""

    name: str
    default: str
    meaning: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)

    def is_on(self) -> bool:
        return self.get().strip().lower() not in ("", "0", "no", "off", "false")


NODE = Setting("UNDERTOW_NODE", "", "Name of this rank's node; ranks with equal names share memory. Unset: found out.")
DEADLINE = Setting("UNDERTOW_DEADLINE", "60", "Seconds after which a wait for another rank is an error.")
CHECK = Setting(
    "UNDERTOW_CHECK",
    "0",
    "1: compare operator, shapes and dtypes across ranks before every call; on a GPU, look at indices of lookups, too.",
)
DMA_PACE = Setting("UNDERTOW_DMA_PACE", "", "Emulated speed of the CPU dma lane, such as `1GB/s,20us`. Unset: unpaced.")
FLIGHT_DIR = Setting(
    "UNDERTOW_FLIGHT_DIR", "", "Folder of flight records. Unset: `undertow/flight` in the user's cache."
)
FLIGHT_RING = Setting("UNDERTOW_FLIGHT_RING", "", "Set by the launcher: where this rank records its calls.")
BIND = Setting("UNDERTOW_BIND", "1", "1: a launch binds each CPU rank to its share of the cores, if there are enough.")
LOG = Setting("UNDERTOW_LOG", "WARNING", "Level of the `undertow` logger.")
CACHE_DIR = Setting(
    "UNDERTOW_CACHE_DIR", "", "Folder of plans, tables and machine files. Unset: the user's cache folder."
)
MPS = Setting("UNDERTOW_MPS", "auto", "`auto`, `off` (time slicing), or `require` (refuse without MPS).")
GATE = Setting(
    "UNDERTOW_GATE",
    "auto",
    "`auto`: ranks that share a GPU, and reach each other's memory, meet before kernels that wait for each other; "
    "`off`: they do not, and may hang. Backward passes that leave rows where they are meet on any node, whatever it "
    "says.",
)
NET = Setting(
    "UNDERTOW_NET",
    "auto",
    "What carries messages over lane `net` in which all ranks take part: `backend`, torch.distributed's own (NCCL), or "
    "`host`, Gloo through host memory; `auto`: NCCL where a group spans nodes and every rank has a GPU of its own. "
    "Equal on all ranks.",
)
POSTS = Setting(
    "UNDERTOW_POSTS",
    "0",
    "1: `auto` also tries fused plans whose kernels post to the proxy's ring, where GPUs have no peer access. What "
    "moves those posts has not run on a GPU in its present form, so they run by name only until it has. The first "
    "rank's counts.",
)
DEVICE = Setting(
    "UNDERTOW_DEVICE", "", "Device of a rank, `cpu` or `cuda`; the launcher sets it. Unset: a GPU if there is one."
)
DEVICE_INDEX = Setting(
    "UNDERTOW_DEVICE_INDEX",
    "",
    "Index of a rank's GPU; the launcher sets it. Unset: `LOCAL_RANK`, else the one that the program chose, else the "
    "rank.",
)
SIM_CORE = Setting("UNDERTOW_SIM_CORE", "", "`python`: the simulator's loops run uncompiled. Unset: with Numba.")
CONFORMANCE = Setting(
    "UNDERTOW_CONFORMANCE", "", "Folder of published tables of others. Unset: looked for beside the checkout."
)


#: What CUDA's driver is told before it is first called, where the user has said nothing. A kernel loaded for the first
#: time behind a waiting stream would hang, and streams that share a hardware queue hold each other up.
DRIVER = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def cache_folder() -> Path:
    """Where files that can be made again are kept."""
    chosen = CACHE_DIR.get()
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "undertow"


ALL: tuple[Setting, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Setting))
