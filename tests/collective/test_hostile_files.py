"""Damaged and hostile files: one clear sentence, never a crash, a hang, or memory without bound."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest
from foreign_files import algorithm as made_algorithm
from foreign_files import block, damaged, exchange, gpu, plan, plan_gpu, seeds, step

from undertow.collective.checker import check
from undertow.collective.formats import JSON, XML, msccl_import, msccl_read, mscclpp_import, mscclpp_read, read
from undertow.errors import ProgramRefused, UndertowError, UnreadableFile

SEEDS = seeds()
LONGEST_SECONDS = 20.0


def judge(data: bytes, suffix: str) -> str:
    """What is said of a file: 'right', or the complaint."""
    try:
        if suffix == XML:
            schedules = msccl_import.schedules(msccl_read.parse(data, "file"), "file")
        else:
            schedules = [mscclpp_import.schedule_of(mscclpp_read.parse(data, "file"), "file")]
        for one in schedules:
            check(one)
    except UndertowError as error:
        return str(error)
    return "right"


def fuzz(numbers: range) -> dict[str, int]:
    said: dict[str, int] = {}
    for number in numbers:
        suffix, data = SEEDS[number % len(SEEDS)]
        began = time.monotonic()
        verdict = judge(damaged(data, suffix, number), suffix)
        assert time.monotonic() - began < LONGEST_SECONDS, f"file {number} takes too long"
        lines = verdict.splitlines()
        assert len(lines) <= 6, f"file {number}: {verdict}"
        assert all(len(one) < 1000 for one in lines), f"file {number}: {verdict}"
        kind = "right" if verdict == "right" else "unreadable" if "cannot be read" in verdict else "refused"
        said[kind] = said.get(kind, 0) + 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1 << 20, "more than 1 GB"
    return said


def test_some_damaged_files() -> None:
    said = fuzz(range(400))
    assert said["unreadable"] > 100
    assert said["refused"] > 5


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_very_many_damaged_files(part: int) -> None:
    said = fuzz(range(1000 + part * 10_000, 1000 + (part + 1) * 10_000))
    assert said["unreadable"] > 1000


def complaint(text: str) -> str:
    with pytest.raises(UnreadableFile) as caught:
        msccl_import.schedules(msccl_read.parse(text.encode(), "file"), "file")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "this is no XML: no element found"),
        ("<algo", "this is no XML: unclosed token"),
        ("<a/>", "'a' stands outermost, where only algo can"),
        ("<msccl_algos><load/></msccl_algos>", "it lists schedules instead of being one"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><algo/>', "a document type has no place here"),
        ("<algo>words</algo>", "text ('words') has no place here"),
        ("<algo/>", "there is no gpu in it"),
        ("<algo>" + "<gpu>" * 9 + "</gpu>" * 9 + "</algo>", "'gpu' stands inside gpu, where only tb can"),
        (exchange(ngpus=3), "ngpus is 3, but there are 2 of them"),
        (exchange(ngpus="0x2"), "ngpus is '0x2', but must be a whole number from 1 to 1024"),
        (exchange(coll="gossip"), "coll is 'gossip', but must be one of allreduce, allgather"),
        (exchange(proto="LL256"), "proto is 'LL256', but must be one of Simple, LL, LL128"),
        (exchange(minBytes="-3"), "minBytes is '-3', but must be a number of bytes"),
        (exchange(nchunksperloop=3), "nchunksperloop is 3, but must be a multiple of the 2 ranks"),
        (exchange(nchunksperloop=999999998), "chunks in all, more than"),
        (exchange(nchunksperloop=4), "i_chunks of gpu 0 is 1, but must be 2 or 0 for allgather"),
        (exchange().replace('id="1" send', 'id="0" send'), "tb 0 stands here twice"),
        (exchange().replace('id="1" send', 'id="4" send'), "tb 1 is missing among 2"),
        (exchange().replace('type="cpy"', 'type="ra"'), "step type 'ra' is known to MSCCL's reader"),
        (exchange().replace('type="cpy"', 'type="s"'), "a step of type s sends, but send of its tb is -1"),
        (exchange().replace('send="1"', 'send="7"'), "is connected to gpu 7, but must be to another of the 2"),
        (exchange().replace('dstoff="1"', 'dstoff="2"'), "chunk 2 of buffer o is used on gpu"),
        (exchange().replace('depid="-1"', 'depid="0"', 1), "depid is 0 and deps is -1, but both or none must be -1"),
        (exchange().replace('cnt="1"', 'cnt="99999999999"', 1), "cnt is '99999999999', but must be a whole number"),
    ],
)
def test_one_sentence_about_a_damaged_file(text: str, said: str) -> None:
    assert said in complaint(text)


def test_what_would_take_too_long_is_refused_at_once() -> None:
    many = [block(number, step(0, "cpy", "i0", "o0")) for number in range(257)]
    assert "gpu 0 has 257 threadblocks, more than 256" in complaint(made_algorithm(gpu(0, *many), gpu(1)))
    wide = [step(at, "cpy", "s0", "s100000", cnt=100_000) for at in range(20)]
    assert "move 2000000 chunks in all, more than" in complaint(
        made_algorithm(gpu(0, block(0, *wide), s=200_000), gpu(1))
    )
    assert "more than 1048576" in complaint(made_algorithm(gpu(0, s=2_000_000), gpu(1)))
    meeting = [[{"name": "barrier", "barrier_id": at, "num_threadblocks": 200} for at in range(40)]] * 200
    whole = json.dumps(plan(plan_gpu(0, [1], meeting), plan_gpu(1, [0], [[]]))).encode()
    assert "its barriers make more than" in judge(whole, JSON)
    many = json.dumps(plan(plan_gpu(0, [1], [[]] * 300), plan_gpu(1, [0], [[]]))).encode()
    assert "more than 256 threadblocks on a gpu" in judge(many, JSON)


def test_lines_are_named() -> None:
    lines = exchange().replace("<tb", "\n<tb").replace('type="cpy"', 'type="cyp"', 1)
    assert complaint(lines).startswith("file cannot be read: line 2: type is 'cyp'")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (('hasdep="0"', 'hasdep="0"'), ""),
        (('type="r"', 'type="nop"'),
         "1 messages are sent from gpu 1 to gpu 0 on channel 0, but 0 are received"),
        (('dstbuf="o" dstoff="1" cnt="1"', 'dstbuf="o" dstoff="0" cnt="2"'), "received as one of 2"),
        (('depid="-1" deps="-1"', 'depid="1" deps="0"'), "which nobody is told of: hasdep is 0 there and later"),
    ],
)  # fmt: skip
def test_readable_but_wrong(changed: tuple[str, str], said: str) -> None:
    verdict = judge(exchange().replace(*changed, 1).encode(), XML)
    assert said in verdict if said else verdict == "right"


def test_a_file_that_is_not_there_or_too_long(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="no such file"):
        read(tmp_path / "none.xml")
    with (tmp_path / "long.xml").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(UnreadableFile, match="longer than 64 MiB"):
        read(tmp_path / "long.xml")


def test_the_queues_of_the_protocol_decide_about_deadlocks() -> None:
    """Two ranks send each other three messages before they receive any: Simple's queues hold two."""

    def flood(proto: str) -> str:
        gpus = []
        for rank in (0, 1):
            sends = [step(at, "s", f"i{at}", f"o{at}") for at in range(3)]
            receives = [step(3 + at, "r", f"i{at}", f"o{3 * (1 - rank) + at}") for at in range(3)]
            copy = block(0, step(0, "cpy", "i0", f"o{3 * rank}", cnt=3))
            gpus.append(gpu(rank, copy, block(1, *sends, *receives, send=1 - rank, recv=1 - rank), i=3, o=6))
        return made_algorithm(*gpus, proto=proto, chunks=6)

    assert judge(flood("LL").encode(), XML) == "right"
    assert "wait for each other" in judge(flood("Simple").encode(), XML)


