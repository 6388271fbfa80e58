"""Contracts: who holds what before a collective, who must hold what after it. Data, not code.

*Items* are the chunks of all inputs, numbered rank by rank. A *total* is a multiset of items: what an output chunk must
be the sum of (of one item: a copy of it). Every item has a *length class*: chunks of one class are equally long, and
the lengths of all classes follow from the lengths of a call's *spans*. A span is what a call names by one number (a
whole buffer, a rank's shard, what one rank sends to another); it is cut into `factor` chunks, as by torch.tensor_split.

| contract | spans | span s is |
|---|---|---|
| all_reduce, broadcast, reduce, send_recv, all_to_next | 1 | the buffer |
| all_gather, reduce_scatter, gather, scatter | ranks | the shard of rank s |
| all_to_all | ranks² | what rank s // ranks sends to rank s % ranks |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument
from ..plan.plan import split

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Contract:
    """`inputs[r]` and `outputs[r]` count the chunks of rank r's buffers.

    `total_start` and `total_items` are the totals in compressed rows; `after[k]` is the total of output chunk k
    (outputs numbered rank by rank), -1 where anything may stand. `in_place`: per rank, the chunk of the *longer* user
    buffer at which the shorter one lies when a call gives both in one memory; None where no such form exists.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    item_class: Ints
    output_class: Ints
    total_start: Ints
    total_items: Ints
    after: Ints
    spans: int
    factor: int
    reduces: bool
    in_place: tuple[int, ...] | None = None

    @property
    def ranks(self) -> int:
        return len(self.inputs)

    @property
    def first_item(self) -> Ints:
        """The number of each rank's first input chunk, and their count as a last entry."""
        return np.concatenate([[0], np.cumsum(self.inputs)]).astype(np.int64)

    @property
    def first_output(self) -> Ints:
        return np.concatenate([[0], np.cumsum(self.outputs)]).astype(np.int64)

    def holder(self, rank: int) -> int:
        """In place, which user buffer of a rank the other lies in: 0, its input (reduce_scatter), or 1, its output."""
        return int(self.inputs[rank] <= self.outputs[rank])

    def user_places(self, in_place: bool) -> tuple[NDArray[np.int64], int]:
        """[rank, buffer]: the first atom of every rank's input (0) and output (1); and how many atoms they have.

        In place one of the two lies inside the other.
        """
        first, at = np.zeros((self.ranks, 2), np.int64), 0
        for rank in range(self.ranks):
            if in_place:
                assert self.in_place is not None
                holder = self.holder(rank)
                first[rank, holder], first[rank, 1 - holder] = at, at + self.in_place[rank]
                at += int((self.inputs, self.outputs)[holder][rank])
            else:
                first[rank] = at, at + self.inputs[rank]
                at += int(self.inputs[rank] + self.outputs[rank])
        return first, at

    def refined(self, grain: int) -> Contract:
        """The same with every chunk cut into `grain`."""
        if grain == 1:
            return self
        totals = len(self.total_start) - 1
        parts = np.arange(grain, dtype=np.int64)
        sizes = np.repeat(np.diff(self.total_start), grain)
        rows = [
            (self.total_items[self.total_start[one] : self.total_start[one + 1]] * grain)[None, :] + parts[:, None]
            for one in range(totals)
        ]
        finer_after = np.where(self.after[:, None] < 0, -1, self.after[:, None] * grain + parts[None, :])
        return replace(
            self,
            inputs=tuple(one * grain for one in self.inputs),
            outputs=tuple(one * grain for one in self.outputs),
            item_class=(self.item_class[:, None] * grain + parts).reshape(-1),
            output_class=(self.output_class[:, None] * grain + parts).reshape(-1),
            total_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            total_items=np.concatenate([one.reshape(-1) for one in rows] or [np.zeros(0, np.int64)]),
            after=finer_after.reshape(-1),
            factor=self.factor * grain,
            in_place=None if self.in_place is None else tuple(one * grain for one in self.in_place),
        )

    def cut_by_calls(self) -> Contract:
        """The same where a call names the length of every chunk: each is a span of its own, in the same order."""
        return replace(self, spans=self.spans * self.factor, factor=1)

    def class_lengths(self, span_lengths: Sequence[int], unit: int = 1) -> Ints:
        """Elements of each length class; cuts inside a span fall on multiples of `unit`."""
        if len(span_lengths) != self.spans:
            must = f"{self.spans} numbers, as {self.name} has spans"
            raise InvalidArgument(argument="span_lengths", was=f"{len(span_lengths)} numbers", must=must)
        lengths = np.empty((self.spans, self.factor), np.int64)
        for span, count in enumerate(span_lengths):
            bounds = np.array([start for start, _ in split(-(-count // unit), self.factor)] + [-(-count // unit)])
            lengths[span] = np.diff(np.minimum(bounds * unit, count))
        return lengths.reshape(-1)


def _made(
    name: str,
    inputs: Sequence[int],
    outputs: Sequence[int],
    item_class: Ints,
    totals: tuple[Ints, Ints],
    after: Ints,
    spans: int,
    factor: int,
    reduces: bool = False,
    in_place: Sequence[int] | None = None,
    output_class: Ints | None = None,
) -> Contract:
    start, items = totals
    if output_class is None:  # what may be anything is as long as the first class
        first = np.where(after < 0, 0, start[np.maximum(after, 0)])
        output_class = (
            np.where(after < 0, 0, item_class[items[first]]) if len(items) else np.zeros(len(after), np.int64)
        )
    return Contract(
        name, tuple(inputs), tuple(outputs), item_class.astype(np.int64), output_class.astype(np.int64),
        start.astype(np.int64), items.astype(np.int64), after.astype(np.int64), spans, factor, reduces,
        None if in_place is None else tuple(in_place),
    )  # fmt: skip


def _single_items(count: int) -> tuple[Ints, Ints]:
    """One total for each item."""
    return np.arange(count + 1), np.arange(count)


def _column_sums(ranks: int, chunks: int) -> tuple[Ints, Ints]:
    """Total i: chunk i of every rank."""
    items = np.arange(ranks)[None, :] * chunks + np.arange(chunks)[:, None]
    return np.arange(chunks + 1) * ranks, items.reshape(-1)


def all_reduce(ranks: int, chunks: int) -> Contract:
    """Everybody ends with the sum of everybody's buffer, in `chunks` chunks."""
    each = np.tile(np.arange(chunks), ranks)
    return _made(
        "all_reduce", [chunks] * ranks, [chunks] * ranks, each, _column_sums(ranks, chunks), each, 1, chunks, True,
        [0] * ranks,
    )  # fmt: skip


def all_gather(ranks: int, chunks: int) -> Contract:
    """Everybody ends with everybody's shard, in rank order; `chunks` chunks a shard."""
    count = ranks * chunks
    return _made(
        "all_gather", [chunks] * ranks, [count] * ranks, np.arange(count), _single_items(count),
        np.tile(np.arange(count), ranks), ranks, chunks, False, [rank * chunks for rank in range(ranks)],
    )  # fmt: skip


def reduce_scatter(ranks: int, chunks: int) -> Contract:
    """Rank r ends with shard r of the sum of everybody's buffer; `chunks` chunks a shard."""
    count = ranks * chunks
    return _made(
        "reduce_scatter", [count] * ranks, [chunks] * ranks, np.tile(np.arange(count), ranks),
        _column_sums(ranks, count), np.arange(count), ranks, chunks, True, [rank * chunks for rank in range(ranks)],
    )  # fmt: skip


def all_to_all(ranks: int, chunks: int) -> Contract:
    """Rank d ends with what every rank s has for it, in the order of s; `chunks` chunks for each pair. Any lengths."""
    count = ranks * chunks
    source, destination, part = np.meshgrid(np.arange(ranks), np.arange(ranks), np.arange(chunks), indexing="ij")
    item = ((source * ranks + destination) * chunks + part).transpose(1, 0, 2).reshape(-1)
    return _made(
        "all_to_all", [count] * ranks, [count] * ranks, np.arange(ranks * count), _single_items(ranks * count), item,
        ranks * ranks, chunks, False, [0] * ranks,
    )  # fmt: skip


def broadcast(ranks: int, chunks: int, root: int = 0) -> Contract:
    """Everybody ends with the root's buffer."""
    each = np.tile(np.arange(chunks), ranks)
    return _made(
        "broadcast", [chunks] * ranks, [chunks] * ranks, each, _single_items(ranks * chunks), each + root * chunks, 1,
        chunks, False, [0] * ranks,
    )  # fmt: skip


def reduce(ranks: int, chunks: int, root: int = 0) -> Contract:
    """The root ends with the sum of everybody's buffer; what others hold in their output does not matter."""
    each = np.tile(np.arange(chunks), ranks)
    after = np.where(np.repeat(np.arange(ranks), chunks) == root, each, -1)
    return _made(
        "reduce", [chunks] * ranks, [chunks] * ranks, each, _column_sums(ranks, chunks), after, 1, chunks, True,
        [0] * ranks, each,
    )  # fmt: skip


def gather(ranks: int, chunks: int, root: int = 0) -> Contract:
    """The root ends with everybody's shard, in rank order; others have no output."""
    count = ranks * chunks
    outputs = [count if rank == root else 0 for rank in range(ranks)]
    return _made(
        "gather", [chunks] * ranks, outputs, np.arange(count), _single_items(count), np.arange(count), ranks, chunks
    )


def scatter(ranks: int, chunks: int, root: int = 0) -> Contract:
    """Rank r ends with shard r of the root's buffer; others have no input."""
    count = ranks * chunks
    inputs = [count if rank == root else 0 for rank in range(ranks)]
    return _made(
        "scatter", inputs, [chunks] * ranks, np.arange(count), _single_items(count), np.arange(count), ranks, chunks
    )


def send_recv(ranks: int, chunks: int, source: int = 0, destination: int = 1) -> Contract:
    """The destination ends with the source's buffer; others have neither input nor output."""
    inputs = [chunks if rank == source else 0 for rank in range(ranks)]
    outputs = [chunks if rank == destination else 0 for rank in range(ranks)]
    each = np.arange(chunks)
    return _made("send_recv", inputs, outputs, each, _single_items(chunks), each, 1, chunks)


def all_to_next(ranks: int, chunks: int) -> Contract:
    """Rank r + 1 ends with rank r's buffer; nothing comes to rank 0, whose output may hold anything."""
    each = np.tile(np.arange(chunks), ranks)
    after = np.concatenate([np.full(chunks, -1), np.arange((ranks - 1) * chunks)])
    return _made(
        "all_to_next", [chunks] * ranks, [chunks] * ranks, each, _single_items(ranks * chunks), after, 1, chunks,
        False, None, each,
    )  # fmt: skip


def custom(
    name: str,
    inputs: Sequence[int],
    outputs: Sequence[int],
    after: Mapping[tuple[int, int], Sequence[tuple[int, int]]],
) -> Contract:
    """Any other: `after[rank, output chunk]` lists the (rank, input chunk) pairs whose sum must stand there.

    All chunks of all ranks are equally long: the one span of a call is the length of a chunk.
    """
    if not inputs or len(inputs) != len(outputs) or min(*inputs, *outputs) < 0:
        was, must = (
            f"{list(inputs)}, and outputs {list(outputs)}",
            "a count of chunks for every rank, both of as many ranks",
        )
        raise InvalidArgument(argument="inputs", was=was, must=must)
    first = np.concatenate([[0], np.cumsum(inputs)])
    first_output = np.concatenate([[0], np.cumsum(outputs)])
    wanted = np.full(int(first_output[-1]), -1)
    start, items = [0], []
    for number, ((rank, index), parts) in enumerate(sorted(after.items())):
        if not (0 <= rank < len(outputs) and 0 <= index < outputs[rank]) or not parts:
            was, must = f"with an entry for chunk {index} of rank {rank}", "of output chunks with at least one source"
            raise InvalidArgument(argument="after", was=was, must=must)
        for source, chunk in parts:
            if not (0 <= source < len(inputs) and 0 <= chunk < inputs[source]):
                was = f"made of chunk {chunk} of rank {source}"
                raise InvalidArgument(argument="after", was=was, must="made of input chunks")
            items.append(int(first[source]) + chunk)
        start.append(len(items))
        wanted[first_output[rank] + index] = number
    reduces = any(len(parts) > 1 for parts in after.values())
    return _made(
        name, inputs, outputs, np.zeros(int(first[-1]), np.int64), (np.array(start), np.array(items, np.int64)), wanted,
        1, 1, reduces,
    )  # fmt: skip


BUILT_IN: dict[str, Callable[..., Contract]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "send_recv": send_recv,
    "all_to_next": all_to_next,
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")
