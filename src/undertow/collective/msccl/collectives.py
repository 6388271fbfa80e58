"""Collectives as MSCCLang has them: what buffers hold before, and whether they hold the right thing after.

The four usual ones come with one of our contracts. A subclass of `Collective` says both in its own words; its contract
is then what its program computes, and `check` says whether that is what was wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..contract import BUILT_IN, Contract
from .chunks import Buffer, Chunk, Content

if TYPE_CHECKING:
    from .program import MSCCLProgram

Slots = list[Content]


class Collective:
    """To be subclassed: `init_buffers` and `check`; `get_buffer_index` where one buffer lies inside another."""

    contract_name = ""  # of one of our own contracts

    def __init__(self, num_ranks: int, chunk_factor: int, inplace: bool, *others: object) -> None:
        self.num_ranks = num_ranks
        self.chunk_factor = chunk_factor
        self.inplace = inplace
        self.name = "custom"

    def init_buffers(self) -> list[dict[Buffer, Slots]]:
        """For each rank, what its input and output hold before."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its buffers hold: init_buffers")

    def check(self, prog: MSCCLProgram) -> bool:
        """Whether `prog.buffers[rank][Buffer.output]` is what it must be."""
        return True

    def get_buffer_index(self, rank: int, buffer: object, index: int) -> tuple[object, int]:
        """Where a slot really lies."""
        return buffer, index

    def contract(self) -> Contract | None:
        """Of the usual collectives; None: it means what its program computes."""
        return None


class _BuiltIn(Collective):
    """One of the usual ones; subclasses tell where input and output lie in place."""

    def __init__(self, num_ranks: int, chunk_factor: int, inplace: bool, *others: object) -> None:
        super().__init__(num_ranks, chunk_factor, inplace, *others)
        self.name = self.contract_name.replace("_", "") if self.contract_name != "reduce_scatter" else "reduce_scatter"

    def contract(self) -> Contract:
        make: Callable[[int, int], Contract] = BUILT_IN[self.contract_name]
        return make(self.num_ranks, self.chunk_factor)

    def init_buffers(self) -> list[dict[Buffer, Slots]]:
        contract = self.contract()
        made = []
        for rank in range(self.num_ranks):
            given: Slots = [Chunk(rank, index, *self.goal(rank, index)) for index in range(contract.inputs[rank])]
            outputs: Slots = [None] * contract.outputs[rank]
            if not self.inplace:
                made.append({Buffer.input: given, Buffer.output: outputs})
            elif len(outputs) > len(given):
                start = rank * self.chunk_factor
                outputs[start : start + len(given)] = given
                made.append({Buffer.input: outputs, Buffer.output: outputs})
            else:
                made.append({Buffer.input: given, Buffer.output: given})
        return made

    def goal(self, rank: int, index: int) -> tuple[int, int]:
        """Rank and index where a chunk of an input is wanted; rank -1: on all of them."""
        return -1, index

    def check(self, prog: MSCCLProgram) -> bool:
        contract = self.contract()
        items = [(rank, chunk) for rank, count in enumerate(contract.inputs) for chunk in range(count)]
        right = True
        for rank in range(self.num_ranks):
            wanted = contract.after[contract.first_output[rank] : contract.first_output[rank + 1]]
            for index, total in enumerate(wanted.tolist()):
                parts = contract.total_items[contract.total_start[total] : contract.total_start[total + 1]].tolist()
                buffer, place = self.get_buffer_index(rank, Buffer.output, index)
                found = prog.buffers[rank][buffer][place]
                if found is None or sorted(found.origins) != sorted(items[part] for part in parts):
                    names = ", ".join(str(items[part]) for part in parts[:8]) + (", ..." if len(parts) > 8 else "")
                    print(f"Output {index} of rank {rank} must be made of {names}, but holds {found}.")
                    right = False
        return right


class AllReduce(_BuiltIn):
    contract_name = "all_reduce"

    def get_buffer_index(self, rank: int, buffer: object, index: int) -> tuple[object, int]:
        return (Buffer.input, index) if self.inplace and buffer is Buffer.output else (buffer, index)


class AllGather(_BuiltIn):
    contract_name = "all_gather"

    def goal(self, rank: int, index: int) -> tuple[int, int]:
        return -1, rank * self.chunk_factor + index

    def get_buffer_index(self, rank: int, buffer: object, index: int) -> tuple[object, int]:
        if self.inplace and buffer is Buffer.input:
            return Buffer.output, index + rank * self.chunk_factor
        return buffer, index


class ReduceScatter(_BuiltIn):
    contract_name = "reduce_scatter"

    def goal(self, rank: int, index: int) -> tuple[int, int]:
        return index // self.chunk_factor, index % self.chunk_factor

    def get_buffer_index(self, rank: int, buffer: object, index: int) -> tuple[object, int]:
        if self.inplace and buffer is Buffer.output:
            return Buffer.input, index + rank * self.chunk_factor
        return buffer, index


class AllToAll(_BuiltIn):
    contract_name = "all_to_all"

    def goal(self, rank: int, index: int) -> tuple[int, int]:
        return index // self.chunk_factor, rank * self.chunk_factor + index % self.chunk_factor

    def get_buffer_index(self, rank: int, buffer: object, index: int) -> tuple[object, int]:
        return (Buffer.input, index) if self.inplace and buffer is Buffer.output else (buffer, index)
