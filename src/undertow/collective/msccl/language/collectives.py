"""Where MSCCLang programs look for collectives."""

from ..chunks import Buffer, Chunk, ReduceChunk
from ..collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter

__all__ = ["AllGather", "AllReduce", "AllToAll", "Buffer", "Chunk", "Collective", "ReduceChunk", "ReduceScatter"]
