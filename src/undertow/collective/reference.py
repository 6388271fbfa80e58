"""The meaning of a program as a plain loop: what compilers and runtimes are compared with.

    for every operation of the trace, in program order:
        copy:    destination  = source
        reduce:  destination += source

Chunks are values of any type with `+`; workers, lanes and parallel pieces do not exist here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidArgument
from .language import COPY, INPUT, OUTPUT, REDUCE, Trace


def evaluate(trace: Trace, inputs: Sequence[Sequence[Any]], in_place: bool = False) -> list[list[Any]]:
    """The output chunks of every rank; None where nothing was written, or something made of what never was.

    `in_place`: the shorter user buffer of every rank is a part of the longer one, as the contract says.
    """
    contract = trace.contract
    if [len(one) for one in inputs] != list(contract.inputs):
        was, must = [len(one) for one in inputs], f"of {list(contract.inputs)} chunks"
        raise InvalidArgument(argument="inputs", was=f"of {was} chunks", must=must)
    memory: list[list[list[Any]]] = [[list(one) for one in inputs], [[None] * count for count in contract.outputs]]
    for number in range(len(memory), len(trace.buffers)):
        memory.append([[None] * trace.scratch_size(rank, number) for rank in range(trace.ranks)])
    first = [[0] * trace.ranks for _ in memory]  # where a rank's buffer begins in its list
    if in_place:
        if contract.in_place is None:
            raise InvalidArgument(argument="in_place", was=True, must=f"False: {contract.name} has no such form")
        for rank, start in enumerate(contract.in_place):
            longer = contract.holder(rank)
            shorter = OUTPUT if longer == INPUT else INPUT
            if shorter == INPUT:
                memory[longer][rank][start : start + contract.inputs[rank]] = inputs[rank]
            memory[shorter][rank] = memory[longer][rank]
            first[shorter][rank] = start

    for kind, source_rank, source_buffer, source_start, rank, buffer, start, count, *_ in trace.rows().tolist():
        if kind not in (COPY, REDUCE):
            continue
        here, there = start + first[buffer][rank], source_start + first[source_buffer][source_rank]
        chunks = memory[buffer][rank]
        values = memory[source_buffer][source_rank][there : there + count]
        if kind == REDUCE:
            pairs = zip(chunks[here : here + count], values, strict=True)
            values = [None if old is None or new is None else old + new for old, new in pairs]
        chunks[here : here + count] = values
    return [
        memory[OUTPUT][rank][start : start + contract.outputs[rank]] for rank, start in enumerate(first[OUTPUT])
    ]  # fmt: skip


def multisets(trace: Trace, in_place: bool = False) -> list[list[tuple[tuple[int, int], ...] | None]]:
    """Which (rank, input chunk) pairs each output chunk of each rank is the sum of, sorted; None as in `evaluate`."""
    inputs = [[((rank, chunk),) for chunk in range(count)] for rank, count in enumerate(trace.contract.inputs)]
    outputs = evaluate(trace, inputs, in_place)
    return [[None if one is None else tuple(sorted(one)) for one in chunks] for chunks in outputs]


def wrong_outputs(trace: Trace, in_place: bool = False) -> list[str]:
    """One sentence for every output chunk that is not what the contract wants there."""
    contract = trace.contract
    items = [(rank, chunk) for rank, count in enumerate(contract.inputs) for chunk in range(count)]
    found = (
        (rank, chunk, value)
        for rank, chunks in enumerate(multisets(trace, in_place))
        for chunk, value in enumerate(chunks)
    )
    sentences = []
    for (rank, chunk, value), total in zip(found, contract.after.tolist(), strict=True):
        if total < 0:
            continue
        where = trace.describe(rank, OUTPUT, chunk, 1)
        if value is None:
            sentences.append(f"{where} is never written, or made of a chunk that never was.")
            continue
        parts = contract.total_items[contract.total_start[total] : contract.total_start[total + 1]].tolist()
        wanted, had = Counter(items[part] for part in parts), Counter(value)
        faults = [f"misses {_named(trace, one)}" for one in sorted(wanted - had)]
        for one, excess in sorted((had - wanted).items()):
            times = f"{had[one]} times instead of {wanted[one]}" if one in wanted else "that does not belong there"
            faults.append(f"has {_named(trace, one)} {'twice' if (had[one], excess) == (2, 1) else times}")
        if faults:
            sentences.append(f"{where} {', '.join(faults)}.")
    return sentences


def _named(trace: Trace, item: tuple[int, int]) -> str:
    return trace.describe(item[0], INPUT, item[1], 1)
