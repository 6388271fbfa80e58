"""What symmetric memory is held, and a way to hold it early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .group import Group
from .registry import as_group

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


def memory(group: Group | dist.ProcessGroup | DeviceMesh | None = None) -> dict[str, int]:
    """Bytes of symmetric memory that this rank holds for `group`, by use."""
    return as_group(group).fabric.memory()


def reserve(nbytes: int, group: Group | dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Hold `nbytes` of workspace for every lane now: a capture cannot grow it later. Collective."""
    fabric = as_group(group).fabric
    for lane, missing in fabric.lanes().items():
        if not missing and lane != "net":
            fabric.workspace(lane, nbytes)
