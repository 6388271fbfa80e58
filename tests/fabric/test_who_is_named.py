"""Which rank a wait that took too long is laid to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from undertow.fabric import group as module


@pytest.mark.parametrize(
    ("calls", "peer", "named"),
    [
        ({1: 1, 2: 2}, 2, 1),  # rank 2 has come to this call, too, and waits itself
        ({1: 1, 2: 2}, 1, 1),
        ({1: 1, 2: 2}, None, 1),
        ({1: 2, 2: 2}, 2, 2),  # nobody is behind
        ({1: 1, 2: 1}, 2, 2),  # of several that are, the one that was waited for
        ({1: 1}, 7, 7),  # on another node: nobody here knows how far it came
    ],
)
def test_who_is_named(calls: dict[int, int], peer: int | None, named: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`calls`: the latest call of each other rank of the node; this one is in its second."""
    monkeypatch.setattr(module.Call, "latest", lambda number, name: SimpleNamespace(number=number, text="a call"))
    monkeypatch.setattr(module.FlightRing, "mine", lambda: SimpleNamespace(records=lambda: 2))
    group = object.__new__(module.Group)
    group.name = "0"
    group._rings = {rank: SimpleNamespace(records=lambda at=at: at) for rank, at in calls.items()}  # type: ignore[misc]
    monkeypatch.setattr(group, "mismatch", lambda: None)
    assert str(group.why_waiting(peer, "it took 2 s")).startswith(f"Rank {named} of group 0 is lost: it took 2 s")
