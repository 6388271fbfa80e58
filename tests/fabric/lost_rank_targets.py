"""Rank functions for the tests that lose a rank: importable by name, as any rank function must be.

Run as a script under torchrun, it is a job of which one rank is killed by the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import undertow as ut
from undertow.errors import RankLost
from undertow.fabric.group import Group
from undertow.fabric.post_ring import Post
from undertow.fabric.proxy import Proxy
from undertow.fabric.registry import as_group
from undertow.fabric.watchdog import TICK_SECONDS, is_dead

STRATEGIES = tuple(f"{grain}:{lane}" for grain in ("serial", "chunked") for lane in ("net", "peer", "dma"))


def write_whole(path: Path, text: str) -> None:
    """A reader sees the whole text or no file."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


@contextlib.contextmanager
def recorded(folder: str, rank: int) -> Iterator[None]:
    """Write down when this rank learnt of a loss, and what it was told."""
    try:
        yield
    except RankLost as error:
        write_whole(Path(folder) / f"lost-{rank}.json", json.dumps({"time": time.time(), "error": str(error)}))
        raise


def say_started(folder: str, rank: int) -> None:
    """Tell the test which process this rank is, and that it is calling from now on."""
    write_whole(Path(folder) / f"pid-{rank}", str(os.getpid()))


def call_forever(seed: int, folder: str) -> None:
    """Everything that waits for other ranks, in an order that depends on the seed alone, until a rank is lost."""
    group = ut.init()
    with recorded(folder, group.rank):
        subgroup = dist.new_group(list(range(group.size)))
        multiply(group, random.Random(seed))
        say_started(folder, group.rank)
        choices = random.Random(seed)
        while True:
            step = choices.choices(STEPS, weights=WEIGHTS)[0]
            step(as_group(choices.choice((None, subgroup))), choices)


def multiply(group: Group, choices: random.Random) -> None:
    """The sum of all ranks' products: integers, so the result is exact whatever the strategy."""
    rows, inner, columns = (choices.choice((1, 3, 64, 257)) for _ in range(3))
    strategy = choices.choice(STRATEGIES)
    x, w = torch.full((rows, inner), float(group.rank + 1)), torch.ones(inner, columns)
    y = ut.matmul_all_reduce(x, w, group=group, strategy=strategy)
    assert bool((y == inner * group.size * (group.size + 1) // 2).all()), strategy


def allocate(group: Group, choices: random.Random) -> None:
    """Symmetric buffers, and a peer's memory right after."""
    buffer = group.fabric.buffer((choices.randint(1, 5000), 3), torch.float32)
    buffer.peer((group.rank + 1) % group.size).fill_(1.0)
    group.barrier()
    buffer.release()


def regroup(group: Group, choices: random.Random) -> None:
    """Close a group and make it again over the same ProcessGroup."""
    process_group = group.process_group
    group.barrier()
    group.close()
    multiply(as_group(process_group), choices)


def post(group: Group, choices: random.Random) -> None:
    """Transfers by the proxy to the next rank, until they have arrived from the one before."""
    proxy = Proxy(group.fabric, signals=2, lane=choices.choice(("dma", "net")))
    buffer = group.fabric.buffer(4096, torch.uint8)
    number = proxy.attach(buffer)
    group.barrier()
    transfers = choices.randint(1, 20)
    for _ in range(transfers):
        proxy.post(Post(number, 0, (group.rank + 1) % group.size, number, 2048, 2048, 0))
    proxy.signals.wait(0, transfers, sender=(group.rank - 1) % group.size)
    proxy.close()
    buffer.release()


STEPS: tuple[Callable[[Group, random.Random], None], ...] = (multiply, allocate, regroup, post)
WEIGHTS = (6, 2, 1, 1)


# -- ranks that misbehave without being killed -----------------------------------------------------------------------


def misbehave(how: str, strategy: str, folder: str, culprit: int = 1) -> None:
    """All ranks call together once; then the culprit does something else and the others call again."""
    group = ut.init()
    x, w = torch.ones(8, 4), torch.ones(4, 8)
    ut.matmul_all_reduce(x, w, strategy=strategy)
    say_started(folder, group.rank)
    if group.rank == culprit:
        if how == "raise":
            raise ValueError("an ordinary mistake")
        if how == "return":
            return
        if how == "sleep":
            time.sleep(60)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    with recorded(folder, group.rank):
        ut.matmul_all_reduce(x, w, strategy=strategy)


def die_before_the_group(folder: str, culprit: int = 1) -> None:
    """torch.distributed is there, but one rank never comes to make Undertow's group."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    say_started(folder, rank)
    if rank == culprit:
        time.sleep(60)
    with recorded(folder, rank):
        ut.init()


# -- scripts under torchrun ------------------------------------------------------------------------------------------


def torchrun_job(folder: str, strategy: str, ending: str) -> None:
    """Calls until a rank is lost. `uncaught`: RankLost ends the interpreter; `caught`: it ends in order afterwards."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's own clean-up must not hide what ranks do by themselves
    group = ut.init()
    x, w = torch.ones(8, 4), torch.ones(4, 8)
    ut.matmul_all_reduce(x, w, strategy=strategy)
    say_started(folder, group.rank)
    try:
        with recorded(folder, group.rank):
            while True:
                ut.matmul_all_reduce(x, w, strategy=strategy)
    except RankLost:
        if ending == "uncaught":
            raise


def orderly_job(folder: str) -> None:
    """Ranks that leave one after the other: nobody is lost, and the last one still can call its group whole."""
    group = ut.init()
    x, w = torch.ones(8, 4), torch.ones(4, 8)
    for strategy in STRATEGIES:
        ut.matmul_all_reduce(x, w, strategy=strategy)
    if group.rank == 0:
        while any(not is_dead(pid) for pid in group.watched_processes().values()):
            time.sleep(0.01)
        time.sleep(2 * TICK_SECONDS)  # by now the watchdog has seen the exits
        group.check()
        write_whole(Path(folder) / "still-whole", "yes")


def a_store_that_does_not_answer() -> tuple[float, str]:
    """Its host is gone: a lane that is opened then ends at the deadline. How long that took, and what was said."""
    group = ut.init()

    class Silent(dist.Store):
        def clone(self) -> dist.Store:
            time.sleep(20)
            raise AssertionError("nobody waits so long")

    group._store = Silent()
    began = time.monotonic()
    try:
        group.gloo("lane net")
    except RankLost as error:
        return time.monotonic() - began, str(error)
    return 0.0, "it was opened"


if __name__ == "__main__":
    if sys.argv[1] == "orderly":
        orderly_job(sys.argv[2])
    else:
        torchrun_job(*sys.argv[2:5])
