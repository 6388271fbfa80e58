"""Small schedules in foreign formats, made here: right ones to vary, and a way to damage them."""

from __future__ import annotations

import json
import random
from typing import Any

from undertow.collective.algorithms import LIBRARY
from undertow.collective.formats import JSON, XML, text
from undertow.collective.topology import Topology


def step(number: int, kind: str, source: str, destination: str, **others: object) -> str:
    """One line of XML: `step(0, "s", "i0", "o0", cnt=2)`."""
    fields = {"cnt": 1, "depid": -1, "deps": -1, "hasdep": 0, **others}
    places = f'srcbuf="{source[0]}" srcoff="{source[1:]}" dstbuf="{destination[0]}" dstoff="{destination[1:]}"'
    said = " ".join(f'{name}="{value}"' for name, value in fields.items())
    return f'<step s="{number}" type="{kind}" {places} {said}/>'


def block(number: int, *steps: str, send: int = -1, recv: int = -1, chan: int = 0) -> str:
    return f'<tb id="{number}" send="{send}" recv="{recv}" chan="{chan}">{"".join(steps)}</tb>'


def algorithm(*gpus: str, coll: str = "allgather", chunks: int = 2, proto: str = "LL", **others: object) -> str:
    """`gpus`: pairs of sizes and threadblocks, as `gpu` makes them."""
    fields = {"name": "made", "proto": proto, "nchannels": 1, "nchunksperloop": chunks, "ngpus": len(gpus)}
    fields |= {"coll": coll, "inplace": 0, **others}
    said = " ".join(f'{name}="{value}"' for name, value in fields.items())
    return f"<algo {said}>" + "".join(gpus).replace("RANK", "") + "</algo>"


def gpu(rank: int, *blocks: str, i: int = 1, o: int = 2, s: int = 0) -> str:
    return f'<gpu id="{rank}" i_chunks="{i}" o_chunks="{o}" s_chunks="{s}">{"".join(blocks)}</gpu>'


def exchange(**others: object) -> str:
    """An allgather of two ranks: right, as it stands."""
    gpus = []
    for rank in (0, 1):
        copy = block(0, step(0, "cpy", "i0", f"o{rank}"))
        send = block(
            1, step(0, "s", "i0", f"o{rank}"), step(1, "r", "i0", f"o{1 - rank}"), send=1 - rank, recv=1 - rank
        )
        gpus.append(gpu(rank, copy, send))
    return algorithm(*gpus, **others)


def plan(*gpus: dict[str, Any], collective: str = "allreduce", inplace: bool = True, **others: Any) -> dict[str, Any]:
    return {
        "name": "made",
        "collective": collective,
        "protocol": "LL",
        "inplace": inplace,
        **others,
        "gpus": list(gpus),
    }


def plan_gpu(rank: int, peers: list[int], blocks: list[list[dict[str, Any]]], **others: Any) -> dict[str, Any]:
    """All channels are memory channels, of which every threadblock has all; remote buffers are peers' i, o and s."""
    remote = [
        {"rank": peer, "type": kind, "access_channel_types": ["memory"]}
        for peer in sorted(set(peers))
        for kind in "ios"
    ]
    made = [
        {
            "id": number,
            "ops": operations,
            "channels": [{"channel_type": "memory", "channel_ids": list(range(len(peers)))}],
            "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": list(range(len(remote)))}],
        }
        for number, operations in enumerate(blocks)
    ]
    sizes = {"input_chunks": 2, "output_chunks": 2, "scratch_chunks": 2}
    channels = [{"channel_type": "memory", "connected_to": peers}]
    return {"id": rank, **sizes, "threadblocks": made, "channels": channels, "remote_buffers": remote,
            "semaphores": [], **others}  # fmt: skip


def seeds() -> list[tuple[str, bytes]]:
    """Right files of both formats to damage."""
    topology = Topology.grid(2, 2)
    copying = exchange().replace("<tb ", '<copy i_off="0" o_off="0"/><tb ', 1)
    found = [(XML, exchange().encode()), (XML, copying.encode())]
    for name in ("ring", "halving_doubling", "all_to_all_two_step", "reduce_tree", "gather_direct", "scatter_direct"):
        for suffix, target in ((XML, "staged"), (JSON, "direct")):
            schedule = LIBRARY[name].compile(topology=topology, target=target, check=False)
            found.append((suffix, text(schedule, suffix).encode()))
    return found


