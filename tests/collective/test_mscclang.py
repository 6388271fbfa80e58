"""MSCCLang programs through the compatibility module: the same results and messages as the library's programs, and
what msccl-tools (commit 030a750) got wrong, D1 to D11, comes out right or is refused."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from contract_runs import run_exactly
from mscclang_programs import ALGORITHMS

from undertow.collective.algorithms import LIBRARY
from undertow.collective.checker import check
from undertow.collective.formats import msccl_import, msccl_read
from undertow.collective.language import COLUMNS, COPY, INPUT, OUTPUT, REDUCE, Trace
from undertow.collective.msccl import *
from undertow.errors import InvalidArgument, ProgramRefused

Messages = dict[tuple[int, int], list[tuple[tuple[tuple[int, int], ...], ...]]]


def messages(trace: Trace, in_place: bool) -> Messages:
    """What each rank sends to each other one, message by message: which input chunks its chunks are sums of."""
    contract = trace.contract
    base = {(rank, buffer): (rank, buffer, 0) for rank in range(trace.ranks) for buffer in range(len(trace.buffers))}
    if in_place:
        for rank in range(trace.ranks):
            holder = contract.holder(rank)
            held = OUTPUT if holder == INPUT else INPUT
            base[rank, held] = (rank, holder, contract.in_place[rank])
    slots: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}

    def at(rank: int, buffer: int, index: int) -> tuple[int, int, int]:
        owner, where, offset = base[rank, buffer]
        return owner, where, offset + index

    for rank, count in enumerate(contract.inputs):
        for index in range(count):
            slots[at(rank, INPUT, index)] = ((rank, index),)
    found: Messages = {}
    for row in trace.rows().tolist():
        one = dict(zip(COLUMNS, row, strict=True))
        here = [at(one["rank"], one["buffer"], one["start"] + part) for part in range(one["count"])]
        there = [
            at(one["source_rank"], one["source_buffer"], one["source_start"] + part) for part in range(one["count"])
        ]
        sent = [slots[place] for place in there]
        if one["rank"] != one["source_rank"]:
            found.setdefault((one["source_rank"], one["rank"]), []).append(tuple(sent))
        for place, value in zip(here, sent, strict=True):
            slots[place] = value if one["kind"] == COPY else tuple(sorted(slots[place] + value))
        assert one["kind"] in (COPY, REDUCE)
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_as_the_librarys_program(name: str) -> None:
    make, arguments, native, nodes = ALGORITHMS[name]
    prog = make(*arguments)
    trace = LIBRARY[native].trace(topology=nodes)
    assert messages(prog.trace, prog.in_place) == messages(trace, False)
    with prog:
        assert Check()
    for target in ("staged", "direct"):
        run_exactly(prog.compile(target), runs=2)


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_its_xml_does_the_same(name: str, instances: int) -> None:
    make, arguments, _, _ = ALGORITHMS[name]
    for protocol in ("Simple", "LL128"):
        prog = make(*arguments, instances=instances, protocol=protocol)
        algorithm = msccl_read.parse(prog.xml().encode())
        assert algorithm.facts.protocol == protocol
        for schedule in msccl_import.schedules(algorithm):
            check(schedule)
            assert schedule.contract.outputs == tuple(one * instances for one in prog.trace.contract.outputs)
        run_exactly(schedule, runs=1, tiles=(2,))


SCRIPT = """
import argparse
from undertow.collective.msccl.language import *
from undertow.collective.msccl.topologies import *
from undertow.collective.msccl.language.collectives import AllReduce
from undertow.collective.msccl.language.routines import allreduce_ring_inplace

def rings(gpus, instances):
    collective = AllReduce(gpus, gpus, True)
    with MSCCLProgram("rings", ring(gpus), collective, instances, protocol="LL",
                      threadblock_policy=ThreadblockPolicy.manual):
        allreduce_ring_inplace(gpus)
        Check()
        XML()

