"""Models that torch's own styles have parallelized, compiled with overlap: as without, and joined where they can be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import overlap_pass_targets as targets
import pytest

import undertow as ut


@pytest.mark.parametrize("mode", ["fake", pytest.param("symbolic", marks=pytest.mark.nightly)])
def test_graphs(mode: str) -> None:
    for found in ut.launch(targets.graphs, 2, device="cpu", args=(mode,)):
        wanted = {name: wanted for name, (_, _, wanted) in targets.CASES.items()}
        if mode == "symbolic":  # what needs sizes is left as it is
            assert {name for name in wanted if found[name] != wanted[name]} == UNKNOWN
        else:
            assert found == wanted


UNKNOWN = {
    "sequences", "one sequence", "four dimensions", "several", "sequences scattered", "four dimensions scattered",
    "both ways",
}  # fmt: skip
TOLD = {  # in the order of both passes; of sums by one collective the first one tells
    "sequence parallel": [
        "one gather for 3 matmuls, rows kept.", "sent beneath the matmul.",
        "one gather for 2 matmuls, rows kept.", "sent beneath the matmul.",
        "one gather for 1 matmul, rows kept.", "2 products as one, sent beneath the matmul.",
        "one gather for 1 matmul, rows kept.", "3 products as one, sent beneath the matmul.",
    ],
    "tensor parallel": [
        "summed beneath the matmul.", "summed beneath the matmul.",
        "2 products as one, summed beneath the matmul.", "3 products as one, summed beneath the matmul.",
    ],
}  # fmt: skip
ALONE = "left as it is: each rank adds a bias to its part of the sum."
TOLD["biases"] = [ALONE if number in (1, 3) else one for number, one in enumerate(TOLD["sequence parallel"])]


@pytest.mark.parametrize("backend", ["traced", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_layers(backend: str) -> None:
    for found in ut.launch(targets.layers, 2, device="cpu", args=(backend,)):
        for name, (apart, told) in found.items():
            assert apart < 1e-13, name
            assert [one.partition(": ")[2] for one in told] == TOLD[name], (name, told)


@pytest.mark.nightly
def test_the_example() -> None:
    script = Path(__file__).parents[2] / "examples" / "compiled_tensor_parallel.py"
    command = [sys.executable, "-c", "from undertow.cli import main; main()", "run", "-n", "2", "--device", "cpu"]
    done = subprocess.run([*command, script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[:2] == [
        "all_gather_into_tensor of [1, 256, 256]: one gather for 2 matmuls, rows kept.",
        "reduce_scatter_tensor of [2, 256, 256]: sent beneath the matmul.",
    ]
