"""Where MSCCLang programs look for the language."""

from ..chunks import Buffer, Chunk, ReduceChunk
from ..collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from ..program import XML, Check, MSCCLProgram, Print, Ref, ThreadblockPolicy, chunk, create_scratch

__all__ = [
    "XML",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Buffer",
    "Check",
    "Chunk",
    "Collective",
    "MSCCLProgram",
    "Print",
    "ReduceChunk",
    "ReduceScatter",
    "Ref",
    "ThreadblockPolicy",
    "chunk",
    "create_scratch",
]
