"""What Undertow has no collective for: another backend of torch carries it, and it is said once.

The fallback is an ordinary ProcessGroup over the same ranks: Gloo for tensors on the CPU; for tensors on GPUs NCCL
where every rank has a GPU of its own, else Gloo.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from ..fabric import node
from ..fabric.logs import get_logger
from .handles import CopiedBack

_GLOO, _NCCL = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroup.BackendType.NCCL
_said: set[tuple[str, str]] = set()
_made: Counter[str] = Counter()  # groups of each name: torch gives names again, and stores outlive groups
_said_lock = threading.Lock()
# Gloo reduces none of these; the low bits of sums, products and the rest are the same in more bits.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_MESSAGES = ("send", "recv", "recv_anysource")


class _Gloo(dist.ProcessGroupGloo):
    """Gloo, telling its new timeout on: torch sets that of a group by setting that of each backend it knows."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, tell: Callable[[timedelta], None]
    ) -> None:
        super().__init__(store, rank, size, timeout)
        self._tell = weakref.WeakMethod(tell)  # of the group that owns this one

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        if (tell := self._tell()) is not None:
            tell(timeout)


def make_backends(
    options: Any, device: torch.device, tell_timeout: Callable[[timedelta], None]
) -> dict[str, tuple[dist.ProcessGroup.BackendType, Any]]:
    """A backend for each type of device that tensors here may be on; `device` is this rank's. Collective."""
    _made[str(options.group_id)] += 1
    store = dist.PrefixStore(f"fallback/{_made[str(options.group_id)]}", options.store)
    rank, size = options.group_rank, options.group_size
    gloo = _Gloo(dist.PrefixStore("gloo", store), rank, size, options.timeout, tell_timeout)
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


def call(carrier: dist.ProcessGroup, operation: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> dist.Work:
    """An operation of the carrier. Gloo takes the memory of a tensor for dense, whatever its strides, so it gets copies
    of those with gaps, and what it writes (the first argument of every collective) is copied back."""
    if operation in _MESSAGES:
        return cast(dist.Work, getattr(carrier, operation)(*arguments, **named))
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    first, *others = [_for_gloo(one, written if place == 0 else []) for place, one in enumerate(arguments)]
    work = getattr(carrier, operation)(first, *others, **named)
    return cast(dist.Work, CopiedBack(operation, work, written) if written else work)


def _for_gloo(given: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """`given`, or as it is nested in lists: tensors that Gloo would misread or refuse are replaced by copies."""
    if isinstance(given, (list, tuple)):
        return [_for_gloo(one, copies) for one in given]
    if not isinstance(given, torch.Tensor) or not given.is_cpu or given.layout != torch.strided:
        return given
    if given.is_contiguous() and given.dtype not in _WIDER:
        return given
    tensor = given.detach()
    copy = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype), copy=True, memory_format=torch.contiguous_format)
    copies.append((tensor, copy))
    return copy