parser = argparse.ArgumentParser()
parser.add_argument("gpus", type=int)
parser.add_argument("instances", type=int)
args = parser.parse_args()
rings(args.gpus, args.instances)
"""


def test_a_script_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rings.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", [str(path), "4", "2"])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    (schedule,) = msccl_import.schedules(msccl_read.parse(printed.encode()))
    check(schedule)
    run_exactly(schedule, runs=1)


def program(name: str, ranks: int, collective: Collective, **others: object) -> MSCCLProgram:
    return MSCCLProgram(name, fully_connected(ranks), collective, others.pop("instances", 1), **others)


class Free(Collective):
    """Anything may come out: what is meant is what the statements compute. Outputs of `outputs` chunks."""

    outputs = 4

    def init_buffers(self):
        return [
            {Buffer.input: [Chunk(rank, at) for at in range(self.chunk_factor)], Buffer.output: [None] * self.outputs}
            for rank in range(self.num_ranks)
        ]


def right(prog: MSCCLProgram) -> None:
    with prog:
        assert Check()
    for target in ("staged", "direct"):
        run_exactly(prog.compile(target), runs=3)
    for schedule in msccl_import.schedules(msccl_read.parse(prog.xml().encode())):
        check(schedule)
        run_exactly(schedule, runs=2)


def test_d1_reductions_between_different_places() -> None:
    prog = program("d1", 2, Free(2, 3, False))
    with prog:
        total = chunk(1, Buffer.input, 0).copy(1, Buffer.output, 2)
        total.reduce(chunk(0, Buffer.input, 2))
        chunk(1, Buffer.output, 2).copy(1, "aside", 1).reduce(chunk(0, Buffer.input, 0)).copy(0, Buffer.output, 0)
    right(prog)
    assert prog.buffers[1][Buffer.output][2].origins == ((0, 2), (1, 0))


def test_d2_and_d3_partly_overwritten_and_shifted_ranges() -> None:
    prog = program("d2", 3, Free(3, 3, False))
    with prog:
        total = chunk(1, Buffer.input, 0, 3).copy(1, Buffer.output, 0)
        total.reduce(chunk(0, Buffer.input, 0, 3))
        total.copy(2, Buffer.output, 0)
        chunk(2, Buffer.input, 0).copy(1, Buffer.output, 0)
        chunk(0, Buffer.input, 0, 2).copy(1, Buffer.output, 1)
        chunk(1, Buffer.output, 0, 2).copy(2, Buffer.output, 2)
    right(prog)


def test_d4_waits_before_sends() -> None:
    prog = program("d4", 2, Free(2, 2, False), dependence_nop=True)
    with prog:
        for rank in (0, 1):
            chunk(rank, Buffer.input, 0).copy(1 - rank, "got", 0)
        for rank in (0, 1):
            chunk(rank, "got", 0).reduce(chunk(rank, Buffer.input, 1))
            chunk(rank, "got", 0).copy(rank, Buffer.output, 0)
    right(prog)


def test_d5_a_program_that_begins_with_a_local_reduction() -> None:
    prog = program("d5", 2, Free(2, 2, False))
    with prog:
        chunk(0, Buffer.input, 0).reduce(chunk(0, Buffer.input, 1)).copy(1, Buffer.output, 0)
    right(prog)
    assert not prog.compile().keeps_input


@pytest.mark.parametrize("interleaved", [True, False])
def test_d6_and_d7_instances_with_mixed_counts_and_all_to_all(interleaved: bool) -> None:
    prog = program("d6", 2, AllToAll(2, 2, False), instances=3, interleaved_replication=interleaved)
    with prog:
        for rank in (0, 1):
            chunk(rank, Buffer.input, 2 * rank, 2).copy(rank, Buffer.output, 2 * rank)
            chunk(rank, Buffer.input, 2 * (1 - rank), 2).copy(1 - rank, "way", 0)
        for rank in (0, 1):
            for at in range(2):
                chunk(rank, "way", at).copy(rank, Buffer.output, 2 * (1 - rank) + at)
    right(prog)


def test_d8_two_threadblocks_on_one_connection() -> None:
    prog = program("d8", 2, Free(2, 2, False), threadblock_policy=ThreadblockPolicy.manual)
    with prog:
        for at in range(2):
            chunk(0, Buffer.input, at).copy(1, Buffer.output, at, sendtb=at, recvtb=at, ch=0)
    right(prog)


def test_threadblock_hints_take_no_channels() -> None:
    """Every pair of ranks has one connection, whatever threadblocks are asked for: one channel will do."""
    prog = program("hints", 8, AllGather(8, 1, True), threadblock_policy=ThreadblockPolicy.manual, instances=4)
    with prog:
        for rank in range(8):
            for other in range(8):
                if other != rank:
                    chunk(rank, Buffer.input, 0).copy(other, Buffer.output, rank, sendtb=other, recvtb=rank)
    assert msccl_read.parse(prog.xml().encode()).channels == 4


def test_scratch_by_two_names() -> None:
    prog = program("names", 2, Free(2, 2, False))
    with prog:
        for at, name in enumerate((Buffer.scratch, "scratch", "Buffer.scratch", ("a", 1))):
            chunk(0, Buffer.input, at % 2).copy(1, name, 0).copy(1, Buffer.output, at)
    right(prog)
    assert len(prog.trace.buffers) == 6


@pytest.mark.parametrize("protocol", ["Simple", "LL"])
def test_d9_more_messages_than_a_queue_holds(protocol: str) -> None:
    prog = program("d9", 2, AllGather(2, 20, False), protocol=protocol)
    with prog:
        for rank in (0, 1):
            for at in range(20):
                chunk(rank, Buffer.input, at).copy(1 - rank, Buffer.output, 20 * rank + at)
        for rank in (0, 1):
            chunk(rank, Buffer.input, 0, 20).copy(rank, Buffer.output, 20 * rank)
    right(prog)


def test_d10_the_same_xml_every_time() -> None:
    make, arguments, _, _ = ALGORITHMS["two_step_alltoall"]
    assert make(*arguments).xml() == make(*arguments).xml()


def test_d11_many_flows() -> None:
    make, _, _, _ = ALGORITHMS["hierarchical_allreduce"]
    for schedule in msccl_import.schedules(msccl_read.parse(make(4, 8).xml().encode())):
        check(schedule)


def test_a_wrong_program_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    prog = program("wrong", 2, AllReduce(2, 1, True))
    with prog:
        chunk(0, Buffer.input, 0).reduce(chunk(1, Buffer.input, 0))
        assert not Check()
        assert "Output 0 of rank 1 must be made of (0, 0), (1, 0)" in capsys.readouterr().out
        with pytest.raises(ProgramRefused, match=r"input\[0\] of rank 1 does not hold|output\[0\] of rank 1 does not"):
            XML()


def test_misuse_is_one_sentence() -> None:
    with pytest.raises(InvalidArgument, match="program is not begun"):
        chunk(0, Buffer.input, 0)
    with pytest.raises(InvalidArgument, match="protocol is 'LL64', but must be one of Simple, LL, LL128"):
        program("p", 2, AllReduce(2, 1, True), protocol="LL64")
    prog = program("p", 2, AllReduce(2, 1, True))
    with prog:
        assert chunk(0, "nothing", 0) is None
        with pytest.raises(InvalidArgument, match="begun inside another one"):
            prog.__enter__()
        with pytest.raises(ProgramRefused, match=r"test_mscclang.py:\d+: 1 chunks from 3 on are no part of buffer i"):
            chunk(0, Buffer.input, 3)
        with pytest.raises(InvalidArgument, match="num is 2, but must be a divisor of 1"):
            chunk(0, Buffer.input, 0).split(2)
    other = program("q", 2, Free(2, 4, False))
    with other:
        grouped = chunk(0, Buffer.input, 3).group(chunk(0, Buffer.input, 0))
        assert (grouped.index, grouped.size) == (0, 4)
        with pytest.raises(InvalidArgument, match=r"other is .*rank 1.*but must be in the buffer of"):
            grouped.group(chunk(1, Buffer.input, 0))
    linked = MSCCLProgram("line", line(3), AllReduce(3, 1, True), 1)
    with linked, pytest.raises(ProgramRefused, match="no link leads from rank 0 to rank 2"):
        chunk(0, Buffer.input, 0).copy(2)
