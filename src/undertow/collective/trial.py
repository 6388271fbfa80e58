"""One rank's memory for calls of one size, with data whose result is known exactly: what `run` and `bench` judge by.

    input[rank]      small integers from a generator seeded by the rank, so that every rank knows everybody's
    output[chunk]    the sum (or other operation) of the chunks that the contract lists for it

Sums of all ranks stay in the range in which the type holds every integer: any order of adding gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from ..fabric.base import poison
from ..fabric.symmetric import SymmetricBuffer
from .contract import Contract
from .language import INPUT, OUTPUT

OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_EXACT_INTEGERS = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.int8: 1 << 7, torch.uint8: 1 << 8}
_MOST = 1 << 12  # values below this, where the type allows it
_ALIGNMENT = 16  # bytes: where chunks of a span begin


def spans_of_buffer(contract: Contract) -> int:
    """How many spans the longest buffer of a rank is made of."""
    return max(1, max(*contract.inputs, *contract.outputs) // contract.factor)


def equal_spans(contract: Contract, nbytes: int, item_size: int) -> list[int]:
    """Elements of each span, all alike, such that the longest buffer of a rank has `nbytes`, or a little less."""
    return [max(1, nbytes // item_size // spans_of_buffer(contract))] * contract.spans


class Trial:
    """`source` and `out` are what a call takes. With `symmetric`, which makes buffers, other ranks may reach into them.

    In place both lie in one memory, the shorter where the contract says. `keeps_input`: a call that is not in place
    must leave its input alone.
    """

    def __init__(
        self,
        contract: Contract,
        rank: int,
        spans: list[int],
        dtype: torch.dtype,
        *,
        in_place: bool = False,
        operation: str = "sum",
        symmetric: Callable[[int, torch.dtype], SymmetricBuffer] | None = None,
        keeps_input: bool = True,
    ) -> None:
        self.contract, self.rank, self.spans, self.dtype, self.in_place = contract, rank, spans, dtype, in_place
        self._keeps_input = keeps_input and not in_place
        self._combine = OPERATIONS[operation]
        self._length = contract.class_lengths(spans, max(1, _ALIGNMENT // dtype.itemsize))
        counts = [[int(self._places(one, buffer)[-1]) for one in range(contract.ranks)] for buffer in (INPUT, OUTPUT)]
        mine = counts[INPUT][rank], counts[OUTPUT][rank]
        self._symmetric: list[SymmetricBuffer] = []

        def memory(buffer: int) -> torch.Tensor:
            if symmetric is None:
                return torch.empty(mine[buffer], dtype=dtype, device="cpu")
            self._symmetric.append(symmetric(max(1, *counts[buffer]), dtype))  # equally large everywhere
            return self._symmetric[-1].local[: mine[buffer]]

        if in_place:
            assert contract.in_place is not None
            holder = contract.holder(rank)
            held = OUTPUT if holder == INPUT else INPUT
            longer = memory(holder)
            begin = int(self._places(rank, holder)[contract.in_place[rank]])
            shorter = longer if mine[held] == len(longer) else longer[begin : begin + mine[held]]
            self._memory = {holder: longer, held: shorter}
        else:
            self._memory = {INPUT: memory(INPUT), OUTPUT: memory(OUTPUT)}
        self.source: torch.Tensor | SymmetricBuffer = self._memory[INPUT]
        self.out: torch.Tensor | SymmetricBuffer = self._memory[OUTPUT]
        if self._symmetric:
            self.source, self.out = self._symmetric[0], self._symmetric[-1]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output; one and the same where they are as long as each other and in place."""
        return self._memory[INPUT], self._memory[OUTPUT]

    def fill(self) -> None:
        """This rank's input; its output is poisoned, so that what nobody writes is wrong."""
        poison(self._memory[OUTPUT])
        poison(self._memory[INPUT])
        self._memory[INPUT].copy_(self._given)

    def rest(self) -> None:
        """All zero: may be summed into itself as often as one likes."""
        for one in self._memory.values():
            one.zero_()

    def wrong(self) -> tuple[int, str]:
        """How many elements are not what they must be, and a few words about the first."""
        expected, known = self._expected
        found = [("output", self._memory[OUTPUT], expected, known)]
        if self._keeps_input:
            found.append(("input", self._memory[INPUT], self._given, torch.tensor(True, device="cpu")))
        count, said = 0, ""
        for name, memory, wanted, judged in found:
            wrong = torch.nonzero((memory != wanted) & judged).flatten()
            if len(wrong) and not said:
                at = int(wrong[0])
                said = f"{name}[{at}] of rank {self.rank} is {memory[at].item()} instead of {wanted[at].item()}"
            count += len(wrong)
        return count, said

    def release(self) -> None:
        for one in self._symmetric:
            one.release()

    def _classes(self, rank: int, buffer: int) -> NDArray[np.int64]:
        contract = self.contract
        first = contract.first_item if buffer == INPUT else contract.first_output
        return (contract.item_class if buffer == INPUT else contract.output_class)[first[rank] : first[rank + 1]]

    def _places(self, rank: int, buffer: int) -> NDArray[np.int64]:
        """Where each chunk of a buffer begins, and its end as a last entry, in elements."""
        return np.concatenate([[0], np.cumsum(self._length[self._classes(rank, buffer)])]).astype(np.int64)

    def _input_of(self, rank: int) -> torch.Tensor:
        most = min(_MOST, _EXACT_INTEGERS.get(self.dtype, 1 << 24) // self.contract.ranks)
        count = int(self._places(rank, INPUT)[-1])
        generator = torch.Generator().manual_seed(1 + rank)
        return torch.randint(0, max(2, most), (count,), generator=generator, dtype=self.dtype, device="cpu")

    @cached_property
    def _given(self) -> torch.Tensor:
        return self._input_of(self.rank)

    @cached_property
    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the output must be, and which of its elements the contract says anything about."""
        contract = self.contract
        places = self._places(self.rank, OUTPUT)
        wanted = contract.after[contract.first_output[self.rank] : contract.first_output[self.rank + 1]]
        out = torch.zeros(int(places[-1]), dtype=self.dtype, device="cpu")
        known = torch.zeros(len(out), dtype=torch.bool, device="cpu")
        parts = [
            (int(item), chunk)
            for chunk, total in enumerate(wanted)
            if total >= 0
            for item in contract.total_items[contract.total_start[total] : contract.total_start[total + 1]]
        ]
        begun = [False] * len(wanted)
        for rank in range(contract.ranks):  # one rank's input at a time: all of them may be a lot
            first, last = int(contract.first_item[rank]), int(contract.first_item[rank + 1])
            mine = [(item - first, chunk) for item, chunk in parts if first <= item < last]
            if not mine:
                continue
            values = self._given if rank == self.rank else self._input_of(rank)
            begins = self._places(rank, INPUT)
            for item, chunk in mine:
                part = values[begins[item] : begins[item + 1]]
                place = slice(int(places[chunk]), int(places[chunk + 1]))
                out[place] = self._combine(out[place], part) if begun[chunk] else part
                known[place] = begun[chunk] = True
        return out, known
