"""Schedule files as other tools and people might write them: each is judged, run, written and read again alike, or is
refused by one sentence that says what is wrong with it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from contract_runs import STRIDE, compare, run_exactly
from foreign_files import algorithm, block, exchange, gpu, plan, plan_gpu, step
from in_process import Call, Machine, random_inputs

from undertow.collective.algorithms import LIBRARY
from undertow.collective.checker import check
from undertow.collective.formats import XML, Imported, msccl_import, msccl_read, mscclpp_import, mscclpp_read, text
from undertow.collective.formats.msccl import LEAST_BYTES, MOST_BYTES
from undertow.collective.schedule import Schedule
from undertow.errors import ProgramRefused, UndertowError, UnreadableFile


def alike(whole: str | bytes) -> list[Schedule]:
    """Judged, run, written, read again: the same."""
    data = whole if isinstance(whole, bytes) else whole.encode()
    source = msccl_read.parse(data, "file.xml")
    made = msccl_import.schedules(source, "file.xml")
    for one in made:
        check(one)
        run_exactly(one, runs=1)
    written = text(made[0], XML, Imported("file.xml", tuple(made), source))
    again = msccl_read.parse(written.encode(), "again.xml")
    facts = source.facts  # sizes are always written
    if facts.min_bytes is None:
        facts = replace(facts, min_bytes=LEAST_BYTES, max_bytes=MOST_BYTES)
    assert (again.facts, again.collective, again.chunks) == (facts, source.collective, source.chunks)
    assert [one.digest for one in msccl_import.schedules(again)] == [one.digest for one in made]
    return made


def refused(whole: str | bytes, sentence: str) -> None:
    data = whole if isinstance(whole, bytes) else whole.encode()
    with pytest.raises(UnreadableFile, match=re.escape(sentence)) as caught:
        msccl_import.schedules(msccl_read.parse(data, "file.xml"), "file.xml")
    assert "\n" not in str(caught.value)


# -- collectives with a root, and others that a name promises something of ---------------------------------------------


def gathering(root: int, ranks: int = 3, own: bool = True, said: bool = True, **others: object) -> str:
    """Two chunks of everybody to the root. `own`: with the root's own; `said`: idle outputs have a size, too."""
    gpus = []
    for rank in range(ranks):
        if rank == root:
            blocks = [block(0, step(0, "cpy", "i0", f"o{2 * rank}", cnt=2))] if own else []
            for peer in range(ranks):
                if peer != root:
                    blocks.append(block(len(blocks), step(0, "r", "i0", f"o{2 * peer}", cnt=2), recv=peer))
        else:
            blocks = [block(0, step(0, "s", "i0", f"o{2 * rank}", cnt=2), send=root)]
        gpus.append(gpu(rank, *blocks, i=2, o=2 * ranks if said or rank == root else 0))
    return algorithm(*gpus, chunks=2 * ranks, **{"coll": "gather", **others})


def scattering(root: int, ranks: int = 3, **others: object) -> str:
    gpus = []
    for rank in range(ranks):
        blocks = [block(0, step(0, "cpy", f"i{rank}", "o0"))]
        for peer in range(ranks):
            if peer != root:
                blocks.append(block(len(blocks), step(0, "s", f"i{peer}", "o0"), send=peer))
        take = block(0, step(0, "r", "i0", "o0"), recv=root)
        gpus.append(gpu(rank, *(blocks if rank == root else [take]), i=ranks if rank == root else 0, o=1))
    return algorithm(*gpus, coll="scatter", chunks=ranks, **others)


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("said", [True, False])
def test_gather(root: int, said: bool) -> None:
    (made,) = alike(gathering(root, said=said))
    assert made.contract.name == "gather"
    assert made.contract.outputs == tuple(6 if rank == root else 0 for rank in range(3))


