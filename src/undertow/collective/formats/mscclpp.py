"""MSCCL++'s execution plans as data: what their JSON says, and what the executor has room for.

Ranks reach into each other's registered memory. A threadblock runs its operations in order; it knows of other ranks
through channels (the k-th from A to B is the other end of the k-th from B to A) and of other threadblocks of its rank
through semaphores and barriers. What each operation reads and writes:

| operations | meaning |
|---|---|
| copy, put, get | each destination <- its source (one source: all destinations) |
| pws, pwsf | put, then signal (and flush) |
| cpkt, ppkt | the same into packets, which carry their own flags |
| upkt, rppkt | from packets: waits until they have come |
| re, rre | first destination <- the sum of all sources |
| res, rres | the sum to all destinations |
| repkt, respkt, recpkt, recspkt | the sum, where sources after the first are packets, and so are destinations |
| signal, wait, rlxsignal, rlxwait | of channels |
| sem_release, sem_acquire, barrier | between threadblocks of a rank |
| nop, flush | order within a threadblock, which we keep anyway |
| pipeline | a loop over pieces of its operations' data: one piece here |
"""

from __future__ import annotations

from dataclasses import dataclass, field

COPIES = frozenset({"copy", "put", "get", "pws", "pwsf", "cpkt", "ppkt", "upkt", "rppkt"})
SUMS = frozenset({"re", "rre", "res", "rres", "repkt", "respkt", "recpkt", "recspkt"})
READS_PACKETS = frozenset({"upkt", "rppkt"})
SUMS_PACKETS = frozenset({"repkt", "respkt", "recpkt", "recspkt"})
WRITES_PACKETS = frozenset({"cpkt", "ppkt", "rppkt"})
SIGNALS, WAITS = frozenset({"signal", "rlxsignal", "pws", "pwsf"}), frozenset({"wait", "rlxwait"})
SYNCHRONISES = frozenset({"signal", "rlxsignal", "wait", "rlxwait", "sem_release", "sem_acquire", "barrier"})
IDLE = frozenset({"nop", "flush"})
NEEDS_MULTICAST = frozenset({"gstore", "gstorepkt", "glre", "glres"})
# Names of the first plans. One of them, cpkt, meant unpacking there: such a file must not be taken for a present one.
EARLIER = frozenset({"tpkt", "rpkt", "rspkt", "rs", "rrc", "rrcs", "rsignal", "rwait"})
KNOWN = COPIES | SUMS | SYNCHRONISES | IDLE | {"pipeline"}
COLLECTIVES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "reduce": "reduce",
}  # fmt: skip
CHANNEL_TYPES, MULTICAST = ("memory", "port"), "switch"
MOST_OPERATIONS, MOST_CHANNELS, MOST_CHANNELS_OF_ONE, MOST_BUFFERS_OF_ONE = 64, 16, 8, 10
MOST_SEMAPHORES = 16


@dataclass(frozen=True, slots=True)
class Operand:
    """`size` chunks from `index` on of a buffer (i, o or s) of this rank, or of `rank`."""

    buffer: str
    index: int
    size: int
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    sources: tuple[Operand, ...] = ()
    destinations: tuple[Operand, ...] = ()
    channel_type: str = ""
    channels: tuple[int, ...] = ()  # of the rank, not of the threadblock
    semaphores: tuple[int, ...] = ()
    barrier: tuple[int, int] | None = None  # number, threadblocks
    share: tuple[int, int] = (0, 1)  # this threadblock's part of the data, of how many
    inner: tuple[Operation, ...] = ()
    unit: tuple[int, int] = (0, 0)  # of a pipeline: bytes and chunks


@dataclass(frozen=True, slots=True)
class Gpu:
    """`channels[type]`: the rank at the other end of each."""

    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    channels: dict[str, tuple[int, ...]]
    semaphores: tuple[int, ...]  # what each starts from
    threadblocks: tuple[tuple[Operation, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """`others`: fields that say nothing about what is moved, as they were."""

    name: str
    collective: str
    in_place: bool
    double_scratch: bool
    gpus: tuple[Gpu, ...]
    protocol: str = "Simple"
    others: dict[str, object] = field(default_factory=dict)


def beyond_limits(plan: Plan) -> str | None:
    """The first limit of the executor that the plan exceeds, in words; None if it fits."""
    for rank, gpu in enumerate(plan.gpus):
        if len(gpu.semaphores) > MOST_SEMAPHORES:
            return f"rank {rank} has {len(gpu.semaphores)} semaphores, and the executor at most {MOST_SEMAPHORES}"
        for number, block in enumerate(gpu.threadblocks):
            where = f"threadblock {number} of rank {rank}"
            if len(block) > MOST_OPERATIONS:
                return f"{where} has {len(block)} operations, and the executor at most {MOST_OPERATIONS}"
            channels = {(one.channel_type, channel) for one in block for channel in one.channels}
            if len(channels) > MOST_CHANNELS:
                return f"{where} uses {len(channels)} channels, and the executor at most {MOST_CHANNELS}"
            for one in block:
                if len(one.channels) > MOST_CHANNELS_OF_ONE:
                    most = MOST_CHANNELS_OF_ONE
                    return f"an operation of {where} uses {len(one.channels)} channels, and the executor at most {most}"
                buffers = max(len(one.sources), len(one.destinations))
                if buffers > MOST_BUFFERS_OF_ONE:
                    most = MOST_BUFFERS_OF_ONE
                    return f"an operation of {where} has {buffers} buffers, and the executor at most {most}"
    return None
