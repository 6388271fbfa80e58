"""Groups: an ordered set of ranks that share a fabric.

A `Group` wraps a torch ProcessGroup of any backend. Beside it stands a Gloo *control* group of its own for the few
host-side exchanges (addresses, shapes, timings), so that nothing of ours is ever interleaved with the user's calls.

A group fails once: the first cause wins, the abort word is set, every wait of this process on this group returns,
and each later call raises the same error.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist

from .. import errors, settings
from . import node, watchdog
from .calls import Call
from .flight import FlightRing
from .heartbeat import PERIOD, SILENCE, Heartbeat
from .logs import get_logger

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .base import Fabric


class Work(Protocol):
    """The part of torch.distributed's Work that is needed to wait without hanging."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


class InThread:
    """A blocking call that nothing can interrupt, made into a `Work`: a thread makes the call, the caller can leave."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, args=(call,), name="undertow-wait", daemon=True).start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:  # raised again by `wait`, in the thread that asked
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


_CONNECTION_CLOSED_GRACE = 3.0  # seconds in which the watchdog can name the rank behind a closed connection
_NODE_GRACE = SILENCE + 2 * PERIOD  # and in which the heartbeat can name the node


class Group:
    """The ranks of one ProcessGroup, who stands on which node, and whether all of them still live."""

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, deadline: float) -> None:
        self.process_group = process_group
        self.device = device
        self.deadline = deadline
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.name = process_group.group_name
        self.lock = threading.RLock()
        self.calls = 0
        self._agreed: tuple[str, str, str] | None = None
        self.closed = False
        self._failure: errors.UndertowError | None = None
        self._failure_lock = threading.Lock()
        self._failure_known = threading.Event()
        self._abort = np.zeros(1, dtype=np.int32)
        self.abort_address = int(self._abort.ctypes.data)
        self._abort_hooks: list[Callable[[errors.UndertowError], None]] = []
        self._tick_hooks: list[Callable[[float], None]] = []
        self._fabric: Fabric | None = None

        self._store = dist.PrefixStore(f"undertow/{_next_incarnation(self.name)}", _store_of(process_group))
        self._gloo_groups = 0
        self._heartbeat: Heartbeat | None = None
        # Through the store, before anything connects: a rank that dies while the others connect to it is known by then.
        facts = self._roll_call({"node": node.identity(), "pid": os.getpid(), "ring": FlightRing.mine().path})
        self._processes = {rank: int(fact["pid"]) for rank, fact in enumerate(facts)}
        self._rings = _open_rings(facts, self.rank)
        watchdog.instance().add(self)
        try:
            self.control = self.gloo("control")
            self.nodes = node.assign(self.exchange(sorted(self._rings)))
        except BaseException:
            watchdog.instance().remove(self)
            raise
        self.local_ranks = tuple(rank for rank, where in enumerate(self.nodes) if where == self.nodes[self.rank])
        for rank in self._rings:
            _local_processes[self.ranks[rank]] = self._processes[rank]
        if max(self.nodes) > 0:
            self._heartbeat = Heartbeat(self, self._store)
        _leave_at_exit()

    # -- who is where ------------------------------------------------------------------------------------------

    @property
    def fabric(self) -> Fabric:
        """The fabric of this group, made at first use. Making it is collective."""
        with self.lock:
            if self._fabric is None:
                from .open import open_fabric

                self._fabric = open_fabric(self)
            return self._fabric

    def is_local(self, rank: int) -> bool:
        """Whether `rank` stands on this rank's node."""
        return self.nodes[rank] == self.nodes[self.rank]

    def gloo(self, purpose: str) -> dist.ProcessGroup:
        """A Gloo group over the same ranks that nobody else uses. Collective.

        Made directly, not by `dist.new_group`: that one would need every rank of the job to come along.
        """
        self._gloo_groups += 1
        store = dist.PrefixStore(f"{purpose}/{self._gloo_groups}", self._store)
        patience = timedelta(seconds=max(60.0, self.deadline))
        made: list[object] = []
        connect = InThread(lambda: made.append(dist.ProcessGroupGloo(store, self.rank, self.size, patience)))
        self.complete(lambda: connect, "connecting")
        # torch's stubs leave a backend's calls out; they are the ones of a ProcessGroup.
        return cast(dist.ProcessGroup, made[0])

    # -- host-side exchange ------------------------------------------------------------------------------------

    def _roll_call(self, fact: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's facts by rank, through the store: no connection between ranks is needed. Collective."""
        began = time.monotonic()
        missing = set(range(self.size))
        try:
            self._store.set(f"rank {self.rank}", json.dumps(fact))
            while missing:
                missing = {rank for rank in missing if not self._store.check([f"rank {rank}"])}
                for rank in missing:
                    pid = _local_processes.get(self.ranks[rank]) or _launched_process(self.ranks[rank])
                    if pid and watchdog.is_dead(pid):
                        raise errors.RankLost(rank=rank, group=self.name, reason=f"its process {pid} died")
                if missing and time.monotonic() - began > self.deadline:
                    waited = f"it did not come to make the group in {self.deadline:g} s"
                    raise errors.RankLost(rank=min(missing), group=self.name, reason=waited)
                if missing:
                    time.sleep(0.001 if time.monotonic() - began < 0.1 else 0.02)
            return [json.loads(self._store.get(f"rank {rank}").decode()) for rank in range(self.size)]
        except errors.RankLost:
            raise
        except RuntimeError as error:  # torch raises DistStoreError and its kin
            reason = f"the store does not answer ({str(error).splitlines()[0]})"
            raise errors.RankLost(rank="unknown", group=self.name, reason=reason) from error

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), by rank. Collective."""
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.complete(lambda: self.control.allgather([sizes], [torch.tensor([payload.numel()])]), "exchange")
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        self.complete(lambda: self.control.allgather([parts], [padded]), "exchange")
        return [json.loads(bytes(part[: int(size)].numpy()).decode()) for part, size in zip(parts, sizes, strict=True)]

    def barrier(self) -> None:
        """Return once every rank of the group has called this. Collective, on the host."""
        self.complete(lambda: self.control.barrier(), "barrier")

    def reduce_max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over ranks: the slowest rank counts. Collective."""
        tensor = torch.tensor(values, dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self.complete(lambda: self.control.allreduce([tensor], options), "reduce_max")
        return [float(value) for value in tensor]

    def complete(self, start: Callable[[], Work | None], what: str) -> None:
        """Start a torch.distributed operation and wait for it without ever hanging.

        A lost rank or the deadline ends the wait, and a broken connection is a lost rank.
        """
        with self.connected(what):
            work = start()
            began = time.monotonic()
            while work is not None and not work.is_completed():
                waited = time.monotonic() - began
                # Short operations are polled closely; long ones must not take the core from whoever computes.
                time.sleep(0 if waited < 0.0005 else 0.0001 if waited < 0.1 else 0.002)
                self.check()
                if waited > self.deadline:
                    self.fail(self.why_waiting(None, f"{what} did not complete in {self.deadline:g} s"))
            if work is not None:
                work.wait()

    @contextlib.contextmanager
    def connected(self, what: str) -> Iterator[None]:
        """Around calls of torch.distributed: they raise RuntimeError, at once or later, when a rank has gone."""
        try:
            yield
        except errors.UndertowError:
            raise
        except RuntimeError as error:
            self.broken(what, error)

    def broken(self, what: str, error: Exception) -> NoReturn:
        """Raise RankLost for what broke because a rank went away, named by the watchdog if it can be."""
        self._failure_known.wait(_NODE_GRACE if self._heartbeat is not None else _CONNECTION_CLOSED_GRACE)
        left = [rank for rank, ring in sorted(self._rings.items()) if ring.has_left]
        if left:
            reason = f"it ended while {what} waited for it"
            self.fail(errors.RankLost(rank=left[0], group=self.name, reason=reason))
        reason = f"{what} failed: {str(error).strip().splitlines()[0]}"
        self.fail(errors.RankLost(rank="unknown", group=self.name, reason=reason))
        self.check()
        raise AssertionError("a failed group raises") from error

    # -- failing -----------------------------------------------------------------------------------------------

    def fail(self, error: errors.UndertowError) -> None:
        """Record the first cause and release everything of this process that waits on this group."""
        with self._failure_lock:
            if self._failure is not None:
                return
            self._failure = error
            self._abort[0] = 1
        global _any_failure
        _any_failure = True
        self._failure_known.set()
        get_logger().error("%s", error)
        if self._heartbeat is not None:
            self._heartbeat.announce(error)
        for hook in list(self._abort_hooks):
            hook(error)

    @property
    def failed(self) -> bool:
        """Whether a rank was lost, or something else ended this group."""
        return self._failure is not None

    def check(self) -> None:
        """Raise if the group has failed or was closed."""
        if self._failure is not None:
            raise type(self._failure)(**self._failure.facts)
        if self.closed:
            raise errors.GroupClosed(group=self.name)

    def on_abort(self, hook: Callable[[errors.UndertowError], None]) -> None:
        """Call `hook` when the group fails, from the thread that noticed."""
        self._abort_hooks.append(hook)

    def on_every_tick(self, hook: Callable[[float], None]) -> None:
        """Call `hook` a few times a second from the watchdog's thread."""
        self._tick_hooks.append(hook)

    def mismatch(self) -> errors.MismatchedCall | None:
        """The error if a rank of this node is in the same call as this one, but called something else."""
        mine = Call.latest(FlightRing.mine().records(), self.name)
        for rank, ring in sorted(self._rings.items()):
            theirs = Call.latest(ring.records(), self.name)
            if mine and theirs and theirs.number == mine.number and not theirs.matches(mine):
                return errors.MismatchedCall(
                    group=self.name,
                    call=mine.number,
                    rank=self.rank,
                    mine=mine.text,
                    other_rank=rank,
                    theirs=theirs.text,
                )
        return None

    def why_waiting(self, peer: int | None, waited: str) -> errors.UndertowError:
        """The error behind a wait that took too long: ranks that called different things, or a rank that is missing."""
        disagreement = self.mismatch()
        if disagreement is not None:
            return disagreement
        mine = Call.latest(FlightRing.mine().records(), self.name)
        behind = [
            rank
            for rank, ring in sorted(self._rings.items())
            if mine and (theirs := Call.latest(ring.records(), self.name)) is not None and theirs.number < mine.number
        ]
        suspect = peer if peer is not None else (behind[0] if behind else "unknown")
        doing = ""
        if isinstance(suspect, int) and suspect in self._rings:
            theirs = Call.latest(self._rings[suspect].records(), self.name)
            doing = f"; its last call here was {theirs.text if theirs else 'none'}"
        return errors.RankLost(rank=suspect, group=self.name, reason=f"{waited}{doing}")

    # -- calls -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, operator: str, shape: str, plan: str, outputs: tuple[torch.Tensor, ...] = ()) -> Iterator[int]:
        """Bracket one operator call: flight record, mismatch check, poisoned `outputs` should it be aborted."""
        self.check()
        with self.lock:
            self.calls += 1
            call = Call(self.name, self.calls, operator, shape, plan)
            ring = FlightRing.mine()
            ticket = ring.begin(call.encode())
            failed = True
            try:
                if settings.CHECK.is_on() or self._is_news_to_gloo(call):
                    self._compare(call)
                with self.fabric.guarded_call(outputs):
                    yield self.calls
                failed = False
            finally:
                ring.end(ticket, failed=failed)

    def _is_news_to_gloo(self, call: Call) -> bool:
        """Whether this call differs from the last one that all ranks agreed on, and Gloo will carry it.

        Gloo ends the process, or takes half a message for a whole, when sizes differ. The last agreed call is the same
        on all ranks, so of ranks that differ at least one comes to compare, and never reaches Gloo.
        """
        same = self._agreed == (call.operator, call.shape, call.plan)
        return not same and self.device.type == "cpu" and call.plan.endswith(":net")

    def _compare(self, call: Call) -> None:
        """All ranks see all calls, so all of them raise the same sentence and none launches anything."""
        calls = [Call(self.name, *fields) for fields in self.exchange([call.number, call.operator, call.shape, ""])]
        for rank, other in enumerate(calls):
            if not other.matches(calls[0]):
                raise errors.MismatchedCall(
                    group=self.name,
                    call=call.number,
                    rank=0,
                    mine=calls[0].text,
                    other_rank=rank,
                    theirs=other.text,
                )
        self._agreed = (call.operator, call.shape, call.plan)

    # -- the watchdog's side -------------------------------------------------------------------------------------

    def watched_processes(self) -> dict[int, int]:
        return {rank: self._processes[rank] for rank in self._rings}

    def on_exit(self, rank: int) -> None:
        if not self._rings[rank].has_left:
            if self._heartbeat is not None:
                self._heartbeat.hear()  # it may have ended because of a loss elsewhere, and have said so
            pid = self._processes[rank]
            self.fail(errors.RankLost(rank=rank, group=self.name, reason=f"its process {pid} died"))

    def on_tick(self, now: float) -> None:
        if self._heartbeat is not None:
            self._heartbeat.tick(now)
        for hook in list(self._tick_hooks):
            hook(now)

    def close(self) -> None:
        """Release the fabric and stop watching. The ProcessGroup itself is the user's."""
        with self.lock:
            if self.closed:
                return
            if self._fabric is not None:
                self._fabric.close()
                self._fabric = None
            self.closed = True
        if self._heartbeat is not None:
            self._heartbeat.leave()
        watchdog.instance().remove(self)
        _groups.pop(self.name, None)


def _open_rings(facts: list[dict[str, Any]], me: int) -> dict[int, FlightRing]:
    """The rings of the other ranks that this rank can map: the probe for shared memory."""
    rings: dict[int, FlightRing] = {}
    for rank, fact in enumerate(facts):
        if rank == me or fact["node"] != facts[me]["node"]:
            continue
        try:
            ring = FlightRing.open(str(fact["ring"]))
        except OSError as error:
            get_logger().warning(
                "Rank %d names the same node but cannot be mapped (%s): treated as remote.", rank, error
            )
            continue
        if ring.pid == fact["pid"]:
            rings[rank] = ring
    return rings


def _store_of(process_group: dist.ProcessGroup) -> dist.Store:
    """The store behind a group; torch has no public name for the default one."""
    if hasattr(process_group, "get_group_store"):
        return process_group.get_group_store()
    return dist.PrefixStore(process_group.group_name, dist.distributed_c10d._get_default_store())


def _launched_process(rank: int) -> int:
    """Process of a rank of the same launch, from the launcher's rings; 0 without a launcher."""
    path = settings.FLIGHT_RING.get()
    if not path:
        return 0
    try:
        return FlightRing.open(f"{path.rpartition(':')[0]}:{rank}").pid
    except (OSError, ValueError):
        return 0


def _leave_at_exit() -> None:
    """A program that ends in order is no lost rank. A launched rank says so itself, once it has returned a result."""
    global _leaving
    if not _leaving and not settings.FLIGHT_RING.get():
        _leaving = True
        atexit.register(_leave)


def _leave() -> None:
    if not _any_failure and getattr(sys, "last_value", None) is None:  # set by an exception that nobody caught
        FlightRing.mine().leave()
    for group in list(_groups.values()):
        if group._heartbeat is not None:
            group._heartbeat.leave()
    watchdog.instance().stop()


_leaving = False
_any_failure = False  # of a group of this process: its end is then no orderly one, whatever the program made of it
_local_processes: dict[int, int] = {}  # of this node's ranks by global rank, as far as any group has met them
_groups: dict[str, Group] = {}
_incarnations: dict[str, int] = {}
_groups_lock = threading.RLock()
_initialised_here = False


def _next_incarnation(name: str) -> int:
    """How often a group of this name was made: every rank makes them in the same order, so the numbers agree."""
    _incarnations[name] = _incarnations.get(name, 0) + 1
    return _incarnations[name]


def init(deadline: float | None = None) -> Group:
    """The group of all ranks. Initialises torch.distributed from the environment (or as one rank) if nobody did."""
    global _initialised_here
    with _groups_lock:
        if not dist.is_initialized():
            if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
                dist.init_process_group(_backend())
            else:
                dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)
            _initialised_here = True
        return as_group(None, deadline=deadline)


