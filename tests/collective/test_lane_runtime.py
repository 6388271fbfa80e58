"""Staged schedules over lanes: exact on every lane."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lane_targets
import pytest
import torch

import undertow as ut
from undertow.collective.algorithms import LIBRARY
from undertow.collective.carry import Carrier
from undertow.collective.lane_runtime import LaneExecutable
from undertow.errors import InvalidArgument


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Numba's cache is filled here and not by all ranks at once, each waiting for the others."""
    LIBRARY["ring"].compile(2, target="staged")


@pytest.mark.parametrize("ranks", [2, 4])
def test_library_is_exact_on_every_lane(ranks: int) -> None:
    ut.launch(lane_targets.library, ranks, device="cpu", args=(["peer", "dma", "net"],), deadline=30)


def test_library_is_exact_across_named_nodes() -> None:
    ut.launch(lane_targets.library_on_nodes, 4, device="cpu", args=(["a", "a", "b", "b"],), deadline=30)


def test_odds_and_ends(tmp_path: Path) -> None:
    ut.launch(lane_targets.odds_and_ends, 4, device="cpu", args=(str(tmp_path),), deadline=30)
    for rank in range(4):
        assert (tmp_path / f"refused-{rank}").read_text().splitlines() == [
            "schedule is for target direct, but must be compiled for target staged.",
            "schedule is for 5 ranks, but must be for 4 ranks.",
            "lane is 'pigeon', but must be one of net, peer, dma.",
            f"stride is {1 << 30}, but must be between 16 and {8 << 20} bytes.",
            "source is strided (1, 8), but must be contiguous.",
            "out is 63 torch.float32, but must be 64 torch.float32.",
            "out is 64 torch.int32, but must be 64 torch.float32.",
            "operation is 'product', but must be one of sum, avg, max, min.",
        ]


@pytest.mark.parametrize("lane", ["dma", "net"])
def test_a_lost_rank_is_an_error(lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_FLIGHT_DIR", str(tmp_path / "flight"))
    with pytest.raises(ut.UndertowError, match="SIGKILL"):
        ut.launch(lane_targets.lose_a_rank, 3, device="cpu", args=(str(tmp_path), lane), deadline=30)
    death = float((tmp_path / "death").read_text())
    for rank in (0, 2):
        when, said = (tmp_path / f"lost-{rank}").read_text().split(" ", 1)
        assert float(when) - death < 5
        assert "is lost" in said


def test_messages_over_net_are_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything has moved: the group goes on."""
    run: Any = object.__new__(LaneExecutable)
    run.schedule = LIBRARY["two_shot"].compile(2, target="staged")
    run._lanes, run._group = [None, object()], SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InvalidArgument, match="lane net is inside a CUDA graph capture"):
        run.run(torch.zeros(8), torch.zeros(8), [8])
    fabric: Any = SimpleNamespace(group=SimpleNamespace(rank=0, size=2))
    lane: Any = SimpleNamespace(name="net", in_rounds=False, lands_anywhere=True)
    like: Any = SimpleNamespace(device=run._group.device, new_empty=lambda count: None)
    with pytest.raises(InvalidArgument, match="lane net is inside a CUDA graph capture"):
        Carrier(fabric, lane, like, 8)
    lane.in_rounds = True  # NCCL's own: the host goes on
    Carrier(fabric, lane, like, 8)
