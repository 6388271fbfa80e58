"""Groups: an ordered set of ranks that share a fabric.

A `Group` wraps a torch ProcessGroup of any backend. The few host-side exchanges (addresses, shapes, timings) go over a
board in shared memory where all ranks stand on one node, else over a Gloo *control* group of its own, so that nothing
of ours is ever interleaved with the user's calls.

A group fails once: the first cause wins, the abort word is set, every wait of this process on this group returns,
and each later call raises the same error.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist

from .. import errors, settings
from . import meeting, node, sharers, watchdog
from .board import Board
from .calls import Bracket, Call
from .flight import FlightRing
from .flight_writer import RECORDS
from .heartbeat import PERIOD, SILENCE, Heartbeat
from .logs import get_logger
from .segment import Segment
from .works import InThread, Work

if TYPE_CHECKING:
    from .base import Fabric


_CONNECTION_CLOSED_GRACE = 3.0  # seconds in which the watchdog can name the rank behind a closed connection
_SLICE = 0.02  # seconds between two looks at whether the group still stands
_NODE_GRACE = SILENCE + 2 * PERIOD  # and in which the heartbeat can name the node


class Group:
    """The ranks of one ProcessGroup, who stands on which node, and whether all of them still live."""

    #: whether a group of this process ever failed: its end is then no orderly one, whatever the program made of it
    any_failed = False

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
        self._agreed: set[tuple[str, str, str]] = set()
        self._last_agreed: tuple[str, str, str] | None = None
        self._in_step = True  # whether all ranks count their calls alike
        self.closed = False
        #: whether a collective of this group runs beside a computation: nothing else of the group may come between
        self.reserved = False
        self._failure: errors.UndertowError | None = None
        self._failure_lock = threading.Lock()
        self._failure_known = threading.Event()
        self._abort = np.zeros(1, dtype=np.int32)
        self.abort_address = int(self._abort.ctypes.data)
        self._abort_hooks: list[Callable[[errors.UndertowError], None]] = []
        self._tick_hooks: list[Callable[[float], None]] = []
        self._check_hooks: list[Callable[[], object]] = []
        self._fabric: Fabric | None = None
        self.when_closed: Callable[[Group], None] | None = None

        self._store = meeting.store_for(process_group)
        self._gloo_groups = 0
        self._heartbeat: Heartbeat | None = None
        self._board: Board | None = None
        # Through the store, before anything connects: a rank that dies while the others connect to it is known by then.
        fact = {"node": node.identity(), "pid": os.getpid(), "ring": FlightRing.mine().path}
        fact["gpu"] = sharers.name_of(device)
        facts = meeting.roll_call(self._store, meeting.Place(self.name, self.rank, self.ranks), fact, deadline)
        self._processes = {rank: int(fact["pid"]) for rank, fact in enumerate(facts)}
        sharers.met(self.ranks, [str(fact["gpu"]) for fact in facts])
        self._rings = meeting.open_rings(facts, self.rank)
        self._ended: dict[int, int] = {}  # ranks that ended on purpose, and the last call that each made here
        watchdog.instance().add(self)
        try:
            self.control = self.gloo("control")
            segment = Board.segment()
            met = self.exchange([sorted(self._rings), sorted(os.sched_getaffinity(0)), segment.path], "who is where")
            self.nodes = node.assign([rings for rings, _, _ in met])
            self.local_ranks = tuple(rank for rank, where in enumerate(self.nodes) if where == self.nodes[self.rank])
            #: whether this node has more ranks of the group than cores: who polls then keeps others from working
            self.crowded = len(self.local_ranks) > len({core for rank in self.local_ranks for core in met[rank][1]})
            if len(self.local_ranks) == self.size:
                self._board = self._open_board(segment, [path for _, _, path in met])
        except BaseException:
            watchdog.instance().remove(self)
            raise
        for rank in self._rings:
            meeting.local_processes[self.ranks[rank]] = self._processes[rank]
        if max(self.nodes) > 0:
            self._heartbeat = Heartbeat(self, self._store)

    # -- who is where ------------------------------------------------------------------------------------------

    @property
    def fabric(self) -> Fabric:
        """The fabric of this group, made at first use. Making it is collective."""
        with self.lock:
            if self.closed:
                self.check()
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
        name, patience = f"{purpose}/{self._gloo_groups}", timedelta(seconds=max(60.0, self.deadline))
        made: list[object] = []

        def connect() -> None:
            # A client of its own: connecting waits with the client's lock, and another group, on another thread of this
            # rank, may have to set what a third waits for.
            store = dist.PrefixStore(name, self._store.clone())  # type: ignore[attr-defined]
            made.append(dist.ProcessGroupGloo(store, self.rank, self.size, patience))

        self.complete(lambda: InThread(connect), "connecting")
        # torch's stubs leave a backend's calls out; they are the ones of a ProcessGroup.
        return cast(dist.ProcessGroup, made[0])

    # -- host-side exchange ------------------------------------------------------------------------------------

    def _open_board(self, mine: Segment, paths: list[str]) -> Board:
        try:
            segments = [mine if rank == self.rank else Segment.open(path) for rank, path in enumerate(paths)]
        except OSError as error:  # the path goes with its process
            self.broken("mapping a peer's memory", error)
        board = Board(self.rank, segments, self.abort_address, self.crowded)
        self.barrier()  # over Gloo still: everybody has mapped everything, and nothing needs a name any more
        for segment in segments:
            segment.seal()
        return board

    def exchange(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), by rank. Collective, for the same `purpose` on all ranks."""
        self.check()
        mine = json.dumps([purpose, value]).encode()
        notices = self._post(self._board, mine, purpose) if self._board is not None else None
        values = []
        for rank, notice in enumerate(notices if notices is not None else self._gather(mine, purpose)):
            theirs, other = json.loads(notice.decode())
            if theirs != purpose:
                self.fall_out_of_step()
                raise errors.MismatchedCall(
                    group=self.name, call=self.calls, rank=self.rank, mine=purpose, other_rank=rank, theirs=theirs
                )
            values.append(other)
        return values

    def _post(self, board: Board, mine: bytes, purpose: str) -> list[bytes] | None:
        """Over the board. Whatever interrupts it ends the group: notices would no longer meet those of their number."""
        try:
            return board.exchange(mine, self._waiting(purpose))
        except BaseException as error:
            if not self.failed:
                reason = f"{purpose} was interrupted by {type(error).__name__}"
                self.fail(errors.RankLost(rank=self.rank, group=self.name, reason=reason))
            raise

    def _gather(self, mine: bytes, purpose: str) -> list[bytes]:
        """Every rank's bytes by Gloo: between nodes, and where they are too long for a board."""
        payload = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        length = torch.tensor([payload.numel()], device="cpu")
        self.complete(lambda: self.control.allgather([sizes], [length]), purpose)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: payload.numel()] = payload
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        self.complete(lambda: self.control.allgather([parts], [padded]), purpose)
        return [bytes(part[: int(size)].numpy()) for part, size in zip(parts, sizes, strict=True)]

    def _waiting(self, purpose: str) -> Callable[[int], None]:
        """What a wait for another rank's notice looks at: a lost rank, one that has left, the deadline."""
        began = time.monotonic()

        def look(rank: int) -> None:
            self.check()
            ring = self._rings.get(rank)
            if ring is not None and ring.has_left and self._board is not None and not self._board.has_come(rank):
                reason = f"it ended while {purpose} waited for it"
                lost = errors.RankLost(rank=rank, group=self.name, reason=reason)
                self.fail(self.mismatch() or lost)  # it may have ended for having called something else
            elif time.monotonic() - began > self.deadline:
                self.fail(self.why_waiting(rank, f"{purpose} did not complete in {self.deadline:g} s"))
            self.check()

        return look

    def barrier(self) -> None:
        """Return once every rank of the group has called this. Collective, on the host."""
        if self._board is not None:
            self.exchange(None, "barrier")
        else:
            self.complete(lambda: self.control.barrier(), "barrier")

    def reduce_max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over ranks: the slowest rank counts. Collective."""
        return [max(each) for each in zip(*self.exchange(values, "reduce_max"), strict=True)]

    def complete(self, start: Callable[[], Work | None], what: str) -> None:
        """Start a torch.distributed operation and wait for it without ever hanging.

        A lost rank or the deadline ends the wait, and a broken connection is a lost rank.
        """
        with self.connected(what):
            work = start()
            began = time.monotonic()
            while work is not None and not work.is_completed():
                waited = time.monotonic() - began
                if isinstance(work, InThread):
                    work.await_completion(_SLICE)
                else:  # Short operations are polled closely; long ones must not take the core from whoever computes.
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
            if self._heartbeat is not None:
                self._heartbeat.note(error)
            self._failure = error
            self._abort[0] = 1
        Group.any_failed = True
        self._failure_known.set()
        for hook in list(self._abort_hooks):
            hook(error)
        get_logger().error("%s", error)
        if self._heartbeat is not None:
            self._heartbeat.announce()

    def refuse_fork(self) -> None:
        """In a child: what it did in the rank's name, the parent's peers would take for the parent's. Nobody is told of
        it, and nothing that both share is touched."""
        self._failure = errors.ForkedProcess(rank=self.rank, group=self.name)
        self._abort[0] = 1  # a copy of the parent's

    @property
    def failed(self) -> bool:
        """Whether a rank was lost, or something else ended this group."""
        return self._failure is not None

    def check(self) -> None:
        """Raise if the group has failed or was closed."""
        if self._failure is None:
            for hook in self._check_hooks:
                hook()
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

    def on_check(self, hook: Callable[[], object]) -> None:
        """Call `hook` before every look at whether the group has failed: it may know what nobody has noticed yet."""
        self._check_hooks.append(hook)

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
        suspect: int | str = "unknown" if peer is None else peer
        if behind and (peer is None or (peer in self._rings and peer not in behind)):
            suspect = behind[0]  # one that has come as far as this rank waits itself, for one that has not
        doing = ""
        if isinstance(suspect, int) and suspect in self._rings:
            theirs = Call.latest(self._rings[suspect].records(), self.name)
            doing = f"; its last call here was {theirs.text if theirs else 'none'}"
        return errors.RankLost(rank=suspect, group=self.name, reason=f"{waited}{doing}")

    # -- calls -------------------------------------------------------------------------------------------------

    def call(self, operator: str, shape: str, plan: str) -> Bracket:
        """Bracket one operator call: its flight record, and the check that all ranks mean the same."""
        return Bracket(self, operator, shape, plan)

    def is_news(self, kind: tuple[str, str, str]) -> bool:
        """Whether the ranks should first compare such a call: it was never seen here, or Gloo will carry it.

        Once per kind of call is enough where a later disagreement waits until the deadline, or is found when the call
        is over (`check_call`). Gloo ends the process, or takes half a message for a whole, when sizes differ, so there
        each change is compared. The last agreed call is the same on all ranks: of ranks that differ, at least one
        compares and never reaches Gloo.
        """
        if kind not in self._agreed or not self._in_step:
            return True
        if kind != self._last_agreed and ":net" in kind[2] and self.device.type == "cpu":
            return True
        return settings.CHECK.is_on()

    def compare(self, call: Call) -> None:
        """All ranks see all calls, so all of them raise the same sentence and none launches anything."""
        mine = [call.number, call.operator, call.shape, call.plan]
        calls = [Call(self.name, *theirs) for theirs in self.exchange(mine, "a call")]
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
        self.calls = max(one.number for one in calls)  # after a call that some ranks never began, numbers differ
        self._in_step = True
        self._last_agreed = call.kind
        self._agreed.add(self._last_agreed)

    def fall_out_of_step(self) -> None:
        """Ranks have heard that they are not in the same call: some may count one more than others from here on."""
        self._in_step = False

    def begin_call(self, checksum: int) -> None:
        """Let the others see of which kind the call is that begins."""
        if self._board is not None:
            self._board.begin_call(self.calls, checksum)

    def check_call(self, number: int) -> None:
        """End the group if another rank's call of that number, begun by now, is none of mine: values went wrong."""
        if self._board is None or not self._in_step:
            return
        rank = self._board.who_differs(number)
        if rank is None:
            return
        texts = []
        for ring in (FlightRing.mine(), self._rings.get(rank)):
            known = Call.numbered(number, ring.records() if ring is not None else [], self.name)
            texts.append(known.text if known is not None else "another call")
        mine, theirs = texts
        self.fail(
            errors.MismatchedCall(
                group=self.name, call=number, rank=self.rank, mine=mine, other_rank=rank, theirs=theirs
            )
        )
        self.check()

    # -- the watchdog's side -------------------------------------------------------------------------------------

    def watched_processes(self) -> dict[int, int]:
        return {rank: self._processes[rank] for rank in self._rings}

    def on_exit(self, rank: int) -> None:
        if not self._rings[rank].has_left:
            if self._heartbeat is not None:
                self._heartbeat.hear()  # it may have ended because of a loss elsewhere, and have said so
            pid = self._processes[rank]
            self.fail(errors.RankLost(rank=rank, group=self.name, reason=f"its process {pid} died"))
            return
        last = Call.latest(self._rings[rank].records(), self.name)
        if last is not None or self._rings[rank].calls <= RECORDS:  # else later calls of other groups took its place
            self._ended[rank] = last.number if last is not None else 0

    def _miss_the_ended(self) -> None:
        """A rank that ended on purpose is no loss, until this one is in a call that it never made."""
        mine = Call.under_way(FlightRing.mine().records(), self.name)
        for rank, last in self._ended.items():
            if mine is not None and mine.number > last:
                reason = f"it ended while {mine.operator} waited for it"
                self.fail(errors.RankLost(rank=rank, group=self.name, reason=reason))

    def on_tick(self, now: float) -> None:
        if self._ended:
            self._miss_the_ended()
        if self._heartbeat is not None:
            self._heartbeat.tick(now)
        for hook in list(self._tick_hooks):
            hook(now)

    def finish(self) -> None:
        """Have what this rank has posted moved: others may wait for it when it has ended."""
        if self._fabric is not None:
            self._fabric.finish()

    def abandon(self) -> None:
        """The process ends, and nobody knows in which state: end what runs without the interpreter's lock."""
        self._abort[0] = 1
        if self._fabric is not None:
            self._fabric.abandon()

    def close(self) -> None:
        """Release the fabric and stop watching. The ProcessGroup itself is the user's."""
        with self.lock:
            if self.closed:
                return
            if self._fabric is not None:
                self._fabric.close()
                self._fabric = None
            self.closed = True
        self._abort_hooks.clear()
        self._tick_hooks.clear()
        self._check_hooks.clear()
        if self.when_closed is not None:
            self.when_closed(self)
        self.fall_silent()
        watchdog.instance().remove(self)

    def fall_silent(self) -> None:
        """Tell other nodes that silence from here on is no loss."""
        if self._heartbeat is not None:
            self._heartbeat.leave()