@pytest.mark.parametrize("root", [0, 1])
def test_gather_and_scatter_in_place(root: int) -> None:
    """The root's own shard lies where it belongs: a copy of it would be a copy to itself, and nobody needs one."""
    for whole in (gathering(root, inplace=1, outofplace=1), gathering(root, own=False, inplace=1, outofplace=0)):
        made = alike(whole)[-1]
        assert made.in_place
        assert made.contract.in_place == tuple(2 * rank if rank == root else 0 for rank in range(3))
    both = alike(scattering(root, inplace=1, outofplace=1))
    assert [one.in_place for one in both] == [False, True]
    assert both[1].contract.in_place == tuple(rank if rank == root else 0 for rank in range(3))


@pytest.mark.parametrize("root", [0, 2])
def test_scatter(root: int) -> None:
    (made,) = alike(scattering(root))
    assert made.contract.inputs == tuple(3 if rank == root else 0 for rank in range(3))


def test_a_gather_without_one_rank_is_wrong() -> None:
    (made,) = msccl_import.schedules(msccl_read.parse(gathering(1, own=False).encode(), "file.xml"), "file.xml")
    assert made.contract.outputs == (0, 6, 0)
    with pytest.raises(ProgramRefused, match=r"output\[2\] of rank 1"):
        check(made)


def test_who_is_not_the_root_has_no_output() -> None:
    whole = gathering(1).replace('dstoff="4" cnt="2"', 'dstoff="4" cnt="2"', 1)
    extra = block(1, step(0, "cpy", "i0", "o0"))
    whole = whole.replace("</tb></gpu>", f"</tb>{extra}</gpu>", 1)
    refused(whole, "line 1: chunk 0 of buffer o is used on gpu 0, which has 0, as gather has its root on gpu 1")


@pytest.mark.parametrize("name", ["gather_direct", "scatter_direct"])
@pytest.mark.parametrize("root", [0, 3])
def test_ours_with_a_root_keep_their_name(name: str, root: int) -> None:
    schedule = LIBRARY[name].compile(4, root=root)
    written = text(schedule)
    assert f'coll="{schedule.contract.name}"' in written
    (again,) = alike(written)
    assert (again.contract.after == schedule.contract.after).all()
    assert (again.contract.inputs, again.contract.outputs) == (schedule.contract.inputs, schedule.contract.outputs)


def sending(*, back: bool = False, coll: str = "sendrecv") -> str:
    """Rank 0 to rank 2, by way of rank 1; and back again."""
    first = [block(0, step(0, "s", "i0", "o0"), send=1)]
    last = [block(0, step(0, "r", "i0", "o0"), recv=1)]
    if back:
        first.append(block(1, step(0, "r", "i0", "o0"), recv=2, chan=1))
        last.append(block(1, step(0, "s", "i0", "o0"), send=0, chan=1))
    pass_on = block(0, step(0, "rcs", "i0", "s0"), send=2, recv=0)
    return algorithm(
        gpu(0, *first, i=1, o=int(back)), gpu(1, pass_on, i=0, o=0, s=1), gpu(2, *last, i=int(back), o=1), coll=coll,
        chunks=1,
    )  # fmt: skip


def test_sendrecv_is_between_two() -> None:
    (made,) = alike(sending())
    assert made.contract.name == "send_recv"
    assert (made.contract.inputs, made.contract.outputs) == ((1, 0, 0), (0, 0, 1))
    refused(
        sending(back=True),
        "sendrecv is from one gpu to another, but gpu 2 gets something of gpu 0, and gpu 0 of gpu 2: custom would",
    )
    (both,) = alike(sending(back=True, coll="custom"))
    assert both.contract.name == "custom"


