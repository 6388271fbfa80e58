"""torch's symmetric memory. Its module is private and moves between releases: nothing else may import it."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

# Names are of a type that not every release of torch has.
_names: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
_made: Counter[str] = Counter()


def allocate(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`count` elements of memory that other ranks can map. Local; follow with `share`."""
    return symmetric.empty((count,), dtype=dtype, device=device)


def share(tensor: torch.Tensor, process_group: dist.ProcessGroup) -> tuple[list[torch.Tensor], Any]:
    """Every rank's tensor as a view here, and the handle that keeps the mappings. Collective."""
    handle = symmetric.rendezvous(tensor, known_name(process_group))
    count = tensor.numel()
    views = [
        tensor if rank == handle.rank else handle.get_buffer(rank, (count,), tensor.dtype)
        for rank in range(handle.world_size)
    ]
    return views, handle


def known_name(process_group: dist.ProcessGroup) -> Any:
    """The name by which torch's C++ finds the group and its store.

    A group made in Python is known there without its store, and a null pointer would be followed: its carrier, an
    ordinary group over the same ranks, is registered beside it. The registry does not keep it, so the name goes with
    it.
    """
    carrier = getattr(process_group, "carrier", None)
    if carrier is None:
        return process_group.group_name
    if carrier not in _names:
        again = _made[process_group.group_name]  # torch remembers names of groups that are gone; alike on all ranks
        _made[process_group.group_name] += 1
        name: Any = f"undertow symmetric memory {process_group.group_name} {again}"
        _register_process_group(name, carrier)
        _SymmetricMemory.set_group_info(name, carrier.rank(), carrier.size(), process_group.get_group_store())
        weakref.finalize(carrier, _unregister_process_group, name)
        _names[carrier] = name
    return _names[carrier]
