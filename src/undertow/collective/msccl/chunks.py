"""What a slot of a buffer holds while an MSCCLang program runs: a chunk with its origin and goal, or a sum."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Buffer(Enum):
    """The three that every rank has; any other hashable value names a further scratch buffer."""

    input = "i"
    output = "o"
    scratch = "s"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, order=True)
class Chunk:
    """Chunk `origin_index` of `origin_rank`'s input; where it is going, if anywhere in particular."""

    origin_rank: int
    origin_index: int
    dst_rank: int = -1
    dst_index: int = -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunk) and self.origin == other.origin

    def __hash__(self) -> int:
        return hash(self.origin)

    @property
    def origin(self) -> tuple[int, int]:
        return self.origin_rank, self.origin_index

    @property
    def origins(self) -> tuple[tuple[int, int], ...]:
        return (self.origin,)

    def reduce(self, dst: int, chunk: Chunk | ReduceChunk) -> ReduceChunk:
        """The sum of this one and another, on rank `dst`."""
        return ReduceChunk(dst, [self]).reduce(dst, chunk)


class ReduceChunk:
    """A sum. Two are equal if they are sums of the same chunks, each as often."""

    def __init__(self, creation_rank: int, chunks: list[Chunk]) -> None:
        self.creation_rank = creation_rank
        self.chunks = sorted(chunks, key=lambda one: one.origin)

    def reduce(self, dst: int, chunk: Chunk | ReduceChunk) -> ReduceChunk:
        more = chunk.chunks if isinstance(chunk, ReduceChunk) else [chunk]
        return ReduceChunk(self.creation_rank, self.chunks + more)

    def sort(self) -> None:
        """Chunks by their origins."""
        self.chunks.sort(key=lambda one: one.origin)

    @property
    def origins(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(one.origin for one in self.chunks))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReduceChunk) and self.origins == other.origins

    def __hash__(self) -> int:
        return hash(self.origins)

    def __repr__(self) -> str:
        return f"ReduceChunk({', '.join(map(str, self.origins))})"


Content = Chunk | ReduceChunk | None
