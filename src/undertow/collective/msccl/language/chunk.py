"""Where MSCCLang programs look for chunks."""

from ..chunks import Chunk, ReduceChunk

__all__ = ["Chunk", "ReduceChunk"]
