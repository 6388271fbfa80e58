"""Notices between ranks through shared memory: every rank's, in order, whatever their length."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

import undertow as ut
from undertow.errors import UndertowError
from undertow.fabric.board import ROOM, Board
from undertow.fabric.segment import Segment

RANKS = 3


def boards(abort: np.ndarray) -> list[Board]:
    segments: list[Segment] = [Board.segment() for _ in range(RANKS)]
    return [Board(rank, segments, int(abort.ctypes.data), crowded=True) for rank in range(RANKS)]


def test_every_notice_is_read_by_all_before_its_place_is_used_again() -> None:
    made = boards(np.zeros(1, np.int32))
    generator = random.Random(5)
    rounds = [[generator.randbytes(generator.randrange(200)) for _ in range(RANKS)] for _ in range(500)]
    wrong: list[tuple[int, int]] = []

    def take_part(rank: int) -> None:
        for number, notices in enumerate(rounds):
            if made[rank].exchange(notices[rank], lambda _: None) != notices:
                wrong.append((rank, number))

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_notice_that_is_too_long_is_seen_by_all_and_the_next_one_fits() -> None:
    made, found = boards(np.zeros(1, np.int32)), {}
    sizes = [(ROOM, 1, 1), (ROOM, ROOM + 1, 1), (3, 3, 3)]

    def take_part(rank: int) -> None:
        found[rank] = [made[rank].exchange(b"x" * size[rank], lambda _: None) for size in sizes]

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2] == [[b"x" * ROOM, b"x", b"x"], None, [b"xxx"] * RANKS]


def test_whoever_waits_looks_up_and_may_give_up() -> None:
    abort = np.zeros(1, np.int32)
    made = boards(abort)

    def enough(rank: int) -> None:
        assert not made[0].has_come(rank)
        raise TimeoutError(f"rank {rank}")

    with pytest.raises(TimeoutError, match="rank 1"):
        made[0].exchange(b"", enough)
    abort[0] = 1  # the group has failed: nobody sleeps for a whole slice
    with pytest.raises(TimeoutError, match="rank 1"):
        made[2].exchange(b"", enough)


def test_an_interrupted_exchange_ends_the_group() -> None:
    """Its notices would otherwise be taken for those of the next one."""
    assert ut.launch(interrupted, 2, device="cpu", deadline=10) == ["RankLost", "RankLost"]


def interrupted() -> str:
    group = ut.init()
    if group.rank == 0:

        def interrupt(rank: int) -> None:
            raise KeyboardInterrupt

        group._waiting = lambda purpose: interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            group.exchange(1, "first")
        group._store.set("interrupted", "yes")
    else:
        group._store.wait(["interrupted"])  # so that rank 0 has to wait for this one
        group.exchange(1, "first")
    try:
        group.exchange(2, "second")
        group.exchange(3, "third")
    except UndertowError as error:
        return type(error).__name__
    return "went on"
