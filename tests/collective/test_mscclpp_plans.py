"""MSCCL++ plans of every kind of operation: judged, run with exact results, written and read again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from contract_runs import run_exactly
from foreign_files import plan, plan_gpu

from undertow.collective.checker import check
from undertow.collective.formats import mscclpp_import, mscclpp_read, mscclpp_write
from undertow.collective.schedule import Schedule
from undertow.errors import NotExpressible, ProgramRefused

INPUT, OUTPUT, SCRATCH = 0, 1, 2  # buffer ids of the one peer, in the order of `plan_gpu`
Operations = list[dict[str, Any]]


def local(kind: str, index: int, size: int = 1) -> dict[str, Any]:
    return {"type": kind, "index": index, "size": size}


def remote(buffer: int, index: int, size: int = 1) -> dict[str, Any]:
    return {"buffer_id": buffer, "index": index, "size": size}


def op(
    name: str, sources: Operations | None = None, destinations: Operations | None = None, **others: Any
) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, **others}
    if sources:
        made["src_buff"] = list(sources)
    if destinations:
        made["dst_buff"] = list(destinations)
    if name not in ("copy", "nop", "re", "upkt", "cpkt", "repkt", "barrier", "sem_acquire", "sem_release", "pipeline"):
        made["channel_type"] = "memory"
    return made


def meet(name: str, *channels: int) -> dict[str, Any]:
    return op(name, channel_ids=list(channels))


def schedule_of(whole: dict[str, Any]) -> Schedule:
    """Read, and read again what is written: both must be the same."""
    read = mscclpp_read.parse(json.dumps(whole).encode(), "plan.json")
    again = mscclpp_read.parse(mscclpp_write.text_of(read).encode(), "again.json")
    assert again == read
    return mscclpp_import.schedule_of(read, "plan.json")


def judged(whole: dict[str, Any]) -> None:
    schedule = schedule_of(whole)
    check(schedule)
    run_exactly(schedule, runs=3)


def packets(share: tuple[int, int] | None = None) -> list[list[dict[str, Any]]]:
    """All-reduce of two chunks, in place, over packets: each rank reduces one chunk and sends it back."""
    blocks = []
    for rank in (0, 1):
        other = 1 - rank
        grouped = {} if share is None else {"tbg_info": {"tb_id": share[0], "tbg_size": share[1]}}
        send = op("ppkt", [local("i", other)], [remote(SCRATCH, other)], **grouped)
        sources, total = [local("i", rank), local("s", rank)], local("i", rank)
        if rank == 0:
            reduce = op("respkt", sources, [total, remote(SCRATCH, 0)], **grouped)
        else:
            reduce = op("recspkt", sources, [total, local("s", 2), remote(SCRATCH, 1)], **grouped)
        blocks.append([send, reduce, op("upkt", [local("s", other)], [local("i", other)], **grouped)])
    return blocks


def test_packets_with_a_double_scratch() -> None:
    gpus = [plan_gpu(rank, [1 - rank], [block], scratch_chunks=3) for rank, block in enumerate(packets())]
    judged(plan(*gpus, use_double_scratch_buffer=True))


@pytest.mark.parametrize("double", [False, True])
def test_packets_that_nobody_answers_are_overwritten_by_a_later_launch(double: bool) -> None:
    send = [op("copy", [local("i", 0, 2)], [local("o", 0, 2)]), op("ppkt", [local("i", 0, 2)], [remote(SCRATCH, 0, 2)])]
    take = [op("upkt", [local("s", 0, 2)], [local("o", 0, 2)])]
    gpus = [plan_gpu(0, [1], [send]), plan_gpu(1, [0], [take])]
    whole = plan(*gpus, collective="broadcast", inplace=False, use_double_scratch_buffer=double)
    said = f"is overwritten while it may still be in use, in iteration {2 if double else 1}"
    with pytest.raises(ProgramRefused, match=said):
        check(schedule_of(whole))
    send[:0], take[:0] = [meet("wait", 0)], [meet("signal", 0)]
    judged(whole)


def test_packets_copied_here_and_passed_on_by_another_threadblock() -> None:
    """An all-gather in place: rank 1 makes its packets in its own scratch, from where they are sent."""
    sizes = {"input_chunks": 1}
    send = [op("ppkt", [local("o", 0)], [remote(SCRATCH, 0)])]
    take = [op("upkt", [local("s", 1)], [local("o", 1)])]
    pack = [op("cpkt", [local("i", 0)], [local("s", 1)])]
    passed = [op("rppkt", [local("s", 1)], [remote(SCRATCH, 1)])]
    other = [op("upkt", [local("s", 0)], [local("o", 0)])]
    gpus = [plan_gpu(0, [1], [send, take], **sizes), plan_gpu(1, [0], [pack, passed, other], **sizes)]
    judged(plan(*gpus, collective="allgather", use_double_scratch_buffer=True))


@pytest.mark.parametrize("size", [2, 3])
def test_groups_of_threadblocks_share_the_data(size: int) -> None:
    gpus = []
    for rank in (0, 1):
        blocks = [[one] for part in range(size) for one in packets((part, size))[rank]]
        gpus.append(plan_gpu(rank, [1 - rank], blocks, scratch_chunks=3))
    schedule = schedule_of(plan(*gpus, use_double_scratch_buffer=True))
    assert schedule.grain == size
    check(schedule)
    run_exactly(schedule, runs=3)


def simple(second: Operations, first: Operations | None = None) -> dict[str, Any]:
    """Two ranks meet, rank 0 does `first`, rank 1 `second`, and they meet again."""
    around = [meet("signal", 0), meet("wait", 0)]
    blocks = [[*around, *(first or []), *around], [*around, *second, *around]]
    return plan(*(plan_gpu(rank, [1 - rank], [block]) for rank, block in enumerate(blocks)))


def test_reading_and_writing_another_ranks_memory() -> None:
    first = [op("rres", [local("i", 0), remote(INPUT, 0)], [local("i", 0), remote(INPUT, 0)])]
    second = [
        op("get", [remote(INPUT, 1)], [local("s", 1)], channel_ids=[0]),
        op("res", [local("i", 1), local("s", 1)], [local("i", 1), remote(INPUT, 1)]),
    ]
    judged(simple(second, first))
    apart = simple([op("rre", [local("i", 0, 2), remote(INPUT, 0, 2)], [local("o", 0, 2)])],
                   [op("rre", [local("i", 0, 2), remote(INPUT, 0, 2)], [local("o", 0, 2)])])  # fmt: skip
    judged({**apart, "inplace": False})


def test_semaphores_barriers_and_pipelines() -> None:
    around = [meet("signal", 0), meet("wait", 0)]
    copied = op("copy", [local("i", 0, 2)], [local("s", 0, 2)])
    barrier = op("barrier", barrier_id=3, num_threadblocks=2)
    context = {"unit_size": 1 << 20, "num_chunks": 2}
    gpus = []
    for rank in (0, 1):
        reduced = op("rre", [local("i", 0), remote(SCRATCH, 0)], [local("o", 0)])
        other = op("rre", [local("i", 1), remote(SCRATCH, 1)], [local("o", 1)])
        blocks = [
            [copied, *around, op("sem_release", semaphore_ids=[0]), reduced, barrier, *around],
            [
                op("sem_acquire", semaphore_ids=[0]),
                op("pipeline", iter_context=context, ops=[other, op("nop")]),
                barrier,
            ],
        ]
        gpus.append(plan_gpu(rank, [1 - rank], blocks, semaphores=[{"init_value": 0}]))
    whole = plan(*gpus, inplace=False)
    judged(whole)
    without = json.loads(json.dumps(whole).replace('"sem_acquire"', '"nop"').replace('"sem_release"', '"nop"'))
    for gpu in without["gpus"]:
        for block in gpu["threadblocks"]:
            block["ops"] = [one for one in block["ops"] if not one.get("semaphore_ids")]
    with pytest.raises(ProgramRefused, match="is read"):
        check(schedule_of(without))


def test_ports_put_with_signal_and_flush() -> None:
    """An all-gather through a port: put, signal and flush in one operation."""
    gpus = []
    for rank in (0, 1):
        put = op("pwsf", [local("i", 0)], [remote(OUTPUT, rank)], channel_ids=[0])
        block = [meet("rlxsignal", 0), meet("rlxwait", 0), op("copy", [local("i", 0)], [local("o", rank)]), put]
        block += [op("flush", channel_ids=[0]), meet("wait", 0)]
        made = plan_gpu(rank, [1 - rank], [block], input_chunks=1, scratch_chunks=0)
        gpus.append(json.loads(json.dumps(made).replace('"memory"', '"port"')))
    judged(plan(*gpus, collective="allgather", inplace=False))


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        (simple([op("put", [local("i", 0)], [remote(INPUT, 0)])]), "does not hold what it must"),
        (plan(plan_gpu(0, [1], [[meet("wait", 0), meet("signal", 0)]]),
              plan_gpu(1, [0], [[meet("wait", 0), meet("signal", 0)]])), "wait for each other"),
        (plan(plan_gpu(0, [1], [[meet("signal", 0)]]), plan_gpu(1, [0], [[]])),
         "is signalled 1 times and waited for 0 times"),
        (plan(plan_gpu(0, [1], [[op("put", [local("i", 0)], [remote(INPUT, 0)])]]), plan_gpu(1, [0], [[]])),
         "although its rank may not have begun the call"),
        (plan(plan_gpu(0, [1], [[op("upkt", [local("s", 0)], [local("i", 0)])]]), plan_gpu(1, [0], [[]])),
         "packets are read that nobody writes"),
        (plan(plan_gpu(0, [1], [[op("barrier", barrier_id=0, num_threadblocks=2)]]), plan_gpu(1, [0], [[]])),
         "reached by 1 threadblocks, not as many as it is for"),
        (plan(plan_gpu(0, [1], [[meet("signal", 0)], [meet("signal", 0)]]),
              plan_gpu(1, [0], [[meet("wait", 0), meet("wait", 0)]])), "several threadblocks signal on"),
        (plan(plan_gpu(0, [1], [[op("sem_release", semaphore_ids=[0])]], semaphores=[{"init_value": 0}]),
              plan_gpu(1, [0], [[]])), "released 1 times and acquired 0 times"),
    ],
)  # fmt: skip
def test_plans_that_mscclpp_accepts_and_we_refuse(whole: dict[str, Any], said: str) -> None:
    with pytest.raises(ProgramRefused, match=said):
        check(schedule_of(whole))


def test_limits_of_the_executor() -> None:
    many = [op("copy", [local("i", 0)], [local("o", 0)])] * 65
    for gpu, said in (
        (plan_gpu(0, [1], [many]), "65 operations, and the executor at most 64"),
        (plan_gpu(0, [1] * 9, [[meet("signal", *range(9))]]), "uses 9 channels, and the executor at most 8"),
        (
            plan_gpu(0, [1], [[op("re", [local("i", 0)] * 11, [local("o", 0)])]]),
            "11 buffers, and the executor at most 10",
        ),
    ):
        read = mscclpp_read.parse(json.dumps(plan(gpu, plan_gpu(1, [0], [[]]))).encode())
        with pytest.raises(NotExpressible, match=said):
            mscclpp_write.text_of(read)
