"""Which fabric a group stands on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .base import Fabric
    from .group import Group


def open_fabric(group: Group) -> Fabric:
    """The fabric for the group's device. Collective. GPU-only modules are imported only here.

    Its tensors outlive the call that first needs it: made in a caller's inference mode, nobody else could write to
    them, not even the watchdog to the abort word.
    """
    with torch.inference_mode(False):
        if group.device.type == "cuda":
            from .cuda import CudaFabric

            return CudaFabric(group)
        from .cpu import CpuFabric

        return CpuFabric(group)
