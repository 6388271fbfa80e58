"""What stands behind `undertow collective`: the search for slots, exact data, factors of nccl-tests."""

from __future__ import annotations

import pytest
import torch

from undertow.collective import LIBRARY, Trace, program
from undertow.collective.contract import BUILT_IN
from undertow.collective.loading import load
from undertow.collective.trial import Trial, equal_spans
from undertow.errors import InvalidArgument
from undertow.report.collective import least_number, most_messages
from undertow.report.collective_bench import CALL_FORMS, Cell, Entry, Row, Sweep, bus_factor, table, wrong_elements
from undertow.report.collective_runs import sendable


@pytest.mark.parametrize("least", [1, 2, 3, 5, 8, 13, 20, None])
def test_least_number(least: int | None) -> None:
    asked: list[int] = []

    def accepted(number: int) -> bool:
        asked.append(number)
        return least is not None and number >= least

    assert least_number(accepted, 20) == least
    assert max(asked) <= 20
    assert len(asked) < 20


def test_most_messages() -> None:
    @program("all_reduce", chunks=4)
    def three(c: Trace) -> None:
        c.rank(0).input[0:2].copy(c.rank(1).output[0:2])
        with c.parallel(2):
            c.rank(0).input[2].copy(c.rank(1).output[2])
        c.rank(1).input[3].copy(c.rank(0).output[3])
        c.rank(0).input[3].copy(c.rank(0).output[2])

    assert most_messages(three.trace(2)) == 3
    assert most_messages(LIBRARY["ring"].trace(1)) == 1


def test_bus_factors() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == bus_factor("all_to_all", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("reduce", 4) == 1
    assert bus_factor("", 4) is None


def test_every_call_has_forms() -> None:
    from undertow.collective.operators import CALLS

    assert CALL_FORMS.keys() == CALLS.keys()


def result_of(name: str, rank: int, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What `rank` must end with, in words of torch."""
    mine = len(inputs)
    if name == "all_reduce":
        return torch.stack(inputs).sum(0)
    if name == "all_gather":
        return torch.cat(inputs)
    if name == "reduce_scatter":
        return torch.stack(inputs).sum(0).chunk(mine)[rank]
    if name == "all_to_all":
        return torch.cat([one.chunk(mine)[rank] for one in inputs])
    return inputs[0]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_a_trial_knows_right_from_wrong(name: str, dtype: torch.dtype, in_place: bool) -> None:
    ranks = 3
    contract = BUILT_IN[name](ranks, 2)
    spans = equal_spans(contract, 600, dtype.itemsize)
    trials = [Trial(contract, rank, spans, dtype, in_place=in_place) for rank in range(ranks)]
    for one in trials:
        one.fill()
    inputs = [one.tensors[0].clone() for one in trials]
    for rank, one in enumerate(trials):
        if not (name == "broadcast" and in_place and rank == 0):
            assert one.wrong()[0] > 0
        expected = result_of(name, rank, inputs)
        one.tensors[1].copy_(expected)
        assert one.wrong() == (0, "")
        one.tensors[1][-1] += 1
        count, said = one.wrong()
        assert count == 1
        assert said.startswith(f"output[{len(expected) - 1}] of rank {rank} is")


def test_a_trial_sees_that_an_input_was_changed() -> None:
    trial = Trial(BUILT_IN["broadcast"](2, 1), 0, [8], torch.float32)
    trial.fill()
    trial.tensors[1].copy_(trial.tensors[0])
    assert trial.wrong() == (0, "")
    trial.tensors[0][3] = -1
    count, said = trial.wrong()
    assert count == 1
    assert said.startswith("input[3] of rank 0 is -1.0 instead of")


def test_a_program_tied_to_kernels_is_not_run() -> None:
    @program("all_reduce")
    def tied(c: Trace) -> None:
        for rank in range(c.ranks):
            c.tile_ready(c.rank(rank).input[0], 0)
            c.rank(rank).input[0].copy(c.rank(rank).output[0])
        for rank in range(c.ranks):
            c.rank(rank).output[0].reduce(c.rank(1 - rank).input[0])

    with pytest.raises(InvalidArgument, match="tile_ready"):
        sendable(tied.compile(2))


def test_a_table_tells_of_wrong_elements() -> None:
    entry = Entry("mine", "all_reduce", BUILT_IN["all_reduce"](4, 1), 0, (False, True), {})
    row = Row(4096, 1024, {("undertow", False): Cell(1e-6, 0), ("undertow", True): Cell(2e-6, 3)})
    *_, numbers, wrong, bandwidth = table(entry, [row], Sweep(4096, 4096))
    assert " ".join(numbers.split()) == "4096 1024 float32 sum -1 1.00 4.096 6.144 0 2.00 2.048 3.072 3"
    assert wrong == "# Wrong elements: 3 FAILED"
    assert bandwidth == "# Avg bus bandwidth: 4.608 GB/s"
    assert wrong_elements([[row], [row]]) == 6


def test_sizes_of_a_sweep() -> None:
    assert Sweep(1024, 65536, 4).sizes() == [1024, 4096, 16384, 65536]
    assert Sweep(1000, 1999, 2).sizes() == [1000]
    with pytest.raises(InvalidArgument):
        Sweep(0, 10).sizes()


def test_the_library_is_loaded_by_name() -> None:
    assert load("ring") == [LIBRARY["ring"]]
