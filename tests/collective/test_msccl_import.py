"""How MSCCL's steps are understood: nops, flags, forms, roots, custom collectives, long chunks."""

from __future__ import annotations

import pytest
from contract_runs import run_exactly
from foreign_files import algorithm, block, exchange, gpu, step

from undertow.collective.algorithms import LIBRARY
from undertow.collective.checker import check
from undertow.collective.formats import XML, msccl_export, msccl_import, msccl_read, text
from undertow.collective.formats.msccl import Facts
from undertow.collective.schedule import Schedule
from undertow.errors import ProgramRefused

NOP = {"cnt": 0}


def schedules(whole: str, **options: object) -> list[Schedule]:
    return msccl_import.schedules(msccl_read.parse(whole.encode(), "file.xml"), "file.xml", **options)


def right(whole: str) -> Schedule:
    """Judged, run, written, read again, all alike."""
    made = schedules(whole)
    again = msccl_read.parse(text(made[0]).encode())
    for one, other in zip(made, msccl_import.schedules(again), strict=False):
        check(one)
        assert other.digest == one.digest
        run_exactly(one)
    return made[0]


def test_old_files_say_less() -> None:
    """msccl-tools writes neither outofplace nor sizes; older ones not even inplace."""
    old = msccl_read.parse(exchange().replace(' inplace="0"', "").encode())
    assert old.facts == Facts("LL", (False,))
    right(exchange())


def test_dialects_are_kept() -> None:
    said = exchange(outofplace=1, minBytes=64, maxBytes=1 << 40, nthreads=256, maxcount=3, nthreadblocks=2)
    read = msccl_read.parse(said.encode())
    assert read.facts.forms == (False,)
    assert (read.facts.min_bytes, read.facts.max_bytes, read.facts.threads) == (64, 1 << 40, 256)
    assert dict(read.facts.others) == {"maxcount": "3", "nthreadblocks": "2"}
    again = msccl_read.parse(text(schedules(said)[0], facts=read.facts).encode())
    assert again.facts == read.facts


def test_one_file_for_both_forms() -> None:
    both = schedules(exchange(inplace=1, outofplace=1))
    assert [one.in_place for one in both] == [False, True]
    for one in both:
        check(one)
        run_exactly(one)
    (alone,) = schedules(exchange(inplace=1, outofplace=0))
    assert text(alone).count('type="cpy"') == 2


def reduction(*first: str, **others: object) -> str:
    """Rank 1 sends two chunks to rank 0, which adds them in another threadblock, and gets the sums back."""
    receive = block(0, step(0, "r", "i0", "s0", cnt=2, hasdep=1), recv=1)
    add = block(1, *first)
    back = block(
        2, step(0, "nop", "i-1", "o-1", depid=1, deps=len(first) - 1, **NOP),
        step(1, "s", "i0", "i0", cnt=2, depid=1, deps=len(first) - 1), send=1,
    )  # fmt: skip
    one = gpu(0, receive, add, back, i=2, o=0, s=2)
    send, take = step(0, "s", "i0", "s0", cnt=2), step(1, "r", "i0", "i0", cnt=2)
    other = gpu(1, block(0, send, take, send=0, recv=0), i=2, o=0)
    return algorithm(one, other, coll="allreduce", chunks=2, inplace=1, **others)


def test_what_makes_no_difference_is_written_as_it_was() -> None:
    """An idle peer, a step of no chunks, a place that only informs."""
    said = (
        exchange()
        .replace('send="-1"', 'send="1"', 1)
        .replace('type="r" srcbuf="i" srcoff="0"', 'type="r" srcbuf="s" srcoff="9"')
    )
    said = said.replace('chan="0"', 'chan="5"', 1)
    idle = step(1, "cpy", "i0", "o1", cnt=0)
    said = said.replace("</tb>", idle + "</tb>", 1)
    read = msccl_read.parse(said.encode(), "file.xml")
    made = msccl_import.schedules(read, "file.xml")[0]
    check(made)
    again = msccl_export.algorithm_of(made, read.facts, read)
    assert [(one.send, one.channel) for one in again.gpus[0].threadblocks] == [(1, 5), (1, 0)]
    assert again.gpus[0].threadblocks[1].steps[1].source == ("s", 9)
    assert [one.type for one in again.gpus[0].threadblocks[0].steps] == ["cpy", "nop"]
    assert msccl_import.schedules(again)[0].digest == made.digest


def test_nops_carry_waits() -> None:
    schedule = right(
        reduction(
            step(0, "nop", "i-1", "o-1", depid=0, deps=0, **NOP),
            step(1, "re", "s0", "i0", depid=0, deps=0),
            step(2, "re", "s1", "i1", hasdep=1),
        )
    )
    assert len(schedule.instructions) == 6  # the nops are gone


