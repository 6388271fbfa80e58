"""What Undertow has no collective for: another backend of torch carries it, and it is said once.

The fallback is an ordinary ProcessGroup over the same ranks: Gloo for tensors on the CPU; for tensors on GPUs NCCL
where every rank has a GPU of its own, else Gloo.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import torch
import torch.distributed as dist

from ..fabric import node
from ..fabric.logs import get_logger
from ..fabric.registry import default_device

_GLOO, _NCCL = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroup.BackendType.NCCL
_said: set[tuple[str, str]] = set()
_said_lock = threading.Lock()


def make_backends(options: Any) -> dict[str, tuple[dist.ProcessGroup.BackendType, Any]]:
    """A backend for each type of device that tensors here may be on. Collective."""
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore("fallback/gloo", options.store), options.group_rank, options.group_size, options.timeout
    )
    found: dict[str, tuple[dist.ProcessGroup.BackendType, Any]] = {"cpu": (_GLOO, gloo)}
    if default_device().type != "cuda":
        return found
    found["cuda"] = (_GLOO, gloo)
    if dist.is_nccl_available() and _gpus_are_apart(options):
        nccl_options: Any = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = options.timeout
        nccl_options.global_ranks_in_group = options.global_ranks_in_group
        nccl_options.group_name = f"{options.group_id} fallback"
        store = dist.PrefixStore("fallback/nccl", options.store)
        nccl = dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, nccl_options)
        found["cuda"] = (_NCCL, nccl)
    return found


def install(process_group: dist.ProcessGroup, backends: dict[str, tuple[dist.ProcessGroup.BackendType, Any]]) -> None:
    """Let a ProcessGroup dispatch by these."""
    process_group._set_default_backend(backends["cpu"][0])
    for device, (kind, backend) in backends.items():
        process_group._register_backend(torch.device(device), kind, backend)


def _gpus_are_apart(options: Any) -> bool:
    """Whether no two ranks compute on one GPU, which NCCL refuses. Collective, through the store."""
    properties: Any = torch.cuda.get_device_properties(default_device())
    mine = [node.identity(), str(properties.uuid)]
    options.store.set(f"gpu {options.group_rank}", json.dumps(mine))
    names = [f"gpu {rank}" for rank in range(options.group_size)]
    options.store.wait(names, options.timeout)
    return len({options.store.get(name) for name in names}) == len(names)


def say(operation: str, why: str, carrier: str) -> None:
    """Once in a process for each operation and reason."""
    with _said_lock:
        if (operation, why) in _said:
            return
        _said.add((operation, why))
    get_logger().warning("%s goes to the backend %s: %s.", operation, carrier, why)
