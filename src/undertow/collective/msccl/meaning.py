"""What a custom collective's statements compute, told by where chunks lie: its own labels may be anything."""

from __future__ import annotations

from ..contract import Contract
from ..language import COLUMNS, INPUT, OUTPUT, REDUCE, Trace

Place = tuple[int, int, int]  # rank, buffer, index
Origins = tuple[tuple[int, int], ...]  # ranks and indices of input chunks, with repetitions


def meaning(trace: Trace, contract: Contract) -> dict[tuple[int, int], Origins]:
    """For each output chunk that is written, the input chunks it is the sum of. `contract`: sizes and what overlaps."""

    def real(rank: int, buffer: int, index: int) -> Place:
        if buffer > OUTPUT or contract.in_place is None or buffer == contract.holder(rank):
            return rank, buffer, index
        return rank, contract.holder(rank), index + contract.in_place[rank]

    held: dict[Place, Origins] = {
        real(rank, INPUT, index): ((rank, index),)
        for rank, count in enumerate(contract.inputs)
        for index in range(count)
    }
    for row in trace.rows().tolist():
        one = dict(zip(COLUMNS, row, strict=True))
        parts = range(one["count"])
        given = [held.get(real(one["source_rank"], one["source_buffer"], one["source_start"] + at)) for at in parts]
        for at, found in enumerate(given):
            place = real(one["rank"], one["buffer"], one["start"] + at)
            before = held.get(place) if one["kind"] == REDUCE else ()
            if found is None or before is None:
                held.pop(place, None)
            else:
                held[place] = tuple(sorted(before + found))
    places = {
        (rank, index): real(rank, OUTPUT, index)
        for rank, count in enumerate(contract.outputs)
        for index in range(count)
    }
    return {output: held[place] for output, place in places.items() if place in held}