def test_a_nop_that_is_waited_for_stays() -> None:
    steps = (
        step(0, "re", "s0", "i0", cnt=2, depid=0, deps=0),
        step(1, "nop", "i-1", "o-1", hasdep=1, **NOP),
    )
    assert len(right(reduction(*steps)).instructions) == 6


def test_a_step_that_is_not_published_is_waited_for_with_the_next_one() -> None:
    right(reduction(step(0, "re", "s0", "i0", cnt=2, depid=0, deps=0), step(1, "cpy", "s0", "s1", hasdep=1)))


def test_a_missing_wait_is_a_race() -> None:
    with pytest.raises(ProgramRefused, match=r"file.xml:1: scratch\[0\] of rank 0 is read (while|before)"):
        check(schedules(reduction(step(0, "re", "s0", "i0", cnt=2, hasdep=1)))[0])


def test_scratch_is_used_again_only_after_it_was_read() -> None:
    """Ours holds a tile of each chunk: a file says nothing of that, and long calls must be right all the same."""
    (schedule,) = schedules(reduction(step(0, "re", "s0", "i0", cnt=2, depid=0, deps=0, hasdep=1)))
    check(schedule)
    run_exactly(schedule, runs=6, tiles=(1, 7))


def test_long_chunks_fill_the_queues() -> None:
    """Two messages of two chunks each way fit into Simple's queues; four of one do not."""
    gpus = []
    for rank in (0, 1):
        steps = [step(at, "s", f"i{2 * at}", "o0", cnt=2) for at in range(2)]
        steps += [step(2 + at, "r", "i0", f"o{4 * (1 - rank) + 2 * at}", cnt=2) for at in range(2)]
        local = block(0, step(0, "cpy", "i0", f"o{4 * rank}", cnt=4))
        gpus.append(gpu(rank, local, block(1, *steps, send=1 - rank, recv=1 - rank), i=4, o=8))
    whole = algorithm(*gpus, chunks=8, proto="Simple")
    right(whole)
    with pytest.raises(ProgramRefused, match="wait for each other"):
        check(schedules(whole, split=True)[0])
    check(schedules(whole, split=True, slots=4)[0])


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("name", ["broadcast_tree", "reduce_direct"])
def test_the_root_is_found(name: str, root: int) -> None:
    written = text(LIBRARY[name].compile(4, root=root))
    (again,) = schedules(written)
    check(again)
    assert (again.contract.after == LIBRARY[name].contract(4, root).after).all()
    run_exactly(again)


def test_a_custom_collective_means_what_it_computes() -> None:
    send = block(0, step(0, "s", "i0", "o1"), step(1, "s", "i0", "o0"), send=1)
    take = block(0, step(0, "rrc", "i0", "o1"), step(1, "r", "i0", "o0"), recv=0)
    schedule = right(algorithm(gpu(0, send), gpu(1, take), coll="custom", chunks=2))
    contract = schedule.contract
    assert contract.after.tolist() == [-1, -1, 0, 1]
    assert contract.total_items.tolist() == [0, 0, 1]


def test_an_input_used_as_scratch_is_accepted_and_told() -> None:
    copy = block(1, step(0, "nop", "i-1", "o-1", depid=0, deps=0, **NOP), step(1, "cpy", "i0", "o0", depid=0, deps=0))
    take = block(0, step(0, "rrc", "i0", "i0", hasdep=1), recv=1)
    one = gpu(0, take, copy, i=1, o=1)
    other = gpu(1, block(0, step(0, "s", "i0", "i0"), send=0), i=1, o=1)
    schedule = right(algorithm(one, other, coll="reduce", chunks=1))
    assert not schedule.keeps_input


def test_messages_that_overtake_get_a_channel_of_their_own() -> None:
    """Rank 1 must take the second message first: MSCCL's queues cannot, so the second has a channel."""
    from undertow.collective.contract import custom
    from undertow.collective.language import Trace, program

    @program(custom("overtaking", [2, 1], [0, 2], {(1, 0): [(0, 0), (0, 1), (1, 0)], (1, 1): [(0, 1)]}))
    def overtaking(c: Trace) -> None:
        first = c.rank(0).input[0].copy(c.rank(1).scratch()[0])
        second = c.rank(0).input[1].copy(c.rank(1).output[1])
        c.rank(1).input[0].copy(c.rank(1).output[0]).reduce(second).reduce(first)

    for workers in (1, 2):
        made = msccl_export.algorithm_of(overtaking.compile(workers=workers))
        for one in msccl_import.schedules(made):
            check(one)
            run_exactly(one)


def test_saving(tmp_path) -> None:
    LIBRARY["ring"].compile(4).save(tmp_path / "ring.xml")
    LIBRARY["ring"].compile(4, target="direct").save(tmp_path / "ring.json")
    for path in tmp_path.iterdir():
        from undertow.collective.formats import read

        for one in read(path).schedules:
            check(one)
    assert (tmp_path / f"ring{XML}").read_text().startswith("<algo ")
