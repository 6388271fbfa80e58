"""Less usual schedule files that other systems accept, and what must be refused of them, each in its own words."""

from __future__ import annotations

import json

from foreign_files import algorithm, block, gpu, plan, plan_gpu, step

from undertow.collective.checker import check
from undertow.collective.formats import msccl_import, msccl_read, mscclpp_import, mscclpp_read
from undertow.collective.language import INPUT, OUTPUT
from undertow.collective.schedule import Schedule


def from_xml(whole: str) -> list[Schedule]:
    found = msccl_import.schedules(msccl_read.parse(whole.encode(), "file.xml"), "file.xml")
    for one in found:
        check(one)
    return found


def from_plan(whole: dict[str, object]) -> Schedule:
    schedule = mscclpp_import.schedule_of(mscclpp_read.parse(json.dumps(whole).encode(), "file.json"), "file.json")
    check(schedule)
    return schedule


def meet(name: str) -> dict[str, object]:
    return {"name": name, "channel_ids": [0], "channel_type": "memory"}


def test_in_place_either_buffer_may_be_the_longer_one_rank_by_rank() -> None:
    send = gpu(0, block(0, step(0, "s", "i0", "o1"), step(1, "s", "i1", "o0"), send=1), i=2, o=1)
    take = gpu(1, block(0, step(0, "r", "i0", "o1"), step(1, "r", "i1", "o0"), recv=0), i=1, o=2)
    (schedule,) = from_xml(algorithm(send, take, coll="custom", inplace=1))
    assert schedule.contract.total_items.tolist() == [0, 1, 0]
    meetings = [meet("signal"), meet("wait")]
    planned = from_plan(
        plan(
            *(plan_gpu(r, [1 - r], [meetings], input_chunks=1 + r, output_chunks=2 - r) for r in (0, 1)),
            collective="sendrecv",
        )
    )
    for one in (schedule, planned):
        assert (one.first_atom[:, INPUT] == one.first_atom[:, OUTPUT]).all()
        assert one.first_atom[:, INPUT].tolist() == [0, 2]
        assert one.user_atoms == 4
