"""Where MSCCLang's references point in place, where a custom collective's result stands, and what its labels mean."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable

import pytest
from contract_runs import run_exactly

from undertow.collective.checker import check
from undertow.collective.formats import msccl_import, msccl_read
from undertow.collective.msccl import *
from undertow.collective.schedule import Schedule
from undertow.errors import ProgramRefused


def written(prog: MSCCLProgram) -> Schedule:
    """Accepted by `Check`, run exactly, and right when its XML is read again."""
    with prog:
        assert Check()
    run_exactly(prog.compile(), runs=1)
    (schedule,) = msccl_import.schedules(msccl_read.parse(prog.xml().encode()))
    check(schedule)
    return schedule


def to_the_same_buffer(rank: int, other: int) -> None:
    chunk(rank, Buffer.input, 0).copy(other, Buffer.input, 0)


def to_the_same_place(rank: int, other: int) -> None:
    chunk(rank, Buffer.input, 0).copy(other)


def to_the_index_of_the_reference(rank: int, other: int) -> None:
    passed = chunk(rank, Buffer.input, 0)
    assert passed.index == rank
    passed.copy(other, Buffer.output, passed.index)


@pytest.mark.parametrize("send", [to_the_same_buffer, to_the_same_place, to_the_index_of_the_reference])
def test_a_reference_in_place_is_to_where_the_slot_really_lies(send: Callable[[int, int], None]) -> None:
    prog = MSCCLProgram("gather", fully_connected(3), AllGather(3, 1, True), 1)
    with prog:
        for rank in range(3):
            for other in range(3):
                send(rank, other)
    assert written(prog).contract.name == "all_gather"


def test_input_and_output_in_place_are_one_buffer_to_group() -> None:
    prog = MSCCLProgram("group", fully_connected(2), AllReduce(2, 2, True), 1)
    with prog:
        both = chunk(0, Buffer.input, 0).group(chunk(0, Buffer.output, 1))
        chunk(1, Buffer.input, 0, 2).reduce(both).copy(0, Buffer.input, 0)
    written(prog)


def test_a_place_without_an_index_is_refused_in_place_too() -> None:
    prog = MSCCLProgram("short", fully_connected(3), AllGather(3, 1, True), 1)
    with prog, pytest.raises(ProgramRefused, match=r"test_mscclang_places.py:\d+: 1 chunks from -1 on are no part"):
        chunk(1, Buffer.input, 0).copy(0, Buffer.input)


class Labelled(Collective):
    """What its buffers hold before, and what must stand where after."""

    def __init__(self, before: list[list[list[Chunk | None]]], after: dict[tuple[int, Buffer, int], object]) -> None:
        super().__init__(len(before), 1, True)
        self.before, self.after = before, after

    def init_buffers(self):
        return [{Buffer.input: list(given), Buffer.output: list(made)} for given, made in self.before]

    def check(self, prog):
        return all(prog.buffers[rank][buffer][at] == held for (rank, buffer, at), held in self.after.items())


def total(*ranks: int) -> ReduceChunk:
    return ReduceChunk(-1, [Chunk(rank, 0) for rank in ranks])


def test_a_result_that_stands_in_an_input() -> None:
    collective = Labelled([[[Chunk(rank, 0)], [None]] for rank in range(3)], {(2, Buffer.input, 0): total(0, 1, 2)})
    prog = MSCCLProgram("reduce", line(3), collective, 1)
    with prog:
        passed = chunk(1, Buffer.input, 0).reduce(chunk(0, Buffer.input, 0))
        chunk(2, Buffer.input, 0).reduce(passed)
    schedule = written(prog)
    assert schedule.in_place
    assert schedule.contract.total_items[-3:].tolist() == [0, 1, 2]


def test_a_result_in_both_buffers_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {(1, Buffer.input, 0): total(0, 1), (0, Buffer.output, 0): Chunk(1, 0)}
    prog = MSCCLProgram("both", line(2), Labelled([[[Chunk(rank, 0)], [None]] for rank in (0, 1)], wanted), 1)
    with prog:
        chunk(1, Buffer.input, 0).copy(0, Buffer.output, 0)
        chunk(1, Buffer.input, 0).reduce(chunk(0, Buffer.input, 0))
        assert not Check()
        assert "its result stands in inputs as well as in outputs" in capsys.readouterr().out


def test_an_input_may_be_used_up() -> None:
    """Nobody wants what is left in it."""
    before = [[[Chunk(rank, 0)], [None]] for rank in (0, 1)]
    prog = MSCCLProgram("used", line(2), Labelled(before, {(0, Buffer.output, 0): total(0, 1)}), 1)
    with prog:
        chunk(1, Buffer.input, 0).reduce(chunk(0, Buffer.input, 0)).copy(0, Buffer.output, 0)
    assert not written(prog).in_place


def test_labels_need_not_be_places() -> None:
    """Everybody begins with a chunk called (0, 7), in slots 0 and 1."""
    before = [[[Chunk(0, 7), None], [None]], [[None, Chunk(0, 7)], [None]]]
    prog = MSCCLProgram(
        "labels", line(2), Labelled(before, {(rank, Buffer.output, 0): Chunk(0, 7) for rank in (0, 1)}), 1
    )
    with prog:
        for rank in (0, 1):
            chunk(rank, Buffer.input, rank).copy(1 - rank, Buffer.output, 0)
    assert written(prog).contract.total_items.tolist() == [3, 0]


def test_what_is_sent_may_stand_in_an_output_before() -> None:
    before = [[[None], [Chunk(0, 0)]], [[None], [None]]]
    prog = MSCCLProgram("before", line(2), Labelled(before, {(1, Buffer.output, 0): Chunk(0, 0)}), 1)
    with prog:
        chunk(0, Buffer.output, 0).copy(1, Buffer.output, 0)
    assert written(prog).in_place


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("language.buffer", ["Buffer"]),
        ("language.chunk", ["Chunk", "ReduceChunk"]),
        ("language.ir", ["Buffer", "ThreadblockPolicy"]),
        ("topologies.generic", ["fully_connected", "hub_and_spoke", "line", "ring", "star"]),
        ("topologies.topology", ["Topology"]),
        ("topologies.nvidia", ["dgx1"]),
    ],
)
def test_every_module_that_programs_import_from(module: str, names: list[str]) -> None:
    found = importlib.import_module(f"undertow.collective.msccl.{module}")
    assert all(getattr(found, name) is globals()[name] for name in names)


def test_the_module_named_chunk_leaves_the_function_its_name() -> None:
    """In a process of its own: only a module's first import sets its name on the package."""
    script = (
        "import undertow.collective.msccl.language.chunk\n"
        "from undertow.collective.msccl.language import chunk, chunk_at\n"
        "assert chunk is chunk_at"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_what_only_the_other_compiler_has_is_said() -> None:
    for module, name in (("ir", "ir_to_xml"), ("rank_dag", "InstructionDAG")):
        with pytest.raises(ImportError, match=f"{name} is a part of msccl-tools' compiler"):
            exec(f"from undertow.collective.msccl.language.{module} import {name}")


class SumOfPairs(AllReduce):
    """Content with less than an AllReduce, of which it is one all the same."""

    def check(self, prog):
        return prog.buffers[0][Buffer.input][0] == total(0, 1)


def test_a_subclass_of_a_usual_collective_is_held_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    prog = MSCCLProgram("pairs", fully_connected(4), SumOfPairs(4, 1, True), 1)
    with prog:
        for rank in (0, 2):
            chunk(rank, Buffer.input, 0).reduce(chunk(rank + 1, Buffer.input, 0)).copy(rank + 1)
        assert not Check()
        assert "does not hold what it must" in capsys.readouterr().out
