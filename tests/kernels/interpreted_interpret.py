"""The kernel of `interpret` on whole programs, run by Triton's interpreter: a process for each CTA of each rank.

`test_interpret.py` runs this file in a process of its own, because the interpreter is chosen when a kernel is defined,
with the folders of the checks that it borrows on its path. The few functions that are inline assembly have a stand-in
here; all decoding, counting, cutting and summing is the kernel's own. What is *not* seen here: threads of a CTA (there
is one order of operations) and the GPU's memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from typing import Any

import interpreted_move  # noqa: F401 - mends Triton's interpreter for this NumPy
import numpy as np
import pytest
import torch
import triton.language as tl
from collective_checks import Case, make_case
from numpy.typing import NDArray
from triton.runtime.interpreter import interpreter_builder

from undertow.collective.algorithms import LIBRARY, OUT_OF_PLACE_ONLY
from undertow.collective.bind import FIRST_WORKSPACE, bind, most_semaphores, tiling, workspace_bytes
from undertow.collective.contract import custom
from undertow.collective.cpu_runtime import OPERATIONS, TYPES
from undertow.collective.cuda_kernels import idle_code, kernel_variant, straight_cut
from undertow.collective.language import Trace, program
from undertow.collective.schedule import Schedule
from undertow.collective.straight import rows, straighten
from undertow.collective.tied import tie
from undertow.collective.topology import Topology
from undertow.fabric.base import poison
from undertow.kernels import interpret, packets, pieces, straight
from undertow.kernels import poison as poison_kernels

PATIENCE = 60.0  # seconds
STRIDE = 2048
LANES = 64


# -- stand-ins for inline assembly -----------------------------------------------------------------------------------


def _again(began: float) -> None:
    if time.monotonic() - began > PATIENCE:
        os._exit(3)
    time.sleep(0.0005)


def poll(pointers: Any, targets: Any, wanted: Any, abort: Any, deadline_ns: Any) -> Any:
    began = time.monotonic()
    while True:
        seen = tl.load(pointers, mask=wanted, other=0)
        late = wanted & (seen - targets < 0)
        if not late.handle.data.any():
            return tl.zeros(targets.shape, tl.int32)
        _again(began)


def settle(pointers: Any, wanted: Any, flag: Any, watch: Any) -> Any:
    began = time.monotonic()
    found = []
    for index, each in enumerate(pointers):
        here = (wanted >> index) & 1 != 0
        while True:
            seen = tl.load(each, mask=here, other=0)
            late = here & ((seen >> 32).to(tl.int32) != flag)
            if not late.handle.data.any():
                break
            _again(began)
        found.append(seen.to(tl.int32))
    return (*found, found[0] * 0)  # ARRIVED


def send(pointers: Any, data: Any, flag: Any, wanted: Any) -> None:
    word = (flag.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)
    tl.store(pointers, word + tl.zeros(data.shape, tl.int64), mask=wanted)


@pytest.fixture(autouse=True)
def no_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (interpret, straight):
        monkeypatch.setattr(kernel, "poll", poll)
        monkeypatch.setattr(kernel, "report_error", lambda pointer, code: os._exit(4))
    monkeypatch.setattr(interpret, "fetch", lambda pointers, wanted: None)
    for module in (pieces, straight):
        monkeypatch.setattr(module, "settled", lambda value: value)
    for function in (settle, send):
        monkeypatch.setattr(packets, function.__name__, function)


# -- a node in shared memory -----------------------------------------------------------------------------------------


class Node:
    """Memory of all ranks for one schedule, shared by all processes that this one forks."""

    def __init__(self, schedule: Schedule, straight: bool = True, stride: int = STRIDE, room: int = 1 << 21) -> None:
        self.schedule, self.straight = schedule, straight  # whether it may run in the kernel for such schedules
        self._arena = np.frombuffer(mmap.mmap(-1, room), np.uint8)
        self._used = 0
        self.stride = stride - stride % (16 * schedule.instances)
        ranks = schedule.ranks
        words = max(1, most_semaphores(schedule)) * 128
        self.semaphores = [self.bytes(words) for _ in range(ranks)]
        self.workspaces = [self.bytes(workspace_bytes(schedule, self.stride)) for _ in range(ranks)]
        self.epochs = [
            torch.from_numpy(self.bytes(16 * len(schedule.workers_of(rank)) * schedule.instances).view(np.int64))
            for rank in range(ranks)
        ]
        self.finished = [torch.from_numpy(self.bytes(8).view(np.int64)) for _ in range(ranks)]
        self.parcels, self.tiles = ([self.bytes(128 * 64) for _ in range(ranks)] for _ in range(2))

    def bytes(self, count: int, shift: int = 0) -> NDArray[np.uint8]:
        first = -(-self._used // 128) * 128 + shift
        self._used = first + count
        assert self._used <= len(self._arena), "the arena is too small"
        return self._arena[first : first + count]

    def call(self, case: Case, dtype: torch.dtype, operation: str = "sum", shift: int = 0, ready: int = 0) -> None:
        """Run one call on all ranks and compare; buffers begin `shift` bytes late."""
        schedule, size = self.schedule, dtype.itemsize
        mark = self._used
        sources, outs = [], []
        for rank in range(schedule.ranks):
            given, want = case.inputs[rank], case.outputs[rank]
            count = max(case.input_at[rank] + len(given), case.output_at[rank] + len(want), 1)
            source = torch.from_numpy(self.bytes(count * size, shift)).view(dtype)
            out = source if schedule.in_place else torch.from_numpy(self.bytes(count * size, shift)).view(dtype)
            poison(out)
            first = case.input_at[rank] if schedule.in_place else 0
            source[first : first + len(given)] = torch.from_numpy(given).to(dtype)
            sources.append(source)
            outs.append(out)
        self._fork(case, dtype, operation, sources, outs, ready)
        for rank in range(schedule.ranks):
            first = case.output_at[rank] if schedule.in_place else 0
            want = torch.from_numpy(case.outputs[rank]).to(dtype)
            found = outs[rank][first : first + len(want)]
            wrong = ((found != want) & torch.from_numpy(case.said[rank])).nonzero().flatten()
            assert not len(wrong), f"rank {rank}: {len(wrong)} of {len(want)} are wrong, first {wrong[:5].tolist()}"
            if not schedule.in_place:
                beyond = outs[rank][len(want) :].clone()
                poison(outs[rank])
                assert torch.equal(beyond.view(torch.uint8), outs[rank][len(want) :].view(torch.uint8)), "too much"
        self._used = mark

    def _fork(
        self, case: Case, dtype: torch.dtype, operation: str, sources: list[Any], outs: list[Any], ready: int
    ) -> None:
        schedule, size = self.schedule, dtype.itemsize
        shape = straighten(schedule) if self.straight else None
        variant = kernel_variant(schedule, shape, dtype, operation, LANES // 32)
        children = []
        bases = np.zeros(FIRST_WORKSPACE + 3 * schedule.ranks, np.int64)
        for at, buffers in enumerate((self.workspaces, sources, outs)):
            addresses = [one.ctypes.data if isinstance(one, np.ndarray) else one.data_ptr() for one in buffers]
            bases[FIRST_WORKSPACE + at * schedule.ranks :][: schedule.ranks] = addresses
        if schedule.staged:
            bases[FIRST_WORKSPACE + schedule.ranks :] = 0
        words = [one.ctypes.data for one in self.semaphores]
        for rank in range(schedule.ranks):
            own, none = (sources[rank].data_ptr(), outs[rank].data_ptr()), torch.zeros(1, dtype=torch.int32)
            code = OPERATIONS[operation]
            bound = bind(schedule, rank, case.spans, self.stride, size, TYPES[dtype], code)
            if shape is None:
                tables = [
                    torch.from_numpy(one) for one in (bound.code, bases, np.array([*words, words[rank]], np.int64))
                ]
                kernel, arguments = interpret.interpret_kernel, (
                    *tables, self.epochs[rank], self.finished[rank], *own, outs[rank].nbytes, bound.iterations,
                    len(bound.code), none, none, 0,
                    self.parcels[rank].ctypes.data, ready, self.tiles[rank].ctypes.data,
                )  # fmt: skip
            else:
                length = schedule.contract.class_lengths(case.spans, max(1, 16 // size))
                made = rows(schedule, shape, rank, length, self.stride // size, size, bases, words)
                step, iterations = tiling(schedule, length, self.stride, size, None)
                cut = straight_cut(schedule, shape, self.stride, LANES // 32, iterations, step)
                kernel = straight.straight_kernel
                counts, room = (self.epochs[rank], self.finished[rank]), outs[rank].nbytes
                arguments = (torch.from_numpy(made), *counts, *own, room, *cut, none, none, 0)
            for cta in range(bound.workers * schedule.instances):
                child = os.fork()
                if child == 0:
                    self._run(kernel, cta, arguments, variant)
                children.append((rank, cta, child))
        failed = [(rank, cta) for rank, cta, child in children if os.waitpid(child, 0)[1] != 0]
        assert not failed, f"these CTAs failed or stood still: {failed}"

    def _run(self, kernel: Any, cta: int, arguments: tuple[Any, ...], variant: dict[str, Any]) -> None:
        """In a process of its own, as CTA number `cta`."""
        status = 1
        try:
            set_index = interpreter_builder.set_grid_idx
            interpreter_builder.set_grid_idx = lambda x, y, z: set_index(cta, y, z)
            grid_dim = interpreter_builder.set_grid_dim
            interpreter_builder.set_grid_dim = lambda x, y, z: grid_dim(cta + 1, y, z)
            kernel[(1,)](*arguments, **variant)
            status = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(status)


def compiled(name: str, ranks: int, **options: Any) -> Schedule:
    return LIBRARY[name].compile(ranks, **options)


DIRECT, STAGED = {"target": "direct"}, {"target": "staged"}
CASES: list[tuple[str, int, dict[str, Any], torch.dtype, tuple[int, ...]]] = [
    ("two_shot", 3, {**DIRECT, "instances": 2}, torch.bfloat16, (1, 2003, 64)),
    ("two_shot", 4, {**DIRECT, "in_place": True}, torch.int32, (777,)),
    ("one_shot", 3, {**DIRECT, "instances": 2}, torch.float32, (5, 2500)),
    ("ring", 3, {**STAGED, "instances": 2, "in_place": True}, torch.bfloat16, (4000, 31)),
    ("all_pairs_chunks", 2, {**STAGED, "workers": 2}, torch.int32, (1000,)),
    ("halving_doubling", 4, STAGED, torch.float32, (2100,)),
    ("double_binary_tree", 4, DIRECT, torch.bfloat16, (1111,)),
    ("all_gather_direct", 3, {**DIRECT, "instances": 2}, torch.bfloat16, (300,)),
    ("all_gather_ring", 3, {**STAGED, "in_place": True}, torch.int32, (700,)),
    ("reduce_scatter_ring", 3, STAGED, torch.float32, (900,)),
    ("all_to_all_direct", 3, {**DIRECT, "workers": 2}, torch.bfloat16, (150,)),
    ("all_to_all_swap", 3, {**STAGED, "in_place": True}, torch.int8, (60,)),
    ("broadcast_tree", 4, STAGED, torch.float64, (500,)),
    ("reduce_tree", 4, DIRECT, torch.float16, (600,)),
    ("scatter_direct", 2, DIRECT, torch.int16, (333,)),
]


@pytest.mark.parametrize(("name", "ranks", "options", "dtype", "lengths"), CASES)
def test_programs(name: str, ranks: int, options: dict[str, Any], dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    """Several calls of different sizes on the same semaphores and scratch."""
    schedule = compiled(name, ranks, **options)
    node = Node(schedule)
    for number, length in enumerate(lengths):
        node.call(make_case(schedule, length, dtype.itemsize, number), dtype)
    past = {tuple(one.view(-1, 2)[cta].tolist()) for one in node.epochs for cta in range(len(one) // 2)}
    assert len(past) == 1, past
    assert past.pop()[1] == len(lengths)
    out = [int(one) for one in node.finished]  # every CTA counts itself out once a call
    assert out == [len(one) // 2 * len(lengths) for one in node.epochs]


BLOCK = LANES * 16 * pieces.BLOCK.value  # bytes


@pytest.mark.parametrize("straight", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("two_shot", DIRECT), ("two_shot", STAGED), ("one_shot", {**STAGED, "packets": True}),
        ("all_to_all_direct", DIRECT), ("all_gather_direct", STAGED),
    ],
)  # fmt: skip
def test_long_tiles_are_cut_into_blocks_in_turn(name: str, options: dict[str, Any], straight: bool) -> None:
    """Lengths about whole rounds of blocks, in the order that would show if a part were kept where another belongs."""
    schedule = compiled(name, 2, **options, instances=3)
    node = Node(schedule, straight, stride=8 * BLOCK)
    chunks = 2 if name == "two_shot" else 1
    for number, (blocks, extra) in enumerate(((3.0, 0), (7.5, 3), (2.2, 1), (9.0, 0))):
        length = chunks * (int(blocks * BLOCK) // 2 + extra)
        node.call(make_case(schedule, length, 2, number), torch.bfloat16, shift=number % 2 * 2)


@pytest.mark.parametrize("straight", [True, False])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("target", ["direct", "staged"])
@pytest.mark.parametrize("name", LIBRARY)
def test_library(name: str, target: str, in_place: bool, straight: bool) -> None:
    """All programs. Long: run at night."""
    if in_place and (LIBRARY[name].contract(4).in_place is None or name in OUT_OF_PLACE_ONLY):
        pytest.skip("no form in place")
    workers = 1 if straight else 2  # few are straight with more
    schedule = compiled(name, 4, target=target, in_place=in_place, workers=workers, instances=2)
    if straight and straighten(schedule) is None:
        pytest.skip("not straight")
    node = Node(schedule, straight)
    for number, length in enumerate((1, 1300, 40)):
        node.call(make_case(schedule, length, 4, number), torch.float32)


@pytest.mark.parametrize(
    ("dtype", "operation"), [(torch.bfloat16, "sum"), (torch.float32, "max"), (torch.int32, "min"), (torch.int8, "sum")]
)
def test_packets(dtype: torch.dtype, operation: str) -> None:
    schedule = compiled("one_shot", 3, target="staged", packets=True, instances=2)
    node = Node(schedule)
    for number, length in enumerate((1, 1500, 3)):  # parts without elements, several iterations
        node.call(
            make_case(schedule, length, dtype.itemsize, number, operation), dtype, operation, shift=2 * number % 4
        )


def test_packets_carry_copies_of_any_size() -> None:
    schedule = compiled("all_gather_direct", 3, target="staged", packets=True)
    node = Node(schedule)
    for dtype in (torch.float64, torch.int16, torch.int8):
        node.call(make_case(schedule, 99, dtype.itemsize, 3), dtype)


@pytest.mark.parametrize("shift", [0, 2, 8, 16])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 2 * LANES * 8 * 8 + 13])
def test_buffers_of_any_alignment(length: int, shift: int) -> None:
    schedule = compiled("two_shot", 2, target="direct")
    node = Node(schedule)
    node.call(make_case(schedule, length, 2, length), torch.bfloat16, shift=shift)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.uint8])
def test_more_operands_than_are_unrolled(dtype: torch.dtype) -> None:
    @program(custom("spread", [11], [21], {(0, out): [(0, one) for one in range(11)] for out in range(21)}))
    def spread(c: Trace) -> None:
        me = c.rank(0)
        total = me.input[0].copy(me.output[0])
        for one in range(1, 11):
            total.reduce(me.input[one])
        for out in range(1, 21):
            total.copy(me.output[out])

    schedule = spread.compile(1, target="direct")
    assert kernel_variant(schedule, straighten(schedule), dtype, "sum", 2)["MANY"]
    case = make_case(schedule, 203, dtype.itemsize, 0)
    if dtype == torch.uint8:
        case = Case(case.spans, [abs(case.inputs[0])], [], case.said, [0], [0])
        parts = case.inputs[0].reshape(11, -1).sum(0)
        case = Case(case.spans, case.inputs, [np.tile(parts, 21)], case.said, [0], [0])
    Node(schedule).call(case, dtype)


def test_sums_of_16_bits_are_rounded_once() -> None:
    schedule = compiled("reduce_direct", 3, target="direct")
    inputs = [np.array([256]), np.array([1]), np.array([1])]  # bf16 has no 257
    case = Case([1], inputs, [np.array([258])] * 3, [np.array([rank == 0]) for rank in range(3)], [0] * 3, [0] * 3)
    Node(schedule).call(case, torch.bfloat16)


def test_parcels_and_tiles_of_kernels() -> None:
    """Parcels that are ready; every tile is told once by each CTA, in the last iteration."""
    schedule = compiled("all_gather_ring", 2, target="staged", instances=2, ready=True, needed=True)
    node = Node(schedule)
    for one in node.parcels:
        one.view(np.int32)[::32] = 3
    case = make_case(schedule, 1500, 4, 0)
    node.call(case, torch.float32, ready=3)
    told = [one.view(np.int32)[::32] for one in node.tiles]
    assert all((one[: schedule.contract.outputs[0]] == 2).all() for one in told), told


@pytest.mark.parametrize("name", ["ring", "reduce_scatter_halving"])
def test_programs_tied_to_a_matmul(name: str) -> None:
    """As `matmul_all_reduce(..., program=)` runs them: one launch, chunks of the lengths that parcels have."""
    program = LIBRARY[name]
    schedule = tie(program, program.collective, Topology.flat(2), 2).schedule()
    node = Node(schedule)
    for one in node.parcels:
        one.view(np.int32)[::32] = 1
    node.call(make_case(schedule, 100, 2, 1), torch.bfloat16, ready=1)


def test_counters_wrap() -> None:
    """Semaphores count modulo 2^32, epochs do not."""
    schedule = compiled("two_shot", 2, target="direct")
    node = Node(schedule)
    past = (1 << 32) - 1
    for rank in range(2):
        node.epochs[rank].fill_(past)
        posts = schedule.semaphore_posts[schedule.worker_rank[schedule.semaphore_waiter] == rank]
        node.semaphores[rank].view(np.int32)[::32] = [int(one) * past - (int(one) * past + 2**31) // 2**32 * 2**32
                                                      for one in posts]  # fmt: skip
    for number in range(3):
        node.call(make_case(schedule, 100, 4, number), torch.float32)
    assert node.epochs[0].tolist() == [past + 3, past + 3]


@pytest.mark.parametrize(("name", "options"), [("ring", STAGED), ("two_shot", {"packets": True})])
def test_the_program_that_loads_a_kernel_does_nothing(name: str, options: dict[str, Any]) -> None:
    variant = kernel_variant(compiled(name, 4, **options), None, torch.float32, "sum", 2)
    code, table = torch.from_numpy(idle_code(4)), torch.zeros(16, dtype=torch.int64)
    epochs, none = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    interpret.interpret_kernel[(1,)](
        code, table, table, epochs, table, 0, 0, 0, 1, len(code), none, none, 0, 0, 0, 0, **variant
    )  # fmt: skip
    assert epochs.tolist() == [1, 1]


@pytest.mark.parametrize(("name", "options"), [("two_shot", DIRECT), ("one_shot", {"packets": True})])
def test_a_row_of_zeros_does_nothing(name: str, options: dict[str, Any]) -> None:
    schedule = compiled(name, 2, **options)
    shape = straighten(schedule)
    assert shape is not None
    epochs, none = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    straight.straight_kernel[(1,)](
        torch.zeros(shape.width, dtype=torch.int64), epochs, torch.zeros(1, dtype=torch.int64), 0, 0, 0, 0, 0, 1, 0, 0,
        1, 1, none, none, 0,
        **kernel_variant(schedule, shape, torch.float32, "sum", 2),
    )  # fmt: skip
    assert epochs.tolist() == [0, 1]


# -- calls that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("straight_line", [True, False])
@pytest.mark.parametrize(("name", "options"), [("two_shot", DIRECT), ("one_shot", {**STAGED, "packets": True})])
def test_a_rank_that_failed_poisons_every_later_call(
    name: str, options: dict[str, Any], straight_line: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when all that it waits for is there by then: a graph that is replayed must not add up what came too late."""
    schedule = compiled(name, 2, **options)
    node = Node(schedule, straight_line)
    shape = straighten(schedule) if straight_line else None
    assert (shape is not None) == straight_line
    status = [2]  # LATE
    monkeypatch.setattr(poison_kernels, "globaltimer", lambda: tl.zeros((), tl.int64))
    for kernel in (interpret, straight):
        monkeypatch.setattr(kernel, "report_error", lambda pointer, code: None)
        monkeypatch.setattr(kernel, "poll", lambda pointers, targets, *_: tl.zeros(targets.shape, tl.int32) + status[0])

    def settle_by_status(pointers: Any, wanted: Any, flag: Any, watch: Any) -> Any:
        none = tl.zeros(wanted.shape, tl.int32)
        return (*[none] * len(pointers), tl.where(wanted != 0, status[0], none))

    monkeypatch.setattr(packets, "settle", settle_by_status)
    # One CTA a rank, which waits for nobody here: in this process, one after the other.
    monkeypatch.setattr(node, "_run", lambda kernel, cta, arguments, variant: kernel[(1,)](*arguments, **variant))
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "waitpid", lambda child, flags: (child, 0))
    sources, outs = ([torch.from_numpy(node.bytes(400)).view(torch.float32) for _ in range(2)] for _ in range(2))
    case = make_case(schedule, 100, 4, 0)
    for number in range(3):
        for out in outs:
            out.fill_(7)
        node._fork(case, torch.float32, "sum", sources, outs, 0)
        assert all(bool((out.view(torch.int32) == -1).all()) for out in outs), (number, outs[0][:4])
        status[0] = 0  # from now on everything is there
