"""The groups of this process: made at first use, found again, closed together."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import errors, settings
from . import watchdog
from .flight import FlightRing
from .group import Group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_leaving = False
_groups: dict[str, Group] = {}
_groups_lock = threading.RLock()
_making: dict[str, threading.Lock] = {}  # by name: two threads make two groups in any order, as other ranks' may do
_initialised_here = False
_LONGEST = 365 * 24 * 3600  # what waits count in nanoseconds, and torch.distributed in milliseconds
_times_joined = 0


def init(deadline: float | None = None) -> Group:
    """The group of all ranks. Initialises torch.distributed from the environment (or as one rank) if nobody did.

    A rank's GPU is this thread's current one from here on: what the program makes on "cuda" must not be on the first.
    """
    global _initialised_here
    with _groups_lock:
        _prepare_cuda()
        if not dist.is_initialized():
            if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
                _join_job()
            else:
                dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)
            _initialised_here = True
    group = as_group(None, deadline=deadline)
    if group.device.type == "cuda":
        torch.cuda.set_device(group.device)
    return group


def _prepare_cuda() -> None:
    """`settings.DRIVER`. Not even whether there is a GPU may be asked before: the driver reads it when first called."""
    cuda: Any = torch.cuda  # carries no types
    if torch.version.cuda is not None and settings.DEVICE.get() != "cpu" and not cuda.is_initialized():
        for name, value in settings.DRIVER.items():
            os.environ.setdefault(name, value)


def _join_job() -> None:
    """Initialise torch.distributed from the launcher's environment.

    A launcher's store outlives `shutdown`. torch would find the addresses of its last time there and connect to nobody;
    so each time gets a part of the store of its own. Without such a store, rank 0 makes a new one each time.
    """
    global _times_joined
    _times_joined += 1
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(_backend())
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    part = f"undertow/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_times_joined}"
    patience = timedelta(seconds=seconds_to_wait(None))
    store = dist.PrefixStore(part, dist.TCPStore(host, port, is_master=False, timeout=patience))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(_backend(), store=store, rank=rank, world_size=size)


def as_group(group: Group | dist.ProcessGroup | DeviceMesh | str | None, deadline: float | None = None) -> Group:
    """The `Group` behind whatever names one: itself, a ProcessGroup, a DeviceMesh of one dimension, the name of a group
    that was used before, None for all ranks.

    The first time a ProcessGroup is seen, all its ranks must come here (it is collective).
    """
    if isinstance(group, Group):
        return group
    if isinstance(group, str):
        return named(group)
    if not dist.is_initialized():
        raise errors.NotInitialised(what="This call")
    process_group = _process_group_of(group)
    name = process_group.group_name
    with _groups_lock:
        making = _making.setdefault(name, threading.Lock())
    with making:  # and no other lock, as other ranks are waited for
        known = _groups.get(name)
        if known is not None and known.process_group is process_group and not known.closed:
            if deadline is not None:
                known.deadline = seconds_to_wait(deadline)
            return known
        if known is not None:
            known.close()  # torch.distributed was torn down and made again under the same name
        made = Group(process_group, default_device(dist.get_rank()), seconds_to_wait(deadline))
        with _groups_lock:
            _groups[name] = made
        made.when_closed = _forget
        _leave_at_exit()
        return made


def named(name: str) -> Group:
    """The group of that name, which this process has used before: operators of torch carry names, not objects."""
    found = _groups.get(name)
    if found is None:
        known = ", ".join(repr(one) for one in sorted(_groups)) or "there is none: call undertow.init() first"
        must = f"the name of a group that was used before ({known})"
        raise errors.InvalidArgument(argument="group", was=repr(name), must=must)
    return found


def _forget(group: Group) -> None:
    if _groups.get(group.name) is group:
        del _groups[group.name]


def seconds_to_wait(given: float | None) -> float:
    """Seconds that a wait may take, from the call or the environment."""
    name, value = ("deadline", given) if given is not None else (settings.DEADLINE.name, settings.DEADLINE.get())
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:  # nan, too
        must = "a positive number of seconds" + (", at most those of a year" if seconds > _LONGEST else "")
        raise errors.InvalidArgument(argument=name, was=repr(value), must=must)
    return seconds


def _process_group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if isinstance(group, dist.ProcessGroup):
        return group
    # What new_group gives to ranks that it leaves out is no ProcessGroup, whatever its type says.
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        must = "one that contains it"
        raise errors.InvalidArgument(argument="group", was="a ProcessGroup without this rank", must=must)
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            must = "one dimension of it, such as mesh['tp']"
            raise errors.InvalidArgument(argument="group", was=f"a DeviceMesh of {group.ndim} dimensions", must=must)
        return group.get_group()
    must = "an undertow group, a ProcessGroup, a DeviceMesh dimension or None"
    raise errors.InvalidArgument(argument="group", was=type(group).__name__, must=must)


def default_device(rank: int = 0) -> torch.device:
    """The device this rank, number `rank` of the job, computes on: what the launcher said, else the GPU of its local
    rank; without a launcher the one that the program has chosen, else its rank's, as far as there are; else the CPU."""
    kind = settings.DEVICE.get() or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise errors.InvalidArgument(argument=settings.DEVICE.name, was=repr(kind), must="cpu or cuda")
    visible = torch.cuda.device_count()
    if visible == 0:
        raise errors.InvalidArgument(argument=settings.DEVICE.name, was="cuda", must="cpu, as no GPU is visible here")
    index = settings.DEVICE_INDEX.get() or os.environ.get("LOCAL_RANK") or _chosen_index(rank)
    if not index.isdecimal():
        raise errors.InvalidArgument(argument=settings.DEVICE_INDEX.name, was=repr(index), must="the number of a GPU")
    return torch.device("cuda", int(index) % visible)


def _chosen_index(rank: int) -> str:
    cuda: Any = torch.cuda  # carries no types
    return str(cuda.current_device() if cuda.is_initialized() else rank)


def _backend() -> str:
    return "gloo" if default_device().type == "cpu" else "cpu:gloo,cuda:nccl"


def abort(reason: str) -> None:
    """Fail every group of this process, so that its streams let go before the process ends."""
    with _groups_lock:
        for group in _groups.values():
            group.fail(errors.RankLost(rank=group.rank, group=group.name, reason=reason))


def shutdown() -> None:
    """Close every group of this process, and torch.distributed if `init` started it."""
    global _initialised_here
    with _groups_lock:
        healthy = all(not group.failed for group in _groups.values())
        for group in list(_groups.values()):
            group.close()
        _groups.clear()
        if _initialised_here and dist.is_initialized() and healthy:
            dist.destroy_process_group()
        _initialised_here = False


def _leave_at_exit() -> None:
    """A program that ends in order is no lost rank. A launched rank says so itself, once it has returned a result."""
    global _leaving
    if not _leaving and not settings.FLIGHT_RING.get():
        _leaving = True
        atexit.register(_leave)


def _refuse_in_child() -> None:
    """A forked child has this process's groups, but it is no rank of them."""
    global _groups_lock
    _groups_lock = threading.RLock()  # another thread may have held it
    atexit.unregister(_leave)
    for group in _groups.values():
        group.refuse_fork()


def _leave() -> None:
    in_order = not Group.any_failed and getattr(sys, "last_value", None) is None  # set by what nobody caught
    if in_order:
        FlightRing.mine().leave()
    try:
        for group in list(_groups.values()):
            if in_order:
                group.finish()
            else:
                group.abandon()
    finally:
        for group in list(_groups.values()):
            group.fall_silent()
        watchdog.instance().stop()


os.register_at_fork(after_in_child=_refuse_in_child)
