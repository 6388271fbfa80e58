"""torch's symmetric memory. Its module is private and moves between releases: nothing else may import it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric


def allocate(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`count` elements of memory that other ranks can map. Local; follow with `share`."""
    return symmetric.empty((count,), dtype=dtype, device=device)


def share(tensor: torch.Tensor, process_group: dist.ProcessGroup) -> tuple[list[torch.Tensor], Any]:
    """Every rank's tensor as a view here, and the handle that keeps the mappings. Collective."""
    if hasattr(process_group, "carrier"):  # a group made in Python has no store that C++ could see: it is named here
        symmetric.enable_symm_mem_for_group(process_group.group_name)
    handle = symmetric.rendezvous(tensor, process_group)
    count = tensor.numel()
    views = [
        tensor if rank == handle.rank else handle.get_buffer(rank, (count,), tensor.dtype)
        for rank in range(handle.world_size)
    ]
    return views, handle
