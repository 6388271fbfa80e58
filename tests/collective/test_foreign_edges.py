"""Less usual schedule files that other systems accept, and what must be refused of them, each in its own words."""

from __future__ import annotations

import json
import time

import pytest
from foreign_files import algorithm, block, exchange, gpu, plan, plan_gpu, step

from undertow.collective.algorithms import LIBRARY
from undertow.collective.checker import check
from undertow.collective.formats import (
    JSON,
    XML,
    Imported,
    lanes,
    msccl_import,
    msccl_read,
    mscclpp_import,
    mscclpp_read,
    text,
)
from undertow.collective.formats.msccl import Facts
from undertow.collective.language import INPUT, OUTPUT
from undertow.collective.msccl import Buffer as Slots
from undertow.collective.msccl import MSCCLProgram, ReduceScatter, chunk, fully_connected
from undertow.collective.schedule import Schedule
from undertow.errors import NotExpressible, ProgramRefused, UnreadableFile


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


def many_messages(protocol: str, count: int = 4) -> str:
    """All sends before all receives in one threadblock: right if a queue holds them all."""

    def rank(one: int) -> str:
        local = block(0, step(0, "cpy", "i0", f"o{one * count}", cnt=count))
        sends = [step(at, "s", f"i{at}", f"o{one * count + at}") for at in range(count)]
        takes = [step(count + at, "r", f"i{at}", f"o{(1 - one) * count + at}") for at in range(count)]
        return gpu(one, local, block(1, *sends, *takes, send=1 - one, recv=1 - one), i=count, o=2 * count)

    return algorithm(rank(0), rank(1), chunks=2 * count, proto=protocol)


@pytest.mark.parametrize("known", [True, False])
def test_another_protocol_is_checked_before_it_is_written(known: bool) -> None:
    read = msccl_read.parse(many_messages("LL").encode())
    (schedule,) = from_xml(many_messages("LL"))
    like = Imported("file.xml", (schedule,), read) if known else None
    with pytest.raises(NotExpressible, match="with Simple's queues, ranks 0, 1 wait for each other"):
        text(schedule, XML, like, Facts("Simple"))
    assert 'proto="LL128"' in text(schedule, XML, like, Facts("LL128"))


def test_a_plan_can_be_written_without_the_file_it_came_from() -> None:
    def pull(rank: int) -> list[dict[str, object]]:
        mine, theirs = {"type": "i", "index": rank, "size": 1}, {"buffer_id": 0, "index": rank, "size": 1}
        put = {"name": "put", "src_buff": [mine], "dst_buff": [theirs], "channel_type": "memory"}
        both = {"name": "rre", "src_buff": [mine, theirs], "dst_buff": [mine], "channel_type": "memory"}
        return [meet("signal"), meet("wait"), both, {"name": "nop"}, put, {"name": "nop"}, meet("signal"), meet("wait")]

    schedule = from_plan(plan(*(plan_gpu(rank, [1 - rank], [pull(rank)]) for rank in (0, 1))))
    again = mscclpp_import.schedule_of(mscclpp_read.parse(text(schedule, JSON).encode()))
    check(again)
    assert again.contract.name == "all_reduce"


def test_a_chunk_added_to_itself_stays_so_in_a_plan() -> None:
    mine = {"type": "i", "index": 0, "size": 1}
    twice = {"name": "re", "src_buff": [mine, mine], "dst_buff": [{"type": "o", "index": 0, "size": 1}]}
    schedule = from_plan(plan(plan_gpu(0, [], [[twice]]), collective="custom", inplace=False))
    again = from_plan(json.loads(text(schedule, JSON)))
    assert again.contract.total_items.tolist() == schedule.contract.total_items.tolist() == [0, 0]


def scattered(collective: str) -> str:
    def rank(one: int) -> str:
        steps = (step(0, "s", f"i{1 - one}", "o0"), step(1, "rrc", f"i{one}", "o0"))
        return gpu(one, block(0, *steps, send=1 - one, recv=1 - one), i=2, o=1)

    return algorithm(rank(0), rank(1), coll=collective)


def test_reduce_scatter_in_either_spelling() -> None:
    for name in ("reduce_scatter", "reducescatter"):
        (schedule,) = from_xml(scattered(name))
        assert schedule.contract.name == "reduce_scatter"
        like = Imported("file.xml", (schedule,), msccl_read.parse(scattered(name).encode()))
        assert f'coll="{name}"' in text(schedule, XML, like)
        assert 'coll="reducescatter"' in text(schedule)


