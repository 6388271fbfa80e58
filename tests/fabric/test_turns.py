"""Threads that move bytes ask for short turns; those that compute keep theirs."""

from __future__ import annotations

import platform
import threading

import pytest

from undertow.fabric import turns


@pytest.mark.skipif(turns.turn() is None, reason=f"{platform.system()} does not tell how long a thread's turn is")
def test_a_thread_asks_for_itself_only() -> None:
    before, found = turns.turn(), []

    def ask() -> None:
        turns.ask_for_short_turns()
        found.append(turns.turn())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    assert found[0] == 0.0002 or release < (6, 12)
    assert turns.turn() == before