def test_two_threadblocks_on_one_connection_are_refused() -> None:
    extra = block(2, step(0, "s", "i0", "o0"), send=1)
    algorithm = msccl_read.parse(exchange().replace("</gpu>", extra + "</gpu>", 1).encode())
    with pytest.raises(ProgramRefused, match="two tbs of gpu 0 send to gpu 1 on channel 0"):
        msccl_import.schedules(algorithm)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "this is no JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b"\xff", "not text in UTF-8"),
        (b"NaN", "NaN is no number"),
        (b"[" + b"[]," * (1 << 20) + b"[]]", "lists and objects"),
        (json.dumps([1]).encode(), "the file is [1], but must be an object"),
        (json.dumps({"format": "undertow schedules"}).encode(), "a listing of Undertow's own"),
        (json.dumps({"gpus": [{"inputChunks": 1}]}).encode(), "MSCCL++'s first format"),
    ],
)
def test_one_sentence_about_a_damaged_plan(content: bytes, said: str) -> None:
    assert said in judge(content, JSON)


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        ({"name": "glre"}, "the operation glre, which needs multicast hardware"),
        ({"name": "gstore"}, "the operation gstore, which needs multicast hardware"),
        ({"name": "dance"}, "the operation 'dance', which is not known"),
        ({"name": "re", "reduce_op": "min"}, "reduces by 'min', but only sum can be meant"),
        ({"name": "wait", "channel_type": "memory", "channel_ids": [5]}, "uses its memory channel 5, but there are 1"),
        ({"name": "sem_acquire", "semaphore_ids": [0]}, "uses semaphore 0, but there are 0"),
        ({"name": "copy", "src_buff": [{"type": "q", "index": 0, "size": 1}]}, "the type 'q', but must have i, o or s"),
        ({"name": "copy", "src_buff": [{"type": "i", "index": 2, "size": 1}],
          "dst_buff": [{"type": "o", "index": 0, "size": 1}]}, "uses chunk 2 of buffer i of gpu 0, which has 2"),
        ({"name": "copy", "tbg_info": {"tb_id": 3, "tbg_size": 2}}, "part 3 of 2, which cannot be"),
    ],
)  # fmt: skip
def test_one_sentence_about_an_operation(operation: dict[str, object], said: str) -> None:
    whole = plan(plan_gpu(0, [1], [[operation]]), plan_gpu(1, [0], [[]]))
    assert said in judge(json.dumps(whole).encode(), JSON)