def test_what_executors_insist_on_is_always_written() -> None:
    prog = MSCCLProgram("scatter", fully_connected(2), ReduceScatter(2, 1, True), 1)
    with prog:
        for rank in (0, 1):
            chunk(rank, Slots.input, rank).reduce(chunk(1 - rank, Slots.input, rank))
    for said in (prog.xml(), text(LIBRARY["reduce_scatter_direct"].compile(2), facts=Facts("LL"))):
        assert 'coll="reducescatter"' in said
        assert 'minBytes="0" maxBytes="134217728"' in said


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("name", ["broadcast_tree", "reduce_tree"])
def test_the_root_of_a_plan_is_found(name: str, root: int) -> None:
    written = text(LIBRARY[name].compile(4, target="direct", root=root), JSON)
    again = from_plan(json.loads(written))
    assert (again.contract.after == LIBRARY[name].contract(4, root).after).all()


def test_a_wrong_file_with_a_root_is_refused_soon() -> None:
    """Nobody is tried as its root one by one: there are 512 to try."""
    sends = [block(at, step(0, "s", "i0", "o0"), send=at + 1) for at in range(20)]
    takes = [gpu(at, block(0, step(0, "r", "i0", "o0"), recv=0), i=4, o=4) for at in range(1, 21)]
    others = [gpu(at, i=4, o=4) for at in range(21, 512)]
    read = msccl_read.parse(algorithm(gpu(0, *sends, i=4, o=4), *takes, *others, coll="broadcast", chunks=4).encode())
    began = time.process_time()
    (schedule,) = msccl_import.schedules(read)
    assert time.process_time() - began < 5
    with pytest.raises(ProgramRefused, match="does not hold what it must"):
        check(schedule)


def test_much_scratch_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    zeros = lanes.np.zeros

    def counted(shape: object, *others: object) -> object:
        made = zeros(shape, *others)
        asked.append(made.nbytes)
        return made

    monkeypatch.setattr(lanes.np, "zeros", counted)
    width = 4000
    blocks = [block(at, step(0, "cpy", "i0", f"s{at * width}", cnt=width)) for at in range(64)]
    one = gpu(0, *blocks, i=width, o=width, s=64 * width)
    read = msccl_read.parse(algorithm(one, coll="custom", chunks=width).encode())
    msccl_import.schedules(read)
    assert max(asked) < 16 << 20


def test_places_that_only_inform_may_be_left_open() -> None:
    said = exchange(maxBytes=(1 << 64) - 1).replace('type="r" srcbuf="i" srcoff="0"', 'type="r" srcbuf="i" srcoff="-1"')
    assert 'srcoff="-1"' in said
    from_xml(said)
    assert msccl_read.parse(said.encode()).facts.max_bytes == (1 << 64) - 1


@pytest.mark.parametrize("known", [True, False])
def test_empty_threadblocks_are_written(known: bool) -> None:
    idle = '<tb id="2" send="1" recv="-1" chan="3"></tb></gpu>'
    said = exchange().replace("</gpu>", idle, 1)
    read = msccl_read.parse(said.encode())
    (schedule,) = from_xml(said)
    again = msccl_read.parse(text(schedule, XML, Imported("file.xml", (schedule,), read) if known else None).encode())
    assert [len(one.threadblocks) for one in again.gpus] == [3, 2]
    assert msccl_import.schedules(again)[0].digest == schedule.digest
    if known:
        assert (again.gpus[0].threadblocks[2].send, again.gpus[0].threadblocks[2].channel) == (1, 3)


def test_all_pairs_of_64_ranks_have_room() -> None:
    """Everybody sends to and receives from 63 others, each in a threadblock of its own, and copies in one more."""

    def file(ranks: int) -> str:
        blocks = [block(at) for at in range(2 * (ranks - 1) + 1)]
        return algorithm(*(gpu(rank, *blocks, i=1, o=1) for rank in range(ranks)), coll="custom", chunks=1)

    (schedule,) = msccl_import.schedules(msccl_read.parse(file(64).encode()))
    assert len(schedule.worker_rank) == 64 * 127
    with pytest.raises(UnreadableFile, match="it has 8385 threadblocks in all, more than 8192"):
        msccl_import.schedules(msccl_read.parse(file(65).encode()))


def test_what_we_could_not_read_again_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msccl_import, "MOST_LANES", 3)
    with pytest.raises(NotExpressible, match="it has 12 threadblocks in all, more than 3"):
        text(LIBRARY["ring"].compile(4))
