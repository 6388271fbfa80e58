"""Checks of collective schedules on a GPU, run inside the ranks of a virtual node. `run(names)` is what is launched.

Every input is made of integers whose sums are exact in every type used here, every output is poisoned first, and every
wait has a deadline: the kernels have the group's, the host has `CHECK_SECONDS`.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from late_rank import call_without_the_last
from numpy.typing import NDArray

import undertow as ut
from undertow import collective as co
from undertow.collective.algorithms import LIBRARY, OUT_OF_PLACE_ONLY
from undertow.collective.bind import bind
from undertow.collective.contract import Contract
from undertow.collective.language import INPUT
from undertow.collective.schedule import Schedule
from undertow.errors import InvalidArgument
from undertow.fabric.base import poison
from undertow.fabric.symmetric import SymmetricBuffer

if TYPE_CHECKING:  # importing it needs a GPU's driver
    from undertow.collective.cuda_runtime import CudaExecutable

CHECK_SECONDS = 400
CHECKS: dict[str, Callable[[ut.Group], None]] = {}
MOST_BYTES = 16 << 20  # of a user's buffer
STRIDE = 64 << 10  # of the executables here: several iterations in calls of moderate size
REPLAYED: tuple[tuple[str, dict[str, Any], torch.dtype, int], ...] = (
    ("two_shot", {"target": "direct", "instances": 8}, torch.float32, 40_003),
    ("one_shot", {"target": "direct", "instances": 4}, torch.bfloat16, 100_000),
    ("ring", {"target": "staged", "instances": 4}, torch.float32, 100_001),
    ("one_shot", {"target": "staged", "packets": True, "instances": 4}, torch.bfloat16, 3001),
)


def check(function: Callable[[ut.Group], None]) -> Callable[[ut.Group], None]:
    CHECKS[function.__name__] = function
    return function


def run(names: Sequence[str]) -> list[str]:
    """The named checks in order; the time each took, for people."""
    group = ut.init()
    report = []
    for name in names:
        settle(group)
        began = time.perf_counter()
        faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)  # should a check hang after all: where, and an end
        CHECKS[name](group)
        settle(group)
        faulthandler.cancel_dump_traceback_later()
        report.append(f"{name} {time.perf_counter() - began:.1f} s")
        if group.rank == 0:
            print(report[-1], flush=True)
    return report


def settle(group: ut.Group) -> None:
    torch.cuda.synchronize()
    group.barrier()
    group.check()


# -- what a call must give -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Integers for one call of one schedule: what each rank has, what it must get, and where that is not said."""

    spans: list[int]
    inputs: list[NDArray[np.int64]]
    outputs: list[NDArray[np.int64]]
    said: list[NDArray[np.bool_]]  # of every output element
    input_at: list[int]  # in place: where the input begins in the one buffer
    output_at: list[int]


