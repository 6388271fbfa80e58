"""The torch.distributed backend on local CPU ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import backend_targets as targets
import pytest

import undertow as ut
from undertow.errors import LaunchFailed

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_dtype_and_reduction(ranks: int) -> None:
    assert ut.launch(targets.every_dtype_and_reduction, ranks, device="cpu") == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_form(ranks: int) -> None:
    assert ut.launch(targets.every_form, ranks, device="cpu") == [[]] * ranks


def test_all_to_alls() -> None:
    assert ut.launch(targets.all_to_alls, 3, device="cpu") == [[]] * 3


def test_what_undertow_lacks_goes_to_another_backend_and_is_said_once() -> None:
    for wrong, said in ut.launch(targets.what_falls_back, 2, device="cpu"):
        assert wrong == []
        assert said == [
            "allreduce of torch.distributed goes to the backend gloo: Undertow reduces by sum, avg, max and min only.",
            "recv of torch.distributed goes to the backend gloo: Undertow has collectives, not single messages.",
            "send of torch.distributed goes to the backend gloo: Undertow has collectives, not single messages.",
            "allreduce of torch.distributed goes to the backend gloo: it is called in the short form.",
        ]


def test_asynchronous_calls() -> None:
    assert ut.launch(targets.handles, 3, device="cpu") == [[]] * 3


def test_functional_collectives() -> None:
    assert ut.launch(targets.functional_collectives, 2, device="cpu") == [[]] * 2


def test_sub_groups_and_meshes() -> None:
    assert ut.launch(targets.sub_groups, 4, device="cpu") == [[]] * 4


def test_groups_are_made_again() -> None:
    assert ut.launch(targets.made_again, 2, device="cpu") == [[True] * 3] * 2


def test_a_lost_rank_is_an_error_for_all_others() -> None:
    with pytest.raises(LaunchFailed, match="Rank 1 of 3 failed first"):
        ut.launch(targets.lost_rank, 3, device="cpu")


def test_a_rank_that_ends_too_early_is_missed_at_once() -> None:
    said = ut.launch(targets.early_end, 2, device="cpu", deadline=60)[0]
    assert said == "Rank 1 of group 0 is lost: it ended while all_reduce waited for it."


def test_torchs_timeout_is_the_deadline() -> None:
    said = ut.launch(targets.late_rank, 2, device="cpu")[0]
    assert "Rank 1 of group 0 is lost" in said
    assert "2 s" in said


def test_a_wait_may_have_a_limit() -> None:
    said = ut.launch(targets.limited_wait, 2, device="cpu")
    assert said == ["all_reduce is still running after the 0.2 s that its wait was given. True", " True"]


def test_the_entry_point_registers_the_backend(tmp_path: Path) -> None:
    """As installed: torch itself loads it, and nothing names Undertow."""
    points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    described = tmp_path / "undertow_points-1.dist-info"
    described.mkdir()
    described.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: undertow-points\nVersion: 1\n")
    lines = "\n".join(f"{name} = {place}" for name, place in points.items())
    described.joinpath("entry_points.txt").write_text(f"[torch.backends]\n{lines}\n")
    script = "import sys, torch.distributed as d; print('undertow' in d.Backend.backend_list, 'numba' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY / 'src'}"}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False"]
    script = "import undertow.torch_backend, torch.distributed as d; print('undertow' in d.Backend.backend_list)"
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True"], "the package before torch"
