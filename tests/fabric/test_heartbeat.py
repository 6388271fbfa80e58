"""What one node tells the others last."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import torch.distributed as dist

from undertow.errors import RankLost
from undertow.fabric.heartbeat import Heartbeat


def test_a_process_that_exits_on_its_failure_still_says_what_it_was() -> None:
    """The thread that learns of a failure may leave before the one that found it has announced it."""
    store = dist.HashStore()
    heartbeat = Heartbeat(SimpleNamespace(nodes=[0, 1], rank=0, name="0", deadline=60.0), store)  # type: ignore[arg-type]
    heartbeat.note(RankLost(rank=3, group="0", reason="its process 17 died"))
    leaving = threading.Thread(target=heartbeat.leave)
    leaving.start()
    leaving.join()
    heartbeat.announce()
    assert json.loads(store.get("lost").decode()) == {"rank": 3, "reason": "its process 17 died"}
