"""Every algorithm of the library keeps its contract, for many numbers of ranks, in and out of place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from undertow.collective.algorithms import LIBRARY, OUT_OF_PLACE_ONLY
from undertow.collective.contract import BUILT_IN, custom
from undertow.collective.language import COLUMNS, INPUT, OUTPUT, REDUCE, Trace, program
from undertow.collective.reference import evaluate, multisets, wrong_outputs
from undertow.collective.topology import Topology
from undertow.errors import InvalidArgument, ProgramRefused

RANKS = (1, 2, 3, 4, 5, 7, 8, 16)
SHAPES = ((1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2), (2, 8), (4, 4), (5, 2), (3, 5))
BY_NODE = (
    "hierarchical", "all_gather_hierarchical", "all_to_all_two_step", "all_to_all_three_step", "all_to_next",
)  # fmt: skip
KIND, SOURCE_RANK, SOURCE_BUFFER, SOURCE_START, RANK, BUFFER, START, COUNT = range(8)


def traces(name: str) -> Iterator[Trace]:
    """One trace for every number of ranks and every shape of nodes that the program is tested with."""
    for ranks in RANKS:
        if (name, ranks) != ("send_recv_direct", 1):
            yield LIBRARY[name].trace(ranks)
    if name in BY_NODE:
        for nodes, per_node in SHAPES:
            yield LIBRARY[name].trace(topology=Topology.grid(nodes, per_node))


def works_in_place(trace: Trace) -> bool:
    return trace.contract.in_place is not None and trace.name not in OUT_OF_PLACE_ONLY


@pytest.mark.parametrize("name", LIBRARY)
def test_keeps_its_contract(name: str) -> None:
    assert LIBRARY[name].name == name
    for trace in traces(name):
        assert wrong_outputs(trace) == [], trace.topology
        if works_in_place(trace):
            assert wrong_outputs(trace, in_place=True) == [], trace.topology


@pytest.mark.parametrize("name", LIBRARY)
def test_writes_no_input_and_in_place_no_ranges_overlap(name: str) -> None:
    for trace in traces(name):
        rows = trace.rows()
        assert not (rows[:, BUFFER] == INPUT).any()
        if not works_in_place(trace) or not len(rows):
            continue
        start_in_place = np.array(trace.contract.in_place)
        shorter = OUTPUT if trace.contract.holder(0) == INPUT else INPUT
        source = rows[:, SOURCE_START] + (rows[:, SOURCE_BUFFER] == shorter) * start_in_place[rows[:, SOURCE_RANK]]
        start = rows[:, START] + (rows[:, BUFFER] == shorter) * start_in_place[rows[:, RANK]]
        same_memory = (rows[:, SOURCE_RANK] == rows[:, RANK]) & (
            (rows[:, SOURCE_BUFFER] == rows[:, BUFFER]) | (rows[:, [SOURCE_BUFFER, BUFFER]].max(axis=1) <= OUTPUT)
        )
        meet = same_memory & (abs(source - start) < rows[:, COUNT])
        assert (source == start)[meet].all()
        assert not (rows[meet, KIND] == REDUCE).any()


def test_what_is_said_not_to_work_in_place_does_not() -> None:
    for name in OUT_OF_PLACE_ONLY:
        assert wrong_outputs(LIBRARY[name].trace(3), in_place=True)


@dataclass(frozen=True)
class Term:
    """Keeps how it was added up, as rounding does; the order of two operands makes no difference."""

    parts: tuple[object, ...]

    def __add__(self, other: Term) -> Term:
        return Term(tuple(sorted((self, other), key=repr)))


@pytest.mark.parametrize("name", [name for name, one in LIBRARY.items() if one.contract(2).name == "all_reduce"])
@pytest.mark.parametrize("in_place", [False, True])
def test_all_ranks_end_with_the_same_bits(name: str, in_place: bool) -> None:
    for shape in ((1, 6), (2, 4), (3, 3)):
        trace = LIBRARY[name].trace(topology=Topology.grid(*shape))
        inputs = [[Term((rank, chunk)) for chunk in range(trace.chunks)] for rank in range(trace.ranks)]
        outputs = evaluate(trace, inputs, in_place)
        assert all(one == outputs[0] for one in outputs)


@pytest.mark.parametrize("name", ["hierarchical", "all_gather_hierarchical", "all_to_next"])
def test_nodes_may_be_numbered_in_any_way(name: str) -> None:
    trace = LIBRARY[name].trace(topology=Topology.of([0, 1, 1, 0, 2, 2]))
    assert wrong_outputs(trace) == []
    assert not works_in_place(trace) or wrong_outputs(trace, in_place=True) == []


@pytest.mark.parametrize("name", ["all_to_all_two_step", "all_to_all_three_step"])
def test_ranges_need_ranks_numbered_node_by_node(name: str) -> None:
    with pytest.raises(InvalidArgument, match="numbered node by node"):
        LIBRARY[name].trace(topology=Topology.of([0, 1, 1, 0]))


@pytest.mark.parametrize("name", BY_NODE)
def test_unequal_nodes_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="nodes of equal size"):
        LIBRARY[name].trace(topology=Topology.of([0, 0, 1]))


def test_send_recv_needs_two_ranks() -> None:
    with pytest.raises(ProgramRefused, match="rank 1 does not exist"):
        LIBRARY["send_recv_direct"].trace(1)


def crossing(trace: Trace) -> list[int]:
    """The chunks of each operation between two nodes."""
    nodes = np.array(trace.topology.nodes)
    rows = trace.rows()
    return list(rows[nodes[rows[:, SOURCE_RANK]] != nodes[rows[:, RANK]], COUNT])


def test_transfers_between_nodes_are_aggregated() -> None:
    nodes, size = 5, 4
    topology = Topology.grid(nodes, size)
    pairs = nodes * (nodes - 1)
    assert crossing(LIBRARY["all_to_all_two_step"].trace(topology=topology)) == [size] * (pairs * size)
    assert crossing(LIBRARY["all_to_all_three_step"].trace(topology=topology)) == [size * size] * pairs
    assert crossing(LIBRARY["all_gather_hierarchical"].trace(topology=topology)) == [1] * (pairs * size)
    assert crossing(LIBRARY["all_to_next"].trace(topology=topology)) == [nodes] * (size * (nodes - 1))
    hierarchical = LIBRARY["hierarchical"].trace(topology=topology)
    assert sum(crossing(hierarchical)) == 2 * (nodes - 1) * hierarchical.chunks


def test_ring_is_frugal() -> None:
    """Three operations for each chunk and hop, which become two instructions; among many ranks little more than two."""
    for ranks in (8, 127):
        assert len(LIBRARY["ring"].trace(ranks).rows()) == 3 * ranks * (ranks - 1)
    runs_of_a_rank = 64 + 1  # one of them passes the end of the buffer and takes two
    assert len(LIBRARY["ring"].trace(256).rows()) <= 2 * 256 * 255 + 256 * runs_of_a_rank


@pytest.mark.parametrize("ranks", [128, 130])
def test_ring_of_many_ranks(ranks: int) -> None:
    trace = LIBRARY["ring"].trace(ranks)
    inputs = [[1 << rank for _ in range(ranks)] for rank in range(ranks)]
    for in_place in (False, True):
        assert evaluate(trace, inputs, in_place) == [[(1 << ranks) - 1] * ranks] * ranks


# -- the reference itself ------------------------------------------------------------------------------------------


def test_columns_are_where_the_reference_looks() -> None:
    assert COLUMNS[:8] == (
        "kind", "source_rank", "source_buffer", "source_start", "rank", "buffer", "start", "count",
    )  # fmt: skip


def test_tensors_are_summed() -> None:
    trace = LIBRARY["two_shot"].trace(3)
    inputs = [[torch.full((2,), 10.0 * rank + chunk) for chunk in range(3)] for rank in range(3)]
    for chunks in evaluate(trace, inputs, in_place=True):
        assert [one.tolist() for one in chunks] == [[30.0 + 3 * chunk] * 2 for chunk in range(3)]
    assert inputs[1][2].tolist() == [12.0, 12.0]


def test_in_place_shards_lie_where_the_contract_says() -> None:
    assert evaluate(LIBRARY["all_gather_ring"].trace(3), [[1], [2], [3]], in_place=True) == [[1, 2, 3]] * 3
    inputs = [[1, 2], [10, 20]]
    assert evaluate(LIBRARY["reduce_scatter_ring"].trace(2), inputs, in_place=True) == [[11], [22]]
    with pytest.raises(InvalidArgument, match="gather has no such form"):
        evaluate(LIBRARY["gather_direct"].trace(2), [[1], [2]], in_place=True)
    with pytest.raises(InvalidArgument, match="inputs"):
        evaluate(LIBRARY["ring"].trace(2), [[1, 2], [3]])


def test_multisets_name_what_was_summed() -> None:
    assert multisets(LIBRARY["reduce_direct"].trace(3)) == [[((0, 0), (1, 0), (2, 0))], [None], [None]]


@program("all_reduce", ranks=3, chunks=4)
def wrong(c: Trace) -> None:
    """Each rank is wrong in its own way."""
    for rank in range(3):
        c.rank(rank).input[:].copy(c.rank(rank).output[:])
        for other in c.others(rank):
            c.rank(rank).output[:].reduce(c.rank(other).input[:])
    c.rank(0).output[0].reduce(c.rank(1).input[0])
    c.rank(0).input[1].copy(c.rank(0).output[1]).reduce(c.rank(1).input[1])
    c.rank(1).output[2].reduce(c.rank(0).input[3])
    c.rank(2).scratch()[3].copy(c.rank(2).output[3])
    c.rank(2).output[0].reduce(c.rank(0).input[0]).reduce(c.rank(0).input[0])


def test_a_wrong_program_is_described() -> None:
    assert wrong_outputs(wrong.trace()) == [
        "output[0] of rank 0 has input[0] of rank 1 twice.",
        "output[1] of rank 0 misses input[1] of rank 2.",
        "output[2] of rank 1 has input[3] of rank 0 that does not belong there.",
        "output[0] of rank 2 has input[0] of rank 0 3 times instead of 1.",
        "output[3] of rank 2 is never written, or made of a chunk that never was.",
    ]


def test_custom_contracts_and_free_outputs() -> None:
    @program(custom("swap", [1, 1], [2, 2], {(0, 0): [(1, 0)], (1, 1): [(0, 0), (0, 0)]}))
    def swap(c: Trace) -> None:
        c.rank(1).input[0].copy(c.rank(0).output[0])
        c.rank(0).input[0].copy(c.rank(1).output[1])

    assert wrong_outputs(swap.trace()) == ["output[1] of rank 1 misses input[0] of rank 0."]


def test_signals_of_kernels_move_nothing() -> None:
    @program("all_gather", ranks=1)
    def tiled(c: Trace) -> None:
        shard = c.tile_ready(c.rank(0).input[0], 7)
        c.tile_needed(shard.copy(c.rank(0).output[0]), 9)

    assert wrong_outputs(tiled.trace()) == []


def test_library_covers_every_built_in_contract() -> None:
    assert {one.contract(2).name for one in LIBRARY.values()} == set(BUILT_IN)
