"""What a chunk is called in an MSCCL file."""

from __future__ import annotations

import numpy as np

from ..language import INPUT, OUTPUT
from ..schedule import Schedule

LETTERS = "io"


class Places:
    """What an atom is called in such a file: a letter and an offset. Scratch buffers lie one behind the other."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._staging = len(schedule.buffers) - 1
        scratch = schedule.atoms[:, 2 : self._staging].astype(np.int64)
        self._total = scratch.sum(axis=1)
        self._before = np.cumsum(scratch, axis=1) - scratch

    def scratch_chunks(self, rank: int) -> int:
        return int(self._total[rank])

    def is_staging(self, atom: int) -> bool:
        return int(self._schedule.atom_buffer[atom]) == self._staging

    def rank(self, atom: int) -> int:
        return int(self._schedule.atom_rank[atom])

    def of(self, atom: int) -> tuple[str, int]:
        schedule = self._schedule
        rank, buffer = int(schedule.atom_rank[atom]), int(schedule.atom_buffer[atom])
        spans = [(schedule.first_atom[rank, one], schedule.atoms[rank, one]) for one in (INPUT, OUTPUT)]
        if buffer == OUTPUT and spans[INPUT] == spans[OUTPUT]:
            buffer = INPUT  # in place and equally long: files call it the input
        offset = atom - int(schedule.first_atom[rank, buffer])
        if buffer <= OUTPUT:
            return LETTERS[buffer], offset
        return "s", offset + int(self._before[rank, buffer - 2])
