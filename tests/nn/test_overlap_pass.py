"""Models that torch's own styles have parallelized, compiled with overlap: as without, and joined where they can be."""

from __future__ import annotations

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