def test_all_to_next() -> None:
    gpus = []
    for rank in range(3):
        send = [block(0, step(0, "s", "i0", "o0", cnt=2), send=rank + 1)] if rank < 2 else []
        take = [block(len(send), step(0, "r", "i0", "o0", cnt=2), recv=rank - 1)] if rank else []
        gpus.append(gpu(rank, *send, *take, i=2, o=2))
    (made,) = alike(algorithm(*gpus, coll="alltonext", chunks=2))
    assert made.contract.name == "all_to_next"
    wrong = algorithm(gpus[0], gpus[1], gpu(2, i=2, o=2), coll="alltonext", chunks=2)
    with pytest.raises(ProgramRefused, match="1 messages are sent from gpu 1 to gpu 2 on channel 0, but 0 are"):
        msccl_import.schedules(msccl_read.parse(wrong.encode()))


def pairs(ranks: int = 3, **others: object) -> str:
    gpus = []
    for rank in range(ranks):
        blocks = [block(0, step(0, "cpy", f"i{rank}", f"o{rank}"))]
        for peer in range(ranks):
            if peer != rank:
                steps = step(0, "s", f"i{peer}", f"o{rank}"), step(1, "r", f"i{rank}", f"o{peer}")
                blocks.append(block(len(blocks), *steps, send=peer, recv=peer))
        gpus.append(gpu(rank, *blocks, i=ranks, o=ranks))
    return algorithm(*gpus, **{"coll": "alltoallv", "chunks": ranks, **others})


def test_all_to_all_of_any_lengths() -> None:
    (made,) = alike(pairs())
    assert made.contract.name == "all_to_all"
    call = Call((5, 0, 33, 16, 1, 7, 128, 64, 9))
    random = np.random.default_rng(0)
    inputs = [random_inputs(made, call, random)]
    (outputs,) = Machine(made, STRIDE, 4 * 256).run([call], inputs, 3)
    compare(made, call, inputs[0], outputs)


@pytest.mark.parametrize("name", ["send", "recv", "SEND"])
def test_half_a_call_promises_nothing(name: str) -> None:
    refused(
        exchange(coll=name), f"coll is '{name}', which is one half of a call and promises nothing: sendrecv is both"
    )


@pytest.mark.parametrize("name", ["", "allreduce2", "all reduce", "gossip", "x" * 300])
def test_names_nobody_knows(name: str) -> None:
    refused(exchange(coll=name), "but must be one of allreduce, allgather")


# -- spellings ---------------------------------------------------------------------------------------------------------

