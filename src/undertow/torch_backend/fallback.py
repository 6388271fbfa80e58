"""What Undertow has no collective for: another backend of torch carries it, and it is said once.

The fallback is an ordinary ProcessGroup over the same ranks: Gloo for tensors on the CPU; for tensors on GPUs NCCL
where every rank has a GPU of its own, else Gloo.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..fabric import node
from ..fabric.logs import get_logger

_GLOO, _NCCL = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroup.BackendType.NCCL
_said: set[tuple[str, str]] = set()
_made: Counter[str] = Counter()  # groups of each name: torch gives names again, and stores outlive groups
_said_lock = threading.Lock()


def make_backends(options: Any, device: torch.device) -> dict[str, tuple[dist.ProcessGroup.BackendType, Any]]:
    """A backend for each type of device that tensors here may be on; `device` is this rank's. Collective."""
    _made[str(options.group_id)] += 1
    store = dist.PrefixStore(f"fallback/{_made[str(options.group_id)]}", options.store)
    rank, size = options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options.timeout)
    found: dict[str, tuple[dist.ProcessGroup.BackendType, Any]] = {"cpu": (_GLOO, gloo)}
    if device.type != "cuda":
        return found
    found["cuda"] = (_GLOO, gloo)
    if dist.is_nccl_available() and _gpus_are_apart(store, rank, size, device, options.timeout):
        nccl_options: Any = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = options.timeout
        nccl_options.global_ranks_in_group = options.global_ranks_in_group
        nccl_options.group_name = f"{options.group_id} fallback"
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, nccl_options)
        found["cuda"] = (_NCCL, nccl)
    return found


def install(process_group: dist.ProcessGroup, backends: dict[str, tuple[dist.ProcessGroup.BackendType, Any]]) -> None:
    """Let a ProcessGroup dispatch by these."""
    process_group._set_default_backend(backends["cpu"][0])
    for device, (kind, backend) in backends.items():
        process_group._register_backend(torch.device(device), kind, backend)


def _gpus_are_apart(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> bool:
    """Whether no two ranks compute on one GPU, which NCCL refuses. Collective, through the store."""
    properties: Any = torch.cuda.get_device_properties(device)
    store.set(f"gpu {rank}", json.dumps([node.identity(), str(properties.uuid)]))
    names = [f"gpu {one}" for one in range(size)]
    store.wait(names, timeout)
    return len({store.get(name) for name in names}) == size


def say(operation: str, why: str, carrier: str) -> None:
    """Once in a process for each operation and reason."""
    with _said_lock:
        if (operation, why) in _said:
            return
        _said.add((operation, why))
    get_logger().warning("%s goes to the backend %s: %s.", operation, carrier, why)
