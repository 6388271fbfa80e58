"""Rank functions for lane `net` in rounds: the suites of others over it, and what every rank did in each round."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import embedding_suite
import gradient_targets
import grouped_targets
import matmul_suite as suite
import torch
import torch.distributed as dist

import undertow as ut
from undertow.errors import UndertowError
from undertow.fabric.base import Incoming, Outgoing, Stream
from undertow.fabric.cpu import CpuFabric
from undertow.fabric.net import NetLane

Round = tuple[dict[int, list[int]], dict[int, list[int]]]  # elements to each peer, and from each


class Inline(Stream):
    """Work is done when it is given, as one host thread enqueues it on a GPU's streams."""

    def fork(self) -> None: ...

    def after(self, other: Stream) -> None: ...

    def run(self, work: Callable[[], None]) -> None:
        work()

    def join(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def in_one_order() -> Iterator[list[Round]]:
    """Streams without threads; the rounds of this rank as they come."""
    done: list[Round] = []
    stream, usual = CpuFabric.stream, NetLane.round

    def moved(lane: NetLane, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> list[torch.Tensor]:
        leaves: dict[int, list[int]] = {}
        comes: dict[int, list[int]] = {}
        for out in outgoing:
            leaves.setdefault(out.peer, []).append(out.source.nbytes)
        for one in incoming:
            comes.setdefault(one.peer, []).append(one.place().nbytes)
        done.append((leaves, comes))
        return usual(lane, outgoing, incoming)

    CpuFabric.stream = lambda fabric, name, priority=0: Inline()  # type: ignore[method-assign,assignment,misc]
    NetLane.round = moved  # type: ignore[method-assign]
    try:
        yield done
    finally:
        CpuFabric.stream, NetLane.round = stream, usual  # type: ignore[method-assign]


def compared(group: ut.Group, done: list[Round], what: str) -> int:
    """Round i of every rank is the same round: what one sends in it is what the other receives. How many there were."""
    every = [
        [({int(k): v for k, v in leaves.items()}, {int(k): v for k, v in comes.items()}) for leaves, comes in rounds]
        for rounds in group.exchange([list(one) for one in done], "rounds")
    ]
    assert len({len(rounds) for rounds in every}) == 1, f"{what}: {[len(rounds) for rounds in every]} rounds"
    for number, rounds in enumerate(zip(*every, strict=True)):
        for sender, receiver in itertools.permutations(range(group.size), 2):
            sent, received = rounds[sender][0].get(receiver, []), rounds[receiver][1].get(sender, [])
            assert sent == received, f"{what}, round {number}: {sender} sends {sent}, {receiver} receives {received}"
    count = len(done)
    done.clear()
    return count


def _joined() -> ut.Group:
    group = ut.init()
    assert group.fabric.lane("net").in_rounds
    return group


def matmuls(seed: int, part: float, inline: bool) -> int:
    """Every operator and grain over `net`, sums in rank order too; how many rounds, or cases."""
    group, rounds, found = _joined(), 0, suite.cases(seed, part, lanes=("net",))
    if not inline:
        for case in found:
            suite.verify(group, case)
        return len(found)
    with in_one_order() as done:
        for case in found:
            suite.verify(group, case)
            rounds += compared(group, done, str(case))
        for grain in ("serial", "chunked", "signaled"):
            rounds += _in_rank_order(group, grain, done)
    return rounds


def _in_rank_order(group: ut.Group, grain: str, done: list[Round]) -> int:
    """A sum that every rank gets, of which each sums a part: two rounds for a parcel."""
    case = suite.Case("matmul_all_reduce", f"{grain}:net", torch.float32, (71, 73, 20), 30)
    xs, ws = suite._factors(group, case)
    ut.matmul_all_reduce(xs[group.rank], ws[group.rank], group=group, strategy=case.strategy)
    explanation = ut.explain()
    assert explanation is not None
    done.clear()
    plan = replace(explanation.plan, deterministic=True)
    y = ut.matmul_all_reduce(xs[group.rank], ws[group.rank], group=group, plan=plan)
    assert torch.equal(y, sum(x @ w for x, w in zip(xs, ws, strict=True)))
    return compared(group, done, f"{grain}, deterministic")


def gradients(seed: int, part: float) -> int:
    """Backward passes, whose gathers and scatters stand beside others on a stream of their own."""
    group, chance, count = _joined(), random.Random(seed), 0
    grains = ("serial", "chunked", "signaled")
    shapes, types = gradient_targets.SHAPES, (torch.float64, torch.float32)
    with in_one_order() as done:
        for name, grain, shape, dtype in itertools.product(gradient_targets.OPERATORS, grains, shapes, types):
            if chance.random() >= part or (name == "all_to_all_matmul" and grain == "signaled"):
                continue
            gradient_targets.verify(group, name, f"{grain}:net", shape, dtype)
            count += compared(group, done, f"{name} {grain} {shape}")
    return count


def the_others(seed: int, count: int) -> int:
    """Tokens with grouped weights, embedding tables."""
    group, chance, rounds = _joined(), random.Random(seed), 0
    ways = [("leaving", grain) for grain in ("serial", "chunked", "signaled")]
    ways += [("arriving", grain) for grain in ("serial", "chunked")]
    with in_one_order() as done:
        for number in range(count):
            case = embedding_suite.Case.random(group.size, seed * 1000 + number)
            strategy = f"{chance.choice(('serial', 'chunked', 'signaled'))}:net"
            embedding_suite.verify(group, case, strategy)
            rounds += compared(group, done, f"embedding {number} {strategy}")
            name, grain = ways[number % len(ways)]
            sizes = chance.choice((1, 3, 17)), chance.choice((1, 7, 33)), chance.choice((1, 24))
            tokens = grouped_targets.Case(name, f"{grain}:net", torch.float32, 3, *sizes, chance.randrange(1 << 30))
            grouped_targets.verify(group, tokens)
            rounds += compared(group, done, str(tokens))
    return rounds


def speed() -> tuple[float, str]:
    group = _joined()
    return group.fabric.bandwidth("net", 1 << 20), group.fabric.lane("net").describe()


def lane_of(settings: Sequence[str]) -> str:
    """Whether the lane moves in rounds, or what opening it says, where each rank was told something."""
    os.environ["UNDERTOW_NET"] = settings[int(os.environ["RANK"])]
    group = ut.init()
    try:
        return str(group.fabric.lane("net").in_rounds)
    except UndertowError as error:
        return f"{type(error).__name__}: {error}"


def missing(how: str, folder: str) -> None:
    """Rank 1 is not there for the second call; what the others raise, written down."""
    group = _joined()
    x, w = torch.ones(64, 8), torch.ones(8, 16)
    ut.matmul_reduce_scatter(x, w, group=group, strategy="chunked:net")
    if group.rank == 1:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)
        return
    try:
        ut.matmul_reduce_scatter(x, w, group=group, strategy="chunked:net")
    except UndertowError as error:
        (Path(folder) / str(group.rank)).write_text(f"{type(error).__name__}: {error}")
        raise


def beside_messages_of_the_user() -> bool:
    """A message of the user's own, under way with whatever tag, is nobody else's."""
    group = _joined()
    x, w = torch.ones(16, 4), torch.ones(4, 8)
    pending = None
    if group.rank == 0:
        pending = [dist.isend(torch.full((8, 8), 7.0), 1, tag=tag) for tag in range(4)]
    y = ut.matmul_reduce_scatter(x, w, group=group, strategy="chunked:net")
    right = bool((y == 4 * group.size).all())
    if group.rank == 1:
        for tag in range(4):
            got = torch.zeros(8, 8)
            dist.recv(got, 0, tag=tag)
            right = right and bool((got == 7).all())
    for one in pending or ():
        one.wait()
    return right


class AtOnce:
    """A process group, as far as a lane needs it, that starts messages both ways as one operation, as NCCL does."""

    supports_coalescing = True

    def __init__(self, fails: bool) -> None:
        self.fails, self.said = fails, []  # type: ignore[var-annotated]

    def _get_backend(self, device: torch.device) -> AtOnce:
        return self

    def name(self) -> str:
        return "stand-in"

    def _start_coalescing(self, device: torch.device) -> None:
        self.said.append("start")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.said.append(f"recv {tensors[0].numel()} from {peer}")
        if self.fails:
            raise RuntimeError("a communicator that was aborted")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.said.append(f"send {tensors[0].numel()} to {peer}")

    def _end_coalescing(self, device: torch.device) -> AtOnce:
        self.said.append("end")
        return self

    def wait(self) -> None:
        self.said.append("wait")


def started_at_once(fails: bool) -> tuple[list[str], str]:
    """What a lane on a GPU asks of such a backend, on a CPU's tensors; and what is raised."""
    group = _joined()
    lane: Any = group.fabric.lane("net")
    backend = AtOnce(fails)
    lane._on_device, lane._process_group = True, backend
    other = 1 - group.rank
    outgoing = [Outgoing(other, torch.ones(3), None, 0, 0)]
    incoming = [Incoming(other, None, 0, 5, 0, torch.zeros(5))]
    raised = ""
    try:
        lane._start_round(outgoing, incoming, [one.place() for one in incoming])[0].wait()
    except RuntimeError as error:
        raised = str(error)
    try:  # a rank that is not there is refused before anything is begun
        lane._start_round([Outgoing(group.rank, torch.ones(3), None, 0, 0)], [], [])
    except UndertowError:
        backend.said.append("refused")
    assert "stand-in" in lane.describe()
    lane._on_device, lane._process_group = False, group.process_group
    return [one.removesuffix(str(other)) for one in backend.said], raised


def without_a_backend() -> str:
    """A group that has no backend for the tensors of its device: single messages need none."""
    group = ut.init()
    lane: Any = group.fabric.lane("net")

    class Nothing:
        def _get_backend(self, device: torch.device) -> None:
            raise RuntimeError("No backend type associated with device type cpu")

        def name(self) -> str:
            return "none"

    usual, lane._process_group = lane._process_group, Nothing()
    said = f"{lane.describe()}, {lane._moves_in_rounds(True)}"
    lane._process_group = usual
    y = ut.matmul_reduce_scatter(torch.ones(4, 2), torch.ones(2, 3), group=group, strategy="serial:net")
    return f"{said}, {bool((y == 2 * group.size).all())}"
