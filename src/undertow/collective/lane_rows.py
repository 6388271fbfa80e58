"""The tables of a bound program as operands and places, for those who walk a schedule over lanes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bind import (
    FIRST_WORKSPACE,
    INSTRUCTION_ROW,
    INSTRUCTIONS,
    MY_INPUT,
    MY_OUTPUT,
    OPERAND_ROW,
    OPERANDS,
    PIECE_ROW,
    PIECES,
)

Operand = tuple[int, int]  # base, offset in elements


class Piece(NamedTuple):
    """One chunk: what is summed, where it goes here, and where elsewhere, as (rank, place of its workspace)."""

    elements: int
    sources: tuple[Operand, ...]
    stores: tuple[Operand, ...]
    remote: tuple[tuple[int, int], ...]


class Rows:
    """Reads the tables of a bound program. The rank's own workspace is base `FIRST_WORKSPACE`."""

    def __init__(self, code: NDArray[np.int64], rank: int, room: int) -> None:
        self._code: list[int] = code.tolist()
        self._mine = FIRST_WORKSPACE + rank
        self.room = room

    def pieces(self, row: int) -> list[Piece]:
        """Each chunk of an instruction."""
        code = self._code
        at = code[INSTRUCTIONS] + row * INSTRUCTION_ROW
        found = []
        for piece in range(code[at + 4], code[at + 5]):
            place = code[PIECES] + piece * PIECE_ROW
            elements, first, middle, _, last = code[place : place + PIECE_ROW]
            operands = [
                (code[entry], code[entry + 1])
                for entry in range(
                    code[OPERANDS] + first * OPERAND_ROW, code[OPERANDS] + last * OPERAND_ROW, OPERAND_ROW
                )
            ]
            known = [(FIRST_WORKSPACE if base == self._mine else base, offset) for base, offset in operands]
            reach = (MY_INPUT, MY_OUTPUT, self._mine)
            local = [one for one, (base, _) in zip(known, operands, strict=True) if base in reach]
            remote = [(base - FIRST_WORKSPACE, offset // self.room) for base, offset in operands if base not in reach]
            sources = middle - first  # all local
            found.append(Piece(elements, tuple(local[:sources]), tuple(local[sources:]), tuple(remote)))
        return found

    def places_read(self, pieces: list[Piece]) -> dict[int, int]:
        """Elements of each place of my workspace that an instruction of these pieces reads."""
        return {
            offset // self.room: piece.elements
            for piece in pieces
            for base, offset in piece.sources
            if base == FIRST_WORKSPACE
        }