def make_case(schedule: Schedule, length: int, item_size: int, seed: int, operation: str = "sum") -> Case:
    """Spans of about `length` elements, all different and one empty where the program allows that."""
    contract = schedule.contract
    spans = [length] * contract.spans
    if contract.spans > 1:
        varied = [0 if one == contract.spans // 2 else max(0, length - 3 * (one % 5)) for one in range(contract.spans)]
        spans = varied if _fits(schedule, varied, item_size) else spans
    classes = contract.class_lengths(spans, max(1, 16 // item_size))
    random = np.random.default_rng(seed)
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[operation].reduce
    item_lengths, output_lengths = classes[contract.item_class], classes[contract.output_class]
    items = [random.integers(-1, 2, int(count)) for count in item_lengths]
    inputs, outputs, said, input_at, output_at = [], [], [], [], []
    for rank in range(contract.ranks):
        inputs.append(_joined(items[contract.first_item[rank] : contract.first_item[rank + 1]]))
        chunks, known = [], []
        for output in range(contract.first_output[rank], contract.first_output[rank + 1]):
            total = int(contract.after[output])
            parts = contract.total_items[contract.total_start[total] : contract.total_start[total + 1]]
            count = int(output_lengths[output])
            chunks.append(combine([items[one] for one in parts]) if total >= 0 else np.zeros(count, np.int64))
            known.append(np.full(count, total >= 0))
        outputs.append(_joined(chunks))
        said.append(_joined(known).astype(bool))
        at = _offset_in_place(contract, rank, item_lengths, output_lengths)
        input_at.append(0 if contract.holder(rank) == INPUT else at)
        output_at.append(at if contract.holder(rank) == INPUT else 0)
    return Case(spans, inputs, outputs, said, input_at, output_at)


def _fits(schedule: Schedule, spans: list[int], item_size: int) -> bool:
    """Whether every rank can run it: some programs put chunks of one length where another is kept."""
    try:
        for rank in range(schedule.ranks):
            bind(schedule, rank, spans, STRIDE, item_size, 0, 0)
    except InvalidArgument:
        return False
    return True


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _offset_in_place(contract: Contract, rank: int, items: NDArray[np.int64], outputs: NDArray[np.int64]) -> int:
    """Elements of the longer buffer before the shorter one."""
    if contract.in_place is None:
        return 0
    of_input = contract.holder(rank) == INPUT
    lengths, first = (items, contract.first_item) if of_input else (outputs, contract.first_output)
    return int(lengths[first[rank] : first[rank] + contract.in_place[rank]].sum())


# -- running one ---------------------------------------------------------------------------------------------------


class Buffers:
    """Two symmetric buffers of bytes for all direct calls: making new ones for each would take most of the time."""

    def __init__(self, group: ut.Group) -> None:
        self._group = group
        self._pair = [group.fabric.buffer(MOST_BYTES, torch.uint8) for _ in range(2)]
        self._typed: dict[torch.dtype, list[SymmetricBuffer]] = {}

    def typed(self, dtype: torch.dtype) -> list[SymmetricBuffer]:
        if dtype not in self._typed:
            self._typed[dtype] = [one.as_type(dtype) for one in self._pair]
        return self._typed[dtype]

    def release(self) -> None:
        settle(self._group)
        for one in self._pair:
            one.release()


def verify(
    group: ut.Group,
    executable: CudaExecutable,
    buffers: Buffers,
    case: Case,
    dtype: torch.dtype,
    operation: str = "sum",
    misaligned: int = 0,
) -> None:
    """One call. Raises if an element is wrong; `misaligned`: elements by which private tensors begin late."""
    schedule, rank, device = executable.schedule, group.rank, group.device
    given = torch.from_numpy(case.inputs[rank]).to(device=device, dtype=dtype)
    want = torch.from_numpy(case.outputs[rank]).to(device=device, dtype=dtype)
    said = torch.from_numpy(case.said[rank]).to(device)
    room = max(case.input_at[rank] + given.numel(), case.output_at[rank] + want.numel())
    source: torch.Tensor | SymmetricBuffer
    out: torch.Tensor | SymmetricBuffer
    if schedule.staged:
        private = [torch.empty(room + misaligned, dtype=dtype, device=device)[misaligned:] for _ in range(2)]
        source, out = private[0], private[0] if schedule.in_place else private[1]
        views = (source, out)
    else:
        pair = buffers.typed(dtype)
        source, out = pair[0], pair[0] if schedule.in_place else pair[1]
        views = (source.local, out.local)
    poison(views[1][:room])
    first = case.input_at[rank] if schedule.in_place else 0
    views[0][first : first + given.numel()] = given
    executable.run(source, out, case.spans, operation)
    first = case.output_at[rank] if schedule.in_place else 0
    found = views[1][first : first + want.numel()]
    wrong = int(((found != want) & said).sum())
    what = f"{schedule.name}, {case.spans} elements, {dtype}, {'staged' if schedule.staged else 'direct'}"
    assert wrong == 0, f"{what}, in place {schedule.in_place}, rank {rank}: {wrong} of {want.numel()} are wrong"


def grids(group: ut.Group) -> list[tuple[int, int]]:
    """Workers and instances that fit the multiprocessors of a rank."""
    fabric: Any = group.fabric
    room = fabric.multiprocessors
    return [(1, min(8, room)), (1, 1), (4, max(1, min(8, room // 4)))]


def make(group: ut.Group, schedule: Schedule, stride: int = STRIDE) -> CudaExecutable:
    from undertow.collective.cuda_runtime import CudaExecutable

    fabric: Any = group.fabric
    return CudaExecutable(fabric, schedule, stride)


def close(group: ut.Group, executable: CudaExecutable) -> None:
    settle(group)
    executable.close()


def _library(group: ut.Group, target: str) -> None:
    """Every program, in place too where it can be, on one of the grids each: what takes the time is compiling."""
    from undertow.collective.cuda_kernels import compile_ahead

    buffers = Buffers(group)
    forms = [
        (name, in_place)
        for name, program in LIBRARY.items()
        for in_place in (False, True)
        if not in_place or not (program.contract(group.size).in_place is None or name in OUT_OF_PLACE_ONLY)
    ]
    schedules = []
    for number, (name, in_place) in enumerate(forms):
        workers, instances = grids(group)[number % 3]
        options: dict[str, Any] = {"target": target, "in_place": in_place, "workers": workers, "instances": instances}
        schedules.append(LIBRARY[name].compile(group.size, **options))
    compile_ahead(group, [(schedule, torch.float32, "sum") for schedule in schedules])
    for schedule in schedules:
        executable = make(group, schedule)
        # The longest is cut into blocks that instances take in turn.
        long = 300_000 if schedule.contract.spans == 1 else 65_536
        for seed, length in enumerate((1, 77, 10_007, long)):
            case = make_case(schedule, length, 4, 31 * seed + schedule.instances)
            verify(group, executable, buffers, case, torch.float32)
        close(group, executable)
    buffers.release()


@check
def direct_programs(group: ut.Group) -> None:
    _library(group, "direct")


@check
def staged_programs(group: ut.Group) -> None:
    _library(group, "staged")


@check
def types_and_operations(group: ut.Group) -> None:
    """Few programs, all widths of elements, all operations, private tensors that begin anywhere."""
    from undertow.collective.cuda_kernels import compile_ahead

    buffers = Buffers(group)
    few = ((torch.bfloat16, "sum"), (torch.float64, "sum"))
    all_of_them = (*few, (torch.float16, "max"), (torch.int32, "min"), (torch.int8, "sum"))
    chosen: tuple[tuple[str, str, dict[str, Any], tuple[tuple[torch.dtype, str], ...]], ...] = (
        ("two_shot", "direct", {}, all_of_them), ("one_shot", "direct", {}, few),
        ("one_shot", "staged", {"packets": True}, all_of_them),  # 64-bit sums go without packets
        ("all_to_all_direct", "direct", {}, few), ("all_gather_direct", "staged", {}, few),
    )  # fmt: skip
    schedules = [
        LIBRARY[name].compile(group.size, target=target, instances=2, **options) for name, target, options, _ in chosen
    ]
    compile_ahead(
        group,
        [(one, *kind) for one, (*_, wanted) in zip(schedules, chosen, strict=True) for kind in wanted
         if kind[0].itemsize <= 4 or not one.packets],
    )  # fmt: skip
    for schedule, (_, target, _, wanted) in zip(schedules, chosen, strict=True):
        executable = make(group, schedule)
        for number, (dtype, operation) in enumerate(wanted):
            for length in (5, 4099, 50_000):
                case = make_case(schedule, length, dtype.itemsize, number + length, operation)
                misaligned = 0 if target == "direct" else number % 3
                verify(group, executable, buffers, case, dtype, operation, misaligned)
        close(group, executable)
    buffers.release()


@check
def captured_calls_replay(group: ut.Group) -> None:
    """1000 replays of each, with new inputs, a rank's host or device delayed now and then."""
    from gpu_checks import _replay

    for name, options, dtype, length in REPLAYED:
        schedule = LIBRARY[name].compile(group.size, **options)
        executable = make(group, schedule)
        xs = [_integers(length, rank, dtype, group.device) for rank in range(group.size)]
        buffers = [group.fabric.buffer(length, dtype) for _ in range(2)] if not schedule.staged else []
        x, y = (one.local for one in buffers) if buffers else (xs[group.rank].clone(), torch.empty_like(xs[0]))
        x.copy_(xs[group.rank])
        source, out = buffers or (x, y)

        def call(
            executable: CudaExecutable = executable, source: Any = source, out: Any = out, n: int = length
        ) -> None:
            executable.run(source, out, [n])

        want = torch.stack([one.float() for one in xs]).sum(0).to(dtype)
        _replay(group, f"{name} {options}", x, y, call, want)
        close(group, executable)
        for buffer in buffers:
            buffer.release()
    fabric: Any = group.fabric
    assert int(fabric.guard.error[0]) == 0


def _integers(count: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-1, 2, count)).to(device=device, dtype=dtype)


@check
def two_in_flight(group: ut.Group) -> None:
    """Two executables on two streams, few CTAs each; ranks enqueue them in different orders and run ahead."""
    from undertow.fabric import stream_memory

    length, calls = 30_001, 50
    streams = [stream_memory.new_stream(group.device) for _ in range(2)]
    made = [
        make(group, LIBRARY[name].compile(group.size, target="staged", instances=2)) for name in ("ring", "two_shot")
    ]
    xs = [[_integers(length, 7 * which + rank, torch.float32, group.device) for rank in range(group.size)]
          for which in range(2)]  # fmt: skip
    ys = [torch.empty(length, device=group.device) for _ in range(2)]
    wrong = torch.zeros(2, dtype=torch.int64, device=group.device)
    want = [torch.stack(one).sum(0) for one in xs]
    for which in range(2):
        made[which].run(xs[which][group.rank], ys[which], [length])
    settle(group)
    for _ in range(calls):
        for which in (0, 1) if group.rank % 2 else (1, 0):
            with torch.cuda.stream(streams[which]):
                ys[which].fill_(float("nan"))
                made[which].run(xs[which][group.rank], ys[which], [length])
                wrong[which] += (ys[which] != want[which]).sum()
    settle(group)
    assert wrong.tolist() == [0, 0]
    for one in made:
        close(group, one)


@check
def refused(group: ut.Group) -> None:
    """Too many CTAs; private tensors for a direct schedule; too short ones; a first call inside a capture."""
    fabric: Any = group.fabric
    room = fabric.multiprocessors
    _raises("schedule is of", lambda: make(group, LIBRARY["two_shot"].compile(group.size, instances=room + 1)))
    direct = make(group, LIBRARY["two_shot"].compile(group.size, target="direct"))
    staged = make(group, LIBRARY["two_shot"].compile(group.size, target="staged"))
    x, y = torch.ones(64, device=group.device), torch.empty(64, device=group.device)
    _raises("source is an ordinary tensor", lambda: direct.run(x, y, [64]))
    _raises("out is of 64 elements", lambda: staged.run(torch.ones(65, device=group.device), y, [65]))
    staged.run(x, y, [64])
    settle(group)

    def captured() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            staged.run(x, y, [60])

    _raises("made once before it is captured", captured)
    staged.run(x, y, [64])
    settle(group)
    assert torch.equal(y, torch.full_like(y, group.size))
    for one in (direct, staged):
        close(group, one)


def _raises(sentence: str, call: Callable[[], object]) -> None:
    try:
        call()
    except InvalidArgument as error:
        said = str(error)
    else:
        said = "nothing"
    assert sentence in said, f"{sentence!r} was expected, but it said: {said}"


def calls() -> list[str]:
    """The calls that users make, of a few sizes, in and out of a capture: names of those that were wrong."""
    group = ut.init()
    device, size, wrong = group.device, group.size, []
    for count in (5, 3001, 2_500_003):
        parts = [_integers(count, rank, torch.bfloat16, device) for rank in range(size)]
        mine, total = parts[group.rank], torch.stack(parts).float().sum(0).to(torch.bfloat16)
        root = size - 1
        found = {
            "all_reduce": (co.all_reduce(mine.clone()), total),
            "all_reduce by a program": (co.all_reduce(mine.clone(), program=LIBRARY["ring"]), total),
            "all_gather": (co.all_gather(mine), torch.cat(parts)),
            "reduce_scatter": (co.reduce_scatter(mine), total.tensor_split(size)[group.rank]),
            "broadcast": (co.broadcast(mine.clone(), root=root), parts[root]),
            "all_to_all": (
                co.all_to_all(mine[: count // size * size]),
                torch.cat([one[: count // size * size].tensor_split(size)[group.rank] for one in parts]),
            ),
        }
        if group.rank == root:
            found["reduce"] = (_there(co.reduce(mine, root=root)), total)
            found["gather"] = (_there(co.gather(mine, root=root)), torch.cat(parts))
        else:
            assert co.reduce(mine, root=root) is None
            assert co.gather(mine, root=root) is None
        every = torch.cat(parts) if group.rank == root else None
        found["scatter"] = (co.scatter(every, out=torch.full_like(mine, 9), root=root), mine)
        wrong += [f"{name} {count}" for name, (given, wanted) in found.items() if not torch.equal(given, wanted)]
    x, base = torch.empty_like(mine), mine.clone()
    graph = torch.cuda.CUDAGraph()
    settle(group)
    with torch.cuda.graph(graph):
        co.all_reduce(x)
    for step in range(20):
        x.copy_(base * (-1) ** step)
        graph.replay()
        if not torch.equal(x, total * (-1) ** step):
            wrong.append(f"replay {step}")
    settle(group)
    return wrong


def _there(found: torch.Tensor | None) -> torch.Tensor:
    assert found is not None
    return found


def abandoned() -> str:
    """The last rank does not come; the kernels of the others give up at the deadline, and the group fails."""
    group = ut.init()
    executable = make(group, LIBRARY["two_shot"].compile(group.size, target="staged", instances=2))
    x, y = torch.ones(4096, device=group.device), torch.empty(4096, device=group.device)
    executable.run(x, y, [4096])
    settle(group)

    def call() -> torch.Tensor:
        with group.fabric.guarded_call((y,), itself=executable.poisons):  # as public calls: the kernel's own poison
            executable.run(x, y, [4096])
        return y

    return call_without_the_last(group, call)
