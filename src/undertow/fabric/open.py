"""Which fabric a group stands on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Fabric
    from .group import Group


def open_fabric(group: Group) -> Fabric:
    """The fabric for the group's device. Collective. GPU-only modules are imported only here."""
    if group.device.type == "cuda":
        from .cuda import CudaFabric

        return CudaFabric(group)
    from .cpu import CpuFabric

    return CpuFabric(group)
