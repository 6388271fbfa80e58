"""MSCCL's schedules as data: `algo > gpu > tb > step`, as its XML files have them, and what its runtime has room for.

A threadblock sends to at most one rank and receives from at most one, on one channel; a connection is a queue of
messages from a rank to another on a channel. Steps run in order; a step may wait for a step of another threadblock of
its rank. Which pair of a step's buffer and offset lies on its own rank:

| type | receives | sends | own source | own destination |
|---|---|---|---|---|
| s | | x | what is sent | |
| r, rcs | x | (x) | | where it is stored |
| rrs | x | x | what is added | |
| rrc, rrcs | x | (x) | what is added | where the sum is stored |
| cpy, re | | | read | written (re: added to) |
| nop | | | | |

The other pair only tells a reader where the data comes from or goes to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RECEIVES = frozenset({"r", "rcs", "rrs", "rrc", "rrcs"})
SENDS = frozenset({"s", "rcs", "rrs", "rrcs"})
READS = frozenset({"s", "rrs", "rrc", "rrcs", "cpy", "re"})
STORES = frozenset({"r", "rcs", "rrc", "rrcs", "cpy", "re"})
TYPES = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")
BUFFERS = "ios"
# Messages of a connection that are under way at most: a message is half the queue in Simple, an eighth in the others.
SLOTS = {"Simple": 2, "LL": 8, "LL128": 8}
COLLECTIVES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter", "alltoall": "all_to_all", "alltoallv": "all_to_all", "broadcast": "broadcast",
    "reduce": "reduce", "gather": "gather", "scatter": "scatter", "sendrecv": "send_recv", "alltonext": "all_to_next",
    "custom": "custom",
}  # fmt: skip
# Ours, as Azure's and AMD's executors spell them (msccl-tools writes reduce_scatter, which they do not know); any other
# contract is custom, which the original runtime knows.
WRITTEN = {
    "all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter", "all_to_all": "alltoall",
    "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
}  # fmt: skip
HALVES = ("send", "recv")  # known to Azure's and AMD's executors: one side of a call, which promises nothing
LEAST_BYTES, MOST_BYTES = 0, 128 << 20  # sizes of calls that a file is for which does not say so
MOST_CHANNELS, MOST_THREADBLOCKS, MOST_STEPS, MOST_CHUNKS_OF_A_STEP = 32, 216, 256, 71
MOST_THREADBLOCKS_OF_A_CHANNEL = 32  # that send, and as many that receive


@dataclass(frozen=True, slots=True)
class Step:
    type: str
    source: tuple[str, int]
    destination: tuple[str, int]
    count: int
    depends_on: tuple[int, int] | None  # threadblock and step of the same rank
    published: bool  # whether others may wait for it
    line: int = 0


@dataclass(frozen=True, slots=True)
class Threadblock:
    send: int  # rank, or -1
    receive: int
    channel: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    threadblocks: tuple[Threadblock, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a file says of a schedule beyond what it does: kept from reading to writing."""

    protocol: str = "Simple"
    forms: tuple[bool, ...] = (False,)  # in place or not: what it may be called as
    min_bytes: int | None = None
    max_bytes: int | None = None
    threads: int | None = None
    others: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Algorithm:
    name: str
    collective: str  # as MSCCL spells it
    chunks: int  # of the longest buffer
    gpus: tuple[Gpu, ...]
    facts: Facts = field(default_factory=Facts)

    @property
    def ranks(self) -> int:
        return len(self.gpus)

    @property
    def channels(self) -> int:
        return 1 + max((block.channel for gpu in self.gpus for block in gpu.threadblocks), default=-1)


def beyond_limits(algorithm: Algorithm) -> str | None:
    """The first limit of MSCCL's runtime that the schedule exceeds, in words; None if it fits."""
    if algorithm.channels > MOST_CHANNELS:
        return f"it has {algorithm.channels} channels, and the runtime has at most {MOST_CHANNELS}"
    for rank, gpu in enumerate(algorithm.gpus):
        if len(gpu.threadblocks) > MOST_THREADBLOCKS:
            count = len(gpu.threadblocks)
            return f"rank {rank} has {count} threadblocks, and the runtime has at most {MOST_THREADBLOCKS}"
        users: dict[tuple[int, str], int] = {}
        for number, block in enumerate(gpu.threadblocks):
            if len(block.steps) > MOST_STEPS:
                count = len(block.steps)
                return (
                    f"threadblock {number} of rank {rank} has {count} steps, and the runtime has at most {MOST_STEPS}"
                )
            longest = max((step.count for step in block.steps), default=0)
            if longest > MOST_CHUNKS_OF_A_STEP:
                most = MOST_CHUNKS_OF_A_STEP
                return f"a step of rank {rank} moves {longest} chunks at once, and the runtime at most {most}"
            for peer, verb in ((block.send, "send"), (block.receive, "receive")):
                if peer >= 0:
                    users[block.channel, verb] = users.get((block.channel, verb), 0) + 1
        for (channel, verb), count in users.items():
            if count > MOST_THREADBLOCKS_OF_A_CHANNEL:
                most = MOST_THREADBLOCKS_OF_A_CHANNEL
                return f"{count} threadblocks of rank {rank} {verb} on channel {channel}, and the runtime has {most}"
    return None
