"""Scripts in MSCCLang, started as they stand but for their import lines: what they print is judged and run."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from contract_runs import run_exactly
from mscclang_scripts import SCRIPTS

from undertow.collective.checker import check
from undertow.collective.formats import msccl_import, msccl_read
from undertow.collective.msccl import *
from undertow.collective.schedule import Schedule
from undertow.errors import InvalidArgument, ProgramRefused

IMPORT = re.compile(r"^from msccl\.", re.MULTILINE)


def sums(schedule: Schedule) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each output chunk that is promised, the input chunks (rank, index) it is the sum of."""
    contract = schedule.contract
    owner = [(rank, index) for rank, count in enumerate(contract.inputs) for index in range(count)]
    found = {}
    for rank, count in enumerate(contract.outputs):
        for index in range(count):
            total = int(contract.after[contract.first_output[rank] + index])
            if total >= 0:
                items = contract.total_items[contract.total_start[total] : contract.total_start[total + 1]]
                found[rank, index] = sorted(owner[int(item)] for item in items)
    return found


# What the custom ones must compute, told without their programs, for one instance.
MEANINGS = {
    "backwards": {(rank, index): [(rank + 1, index)] for rank in range(5) for index in range(3)},
    "reduce in groups": {
        (rank, index): [(index // 3 * 3 + member, index % 3) for member in range(3)]
        for rank in range(6)
        for index in range(6)
    },
    "binomial": {(rank, index): [(0, index)] for rank in range(6) for index in range(2)},
}


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(
    name: str, instances: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, arguments, contract = SCRIPTS[name]
    rewritten, lines = IMPORT.subn("from undertow.collective.msccl.", source)
    assert lines >= 3
    path = tmp_path / "script.py"
    path.write_text(rewritten)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments, str(instances)])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    made = msccl_import.schedules(msccl_read.parse(printed.encode(), "printed"), "printed")
    for schedule in made:
        check(schedule)
        run_exactly(schedule, runs=1)
        assert schedule.contract.name == contract
        if contract == "custom" and instances == 1:
            assert sums(schedule) == MEANINGS[name]


def test_indices_beyond_an_input_that_lies_in_its_output() -> None:
    """As there: of an AllGather in place, input -1 of rank 1 is output 0; what is outside both is refused."""
    prog = MSCCLProgram("beyond", fully_connected(3), AllGather(3, 1, True), 1)
    with prog:
        chunk(0, Buffer.input, 0).copy(1, Buffer.output, 0)
        assert chunk(1, Buffer.input, -1) == chunk(1, Buffer.output, 0)
        assert chunk(1, Buffer.input, 1) is None
        for wrong in (-2, 2):
            with pytest.raises(ProgramRefused, match=r"test_mscclang_scripts.py:\d+: 1 chunks from"):
                chunk(1, Buffer.input, wrong)
        with pytest.raises(ProgramRefused, match="rank 3 does not exist"):
            chunk(3, Buffer.input, 0)
        with pytest.raises(InvalidArgument, match="other_chunkref is None, but must be a reference"):
            chunk(1, Buffer.input, 0).reduce(chunk(1, Buffer.input, 1))


TABLE = """\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity
GPU0\t X \tNV4\tSYS\tPXB\t0-31
GPU1\tNV4\t X \tNV12\tPXB\t0-31
GPU2\tSYS\tNV12\t X \tSYS\t0-31
NIC0\tPXB\tPXB\tSYS\t X \t

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_machines() -> None:
    assert nvlink_only(TABLE).links == [[0, 4, 0], [4, 0, 12], [0, 12, 0]]
    assert dgx_a100().link(0, 7) == 12
    with pytest.raises(InvalidArgument, match="nvidia_smi_topo is None, but must be the table"):
        nvlink_only()
    prog = MSCCLProgram("apart", nvlink_only(TABLE), AllReduce(3, 1, True), 1)
    with prog, pytest.raises(ProgramRefused, match="link"):
        chunk(0, Buffer.input, 0).copy(2, Buffer.input, 0)