def as_group(group: Group | dist.ProcessGroup | DeviceMesh | None, deadline: float | None = None) -> Group:
    """The `Group` behind whatever names one: itself, a ProcessGroup, a DeviceMesh of one dimension, None for all ranks.

    The first time a ProcessGroup is seen, all its ranks must come here (it is collective).
    """
    if isinstance(group, Group):
        return group
    if not dist.is_initialized():
        raise errors.NotInitialised(what="This call")
    process_group = _process_group_of(group)
    with _groups_lock:
        known = _groups.get(process_group.group_name)
        if known is not None and known.process_group is process_group and not known.closed:
            return known
        if known is not None:
            known.close()  # torch.distributed was torn down and made again under the same name
        made = Group(process_group, default_device(), _deadline(deadline))
        _groups[process_group.group_name] = made
        return made


def _deadline(given: float | None) -> float:
    """Seconds that a wait may take, from the call or the environment."""
    name, value = ("deadline", given) if given is not None else (settings.DEADLINE.name, settings.DEADLINE.get())
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:  # nan, too
        raise errors.InvalidArgument(argument=name, was=repr(value), must="a positive number of seconds")
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


def default_device() -> torch.device:
    """The device this rank computes on: what the launcher said, else the GPU of its local rank, else the CPU."""
    kind = settings.DEVICE.get() or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    index = settings.DEVICE_INDEX.get() or os.environ.get("LOCAL_RANK", "0")
    return torch.device("cuda", int(index) % torch.cuda.device_count())


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
        healthy = all(group._failure is None for group in _groups.values())
        for group in list(_groups.values()):
            group.close()
        _incarnations.clear()
        if _initialised_here and dist.is_initialized() and healthy:
            dist.destroy_process_group()
        _initialised_here = False