def damaged(data: bytes, suffix: str, seed: int) -> bytes:
    """The same with some of everything that can go wrong with a file, by chance or on purpose."""
    chance = random.Random(seed)
    for _ in range(chance.choice((1, 1, 2, 5))):
        data = chance.choice(_DAMAGES)(data, suffix, chance)
    return data


def _flip(data: bytes, suffix: str, chance: random.Random) -> bytes:
    if not data:
        return data
    at = chance.randrange(len(data))
    return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]


def _cut(data: bytes, suffix: str, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _drop(data: bytes, suffix: str, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data) + 1)
    return data[:begin] + data[begin + chance.randrange(1, 200) :]


def _repeat(data: bytes, suffix: str, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data) + 1)
    end = begin + chance.randrange(1, 400)
    return data[:end] + data[begin:end] * chance.choice((1, 3, 40)) + data[end:]


def _nudge(data: bytes, suffix: str, chance: random.Random) -> bytes:
    """A number one more or less: most such files can be read, and many are wrong."""
    at, end = _some_number(data, chance)
    return data[:at] + b"%d" % max(0, int(data[at:end] or b"0") + chance.choice((-1, 1))) + data[end:]


def _some_number(data: bytes, chance: random.Random) -> tuple[int, int]:
    marks = [at for at, one in enumerate(data) if one in b"0123456789" and data[at - 1] in b'":,[']
    at = chance.choice(marks) if marks else 0
    end = at
    while end < len(data) and end < at + 20 and data[end] in b"0123456789":
        end += 1
    return at, end


def _number(data: bytes, suffix: str, chance: random.Random) -> bytes:
    """Another number where one stood."""
    at, end = _some_number(data, chance)
    values = (b"0", b"1", b"2", b"3", b"7", b"-1", b"-7", b"255", b"4095", b"65536", b"2000000000", b"9" * 30, b"1.5")
    return data[:at] + chance.choice((*values, b"", b"x", b"NaN", b"true", b"null", b"[]")) + data[end:]


def _word(data: bytes, suffix: str, chance: random.Random) -> bytes:
    words = [
        b"s",
        b"r",
        b"rcs",
        b"rrs",
        b"rrc",
        b"rrcs",
        b"cpy",
        b"re",
        b"nop",
        b"ra",
        b"put",
        b"get",
        b"copy",
        b"wait",
    ]
    words += [b"signal", b"rre", b"upkt", b"ppkt", b"pipeline", b"glre", b"allreduce", b"custom", b"Simple", b"LL128"]
    words += [b"allgather", b"reducescatter", b"gather", b"scatter", b"broadcast", b"reduce", b"sendrecv", b"alltoallv"]
    old, new = chance.choice(words), chance.choice(words)
    return data.replace(b'"' + old + b'"', b'"' + new + b'"', chance.choice((1, 3, -1)))


def _nest(data: bytes, suffix: str, chance: random.Random) -> bytes:
    depth = chance.choice((3, 2000, 200_000))
    opening, closing = (b"<gpu>", b"</gpu>") if suffix == XML else (b"[", b"]")
    at = chance.randrange(len(data) + 1)
    return data[:at] + opening * depth + closing * depth + data[at:]


def _entities(data: bytes, suffix: str, chance: random.Random) -> bytes:
    laughs = b"".join(b'<!ENTITY a%d "%s">' % (n, b"&a%d;" % (n - 1) * 10 if n else b"ha") for n in range(10))
    external = b'<!ENTITY a9 SYSTEM "file:///etc/passwd">'
    declared = b"<!DOCTYPE algo [" + chance.choice((laughs, external)) + b"]>"
    return declared + data.replace(b"made", b"&a9;", 1)


def _mess(data: bytes, suffix: str, chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 50, 5000)))


def _retype(data: bytes, suffix: str, chance: random.Random) -> bytes:
    """JSON that is sound, but not a plan any more."""
    if suffix == XML:
        return _number(data, suffix, chance)
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return data
    at: Any = whole
    for _ in range(chance.randrange(1, 9)):
        keys = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
        if not keys:
            break
        key = chance.choice(keys)
        if chance.random() < 0.3:
            at[key] = chance.choice((None, -1, "x", [], {}, 10**12, 1e300, True, [[]], at[key]))
            break
        at = at[key]
    return json.dumps(whole).encode()


_DAMAGES = (
    _nudge,
    _nudge,
    _nudge,
    _nudge,
    _flip,
    _cut,
    _drop,
    _repeat,
    _number,
    _number,
    _word,
    _nest,
    _entities,
    _mess,
    _retype,
    _retype,
)