SPELLINGS = {
    "names in capitals": exchange(coll="AllGather"),
    "names with underscores": exchange(coll="all_gather"),
    "names with hyphens": exchange(coll="ALL-GATHER"),
    "protocol in small letters": exchange(proto="ll128"),
    "protocol in capitals": exchange(proto="SIMPLE"),
    "no protocol": exchange().replace(' proto="LL"', ""),
    "no name": exchange().replace(' name="made"', ""),
    "no ngpus": exchange().replace(' ngpus="2"', ""),
    "a long name": exchange(name="Allgather(n=2)-Distributed(local=DGX1,copies=1)-steps=20-" + "improved-" * 12),
    "no nchannels": exchange().replace(' nchannels="1"', ""),
    "a wrong nchannels": exchange(nchannels=7),
    "neither form said": exchange().replace(' inplace="0"', ""),
    "both forms": exchange(inplace=1, outofplace=1),
    "in place only": exchange(inplace=1, outofplace=0),
    "any size": exchange(minBytes=0, maxBytes=0),
    "the longest size": exchange(minBytes=1 << 40, maxBytes=(1 << 64) - 1),
    "what a dialect adds": exchange(maxcount="1", nthreadblocks=2, redop="sum", nthreads=512),
    "a namespace": exchange(xmlns="urn:schedules"),
    "a declaration, comments, an instruction": '<?xml version="1.0" encoding="utf-8"?><!-- one --><?keep this?>'
    + exchange().replace("<tb ", "<!-- two --><tb ").replace("</algo>", "<!-- three --></algo><!-- four -->"),
    "lines of Windows and tabs": exchange().replace("><", ">\r\n\t<"),
    "quotes of the other kind": exchange().replace('"', "'"),
    "elements not closed at once": exchange().replace("/>", "></step>"),
    "spaces around the equals sign": exchange().replace('="', ' = "'),
    "gpus in any order": re.sub(r"(<gpu id=.0.*?</gpu>)(<gpu.*?</gpu>)", r"\2\1", exchange()),
    "a byte order mark": "﻿" + exchange(),
    "no waits, flags and scratch said": re.sub(r' (depid|deps|hasdep|s_chunks)="-?\d+"', "", exchange()),
    "no idle peers": exchange().replace(' send="-1" recv="-1" chan="0"', ""),
    "no idle channel": exchange().replace('recv="-1" chan="0"', 'recv="-1" chan="-1"'),
    "no places that only inform": exchange()
    .replace('type="r" srcbuf="i" srcoff="0"', 'type="r"')
    .replace('type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0"', 'type="s" srcbuf="i" srcoff="0"'),
    "attributes backwards": re.sub(
        r"<(\w+) ([^<>]*?)(/?)>",
        lambda one: f"<{one[1]} {' '.join(reversed(re.findall(r'[^ ]+=.[^ ]*', one[2])))}{one[3]}>",
        exchange(),
    ),
    "idle threadblocks at the end": exchange().replace(
        "</gpu>", block(2) + block(3, step(0, "nop", "i-1", "o-1", cnt=0)) + "</gpu>"
    ),
    "a bare nop that waits": exchange()
    .replace('hasdep="0"', 'hasdep="1"')
    .replace("</gpu>", '<tb id="2"><step s="0" type="nop" depid="1" deps="1"/></tb></gpu>'),
    "a step of nothing": exchange().replace("</tb>", step(2, "r", "i0", "o1", cnt=0) + "</tb>", 2).replace(
        step(2, "r", "i0", "o1", cnt=0), "", 1
    ),
    "another channel, not the first": exchange().replace('chan="0"', 'chan="31"'),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling(name: str) -> None:
    assert {one.contract.name for one in alike(SPELLINGS[name])} == {"all_gather"}


def test_utf_16() -> None:
    alike(exchange().encode("utf-16"))


def test_two_messages_over_two_channels() -> None:
    """The same two ranks, each channel with a queue of its own; chunks cross over on the way."""
    gpus = []
    for rank in (0, 1):
        peer = 1 - rank
        local = block(0, step(0, "cpy", "i0", f"o{2 * rank}", cnt=2))
        ends = [
            block(1 + part, step(0, "s", f"i{part}", "o0"), step(1, "r", "i0", f"o{2 * peer + part}"), send=peer,
                  recv=peer, chan=3 * part)
            for part in (0, 1)
        ]  # fmt: skip
        gpus.append(gpu(rank, local, *ends, i=2, o=4))
    (made,) = alike(algorithm(*gpus, chunks=4, proto="LL128"))
    assert made.worker_channel is not None
    assert made.worker_channel.tolist() == [0, 0, 3] * 2


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("source", ["i0", "own"])
def test_copies_beside_threadblocks(source: str, waits: bool) -> None:
    """As TACCL's files have them: before all steps, so that what is sent may be read from where it was copied to."""
    gpus = []
    for rank in (0, 1):
        peer = 1 - rank
        read = "i0" if source == "i0" else f"o{rank}"
        other = {"depid": 1, "deps": 0} if waits else {}
        steps = step(0, "s", read, f"o{rank}", **other), step(1, "r", "i0", f"o{peer}", hasdep=1)
        idle = block(1, step(0, "cpy", "i0", "s0", hasdep=int(waits)))
        last = block(2, step(0, "cpy", f"o{peer}", "s1", depid=0, deps=1))
        made = gpu(rank, block(0, *steps, send=peer, recv=peer), idle, last, s=2)
        gpus.append(made.replace("<tb ", f'<copy i_off="0" o_off="{rank}"/><tb ', 1))
    (made,) = alike(algorithm(*gpus, redop="nop", maxBytes=(1 << 63) - 1, minBytes=0))
    assert made.contract.name == "all_gather"
    assert len(made.worker_rank) == 8


DAMAGE = {
    "hexadecimal": (exchange(minBytes="0x10"), "minBytes is '0x10', but must be a number of bytes in decimal digits"),
    "underscores": (exchange(maxBytes="1_000"), "maxBytes is '1_000', but must be a number of bytes"),
    "a suffix": (exchange(maxBytes="64K"), "maxBytes is '64K', but must be a number of bytes"),
    "octal": (exchange(nthreads="0256"), "nthreads is '0256', but must be a whole number of at least 1"),
    "hexadecimal ranks": (exchange(ngpus="0x2"), "ngpus is '0x2', but must be a whole number from 1 to 1024"),
    "a sign": (exchange(nthreads="+32"), "nthreads is '+32', but must be a whole number"),
    "spaces": (exchange(ngpus=" 2"), "ngpus is ' 2', but must be a whole number"),
    "other digits": (exchange(ngpus="٢"), "ngpus is '\\u0662', but must be a whole number"),
    "true": (exchange(inplace="true"), "inplace is 'true', but must be a whole number from 0 to 1"),
    "too many ranks": (exchange(ngpus=3), "ngpus is 3, but there are 2 of them"),
    "another protocol": (exchange(proto="LL64"), "proto is 'LL64', but must be one of Simple, LL, LL128"),
    "a number for a protocol": (exchange(proto="2"), "proto is '2', but must be one of Simple, LL, LL128"),
    "a prefix": (
        exchange(**{"xmlns:m": "urn:m"}).replace("<algo", "<m:algo").replace("</algo", "</m:algo"),
        "'m:algo' stands outermost, where only algo can",
    ),
    "an element of its own": (exchange().replace("<gpu", "<about/><gpu", 1), "'about' stands inside algo, where only"),
    "nothing in it": ("<algo/>", "there is no gpu in it"),
    "nobody says what it is": (exchange().replace(' coll="allgather"', ""), "algo has no coll"),
    "a copy of nothing": (exchange().replace("<tb ", '<copy i_off="0"/><tb ', 1), "copy has no o_off"),
    "a copy beyond": (
        exchange().replace("<tb ", '<copy i_off="1" o_off="0"/><tb ', 1),
        "chunk 1 of buffer i is used on gpu 0, which has 1",
    ),
    "something in a copy": (
        exchange().replace("<tb ", '<copy i_off="0" o_off="0"><step/></copy><tb ', 1),
        "'step' stands inside copy, where nothing can",
    ),
    "the newer form": (
        exchange().replace("<step s=", "<op step="),
        "'op' stands inside tb, where only step can: this is msccl-tools' newer form, which no runtime reads",
    ),
    "two schedules": (exchange() + exchange(), "line 1: this is no XML: junk after document element"),
    "words": (exchange().replace("</tb>", "and so on</tb>", 1), "text ('and so on') has no place here"),
    "an attribute twice": (exchange().replace("<algo", '<algo name="again"'), "this is no XML: duplicate attribute"),
    "no wait half": (exchange().replace('depid="-1"', 'depid="0"', 1), "depid is 0 and deps is -1, but both or none"),
    "no sender": (
        exchange().replace(' send="1" recv="1"', ' recv="1"'),
        "a step of type s sends, but send of its tb is -1",
    ),
    "no channel": (exchange().replace('recv="1" chan="0"', 'recv="1"'), "tb has no chan"),
    "no own place": (exchange().replace(' dstbuf="o" dstoff="1"', ""), "step has no dstbuf"),
    "no own offset": (exchange().replace(' dstoff="1"', ""), "step has no dstoff"),
    "no count": (exchange().replace(' cnt="1"', "", 1), "step has no cnt"),
    "chunks of a shard": (exchange(chunks=3), "nchunksperloop is 3, but must be a multiple of the 2 ranks for allg"),
    "chunks of a rank": (exchange(chunks=8), "i_chunks of gpu 0 is 1, but must be 4 or 0 for allgather"),
    "ranks of its own": (
        exchange().replace('send="1" recv="1"', 'send="0" recv="1"'),
        "tb 1 of gpu 0 is connected to gpu 0, but must be to another of the 2",
    ),
    "an unknown step": (exchange().replace('type="cpy"', 'type="put"'), "type is 'put', but must be one of s, r, rcs"),
    "the step nobody implements": (exchange().replace('type="cpy"', 'type="ra"'), "no runtime implements it"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(name: str) -> None:
    refused(*DAMAGE[name])


# -- plans of MSCCL++ --------------------------------------------------------------------------------------------------


def planned(operation: dict[str, object] | None = None, **others: object) -> dict[str, object]:
    """Both ranks put their half to the other; with one more operation at the end."""

    def operations(rank: int) -> list[dict[str, object]]:
        mine = {"type": "i", "index": rank, "size": 1}
        put = {"name": "put", "src_buff": [mine], "dst_buff": [{"buffer_id": 1, "index": rank, "size": 1}]}
        copy = {"name": "copy", "src_buff": [mine], "dst_buff": [{"type": "o", "index": rank, "size": 1}]}
        signal, wait = ({"name": name, "channel_ids": [0], "channel_type": "memory"} for name in ("signal", "wait"))
        return [
            signal,
            wait,
            put | {"channel_type": "memory"},
            copy,
            {"name": "nop"},
            signal,
            wait,
            *([operation] if operation else []),
        ]

    gpus = [plan_gpu(rank, [1 - rank], [operations(rank)]) for rank in (0, 1)]
    return plan(*gpus, collective="gossip", inplace=False, **others)


def read_plan(whole: dict[str, object] | bytes) -> Schedule:
    data = whole if isinstance(whole, bytes) else json.dumps(whole).encode()
    made = mscclpp_import.schedule_of(mscclpp_read.parse(data, "plan.json"), "plan.json")
    check(made)
    return made


def test_plans_of_present_releases() -> None:
    fields = {"reuse_resources": True, "num_threads_per_block": 1024, "buffer_alignment": 16, "min_message_size": 0}
    made = read_plan(planned(**fields, max_message_size=(1 << 64) - 1))
    run_exactly(made)
    again = json.loads(
        text(made, ".json", Imported("plan.json", (made,), mscclpp_read.parse(json.dumps(planned(**fields)).encode())))
    )
    assert {name: again[name] for name in fields} == fields
    read_plan(b"\xef\xbb\xbf" + json.dumps(planned()).encode())


@pytest.mark.parametrize("name", ["tpkt", "rspkt", "rpkt", "rrcs", "rsignal"])
def test_names_of_earlier_releases(name: str) -> None:
    with pytest.raises(UnreadableFile, match=f"the operation {name}, which only earlier releases of MSCCL"):
        read_plan(planned({"name": name}))


@pytest.mark.parametrize(
    ("kind", "reason"), [("switch", "needs multicast hardware"), ("none", "is not known"), ("sm", "is not known")]
)
def test_channels_that_cannot_be(kind: str, reason: str) -> None:
    whole = planned()
    whole["gpus"][1]["channels"].append({"channel_type": kind, "connected_to": [0]})  # type: ignore[index]
    with pytest.raises(UnreadableFile, match=f"gpu 1 has a channel of type '{kind}', which {reason}"):
        read_plan(whole)


@pytest.mark.parametrize(
    ("field", "value"), [("inplace", 1), ("name", None), ("collective", 3), ("gpus", {}), ("gpus", [])]
)
def test_fields_of_another_type(field: str, value: object) -> None:
    with pytest.raises(UndertowError, match="gpus" if field == "gpus" else field):
        read_plan({**planned(), field: value})
