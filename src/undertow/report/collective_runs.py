"""Collective programs run once by ranks of this machine, with an exact check of what comes out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ..collective.bind import waits_for_kernels
from ..collective.contract import Contract
from ..collective.cpu_runtime import CpuExecutable, stride_for
from ..collective.schedule import Schedule
from ..collective.trial import Trial, equal_spans, spans_of_buffer
from ..errors import InvalidArgument
from ..fabric.group import Group
from ..fabric.launch import launch
from ..fabric.registry import init
from ..fabric.symmetric import SymmetricBuffer
from .collective import form_in_words, ranks_in_words
from .room import check_room

if TYPE_CHECKING:
    from ..fabric.cpu import CpuFabric

_COPIES = 4  # of the longest buffer, on each rank: input, output, what must come out, scratch


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one form of a program, over all ranks."""

    name: str
    ranks: int
    target: str
    in_place: bool
    nbytes: int
    dtype: str
    seconds: float
    wrong: int
    first: str

    def line(self, width: int = 0) -> str:
        said = "right" if not self.wrong else f"wrong: {self.wrong} elements, such as {self.first}"
        return (
            f"{self.name:<{width}}  {ranks_in_words(self.ranks)}  {self.target}  {form_in_words(self.in_place):<12}"
            f"  {self.nbytes} bytes of {self.dtype}  {self.seconds * 1e6:.1f} us  {said}"
        )


def check_device(device: str) -> None:
    """Refuse ranks that these commands do not start."""
    if device == "cuda":
        must = "cpu: this command starts CPU ranks; in a script of GPU ranks undertow.collective runs programs"
        raise InvalidArgument(argument="--device", was=device, must=must)


def check_memory(option: str, nbytes: int, ranks: int) -> None:
    """Refuse sizes whose input, output, and copies to compare with are more than this machine has."""
    check_room(option, f"{nbytes} bytes", ranks, _COPIES * nbytes)


def sendable(schedule: Schedule) -> Schedule:
    """Without the program's code objects, which no process can send; only words for people need them."""
    if waits_for_kernels(schedule):
        must = "one without tile_ready and tile_needed: here runs no kernel that would signal its tiles"
        raise InvalidArgument(argument="program", was=schedule.name, must=must)
    return dataclasses.replace(schedule, codes=(), rows=np.zeros((0, 2), np.int32))


def run_once(schedules: Sequence[Schedule], nbytes: int, dtype: str) -> list[Outcome]:
    """Every schedule on ranks of this machine: one call that is checked, exactly, then one that is timed."""
    if not schedules:
        return []
    plain = [sendable(one) for one in schedules]
    check_memory("--bytes", nbytes, plain[0].ranks)
    found: list[list[Outcome]] = launch(run_rank, plain[0].ranks, "cpu", args=(plain, nbytes, dtype))
    outcomes = []
    for each in zip(*found, strict=True):
        first = next((one.first for one in each if one.first), "")
        outcomes.append(dataclasses.replace(each[0], wrong=sum(one.wrong for one in each), first=first))
    return outcomes


def run_rank(schedules: Sequence[Schedule], nbytes: int, dtype: str) -> list[Outcome]:
    """Everything one rank does."""
    group = init()
    of_type: torch.dtype = getattr(torch, dtype)
    outcomes = []
    for schedule in schedules:
        trial = make_trial(
            group, schedule.contract, nbytes, of_type, schedule.in_place, not schedule.staged,
            keeps_input=schedule.keeps_input,
        )  # fmt: skip
        executable = CpuExecutable(cast("CpuFabric", group.fabric), schedule, stride_for(schedule))
        trial.fill()
        executable.run(trial.source, trial.out, trial.spans)
        wrong, first = trial.wrong()
        trial.rest()
        group.barrier()
        began = time.perf_counter()
        executable.run(trial.source, trial.out, trial.spans)
        (seconds,) = group.reduce_max([time.perf_counter() - began])
        group.barrier()
        executable.close()
        trial.release()
        taken = trial.spans[0] * spans_of_buffer(schedule.contract) * of_type.itemsize
        target = "staged" if schedule.staged else "direct"
        outcomes.append(
            Outcome(schedule.name, group.size, target, schedule.in_place, taken, dtype, seconds, wrong, first)
        )
    return outcomes


def make_trial(
    group: Group,
    contract: Contract,
    nbytes: int,
    dtype: torch.dtype,
    in_place: bool,
    direct: bool,
    operation: str = "sum",
    keeps_input: bool = True,
) -> Trial:
    """Memory for calls of this size; where ranks reach into each other's, making it is collective."""

    def symmetric(count: int, of: torch.dtype) -> SymmetricBuffer:
        return group.fabric.buffer(count, of)

    return Trial(
        contract, group.rank, equal_spans(contract, nbytes, dtype.itemsize), dtype, in_place=in_place,
        operation=operation, symmetric=symmetric if direct else None, keeps_input=keeps_input,
    )  # fmt: skip
