"""Where MSCCLang programs look for the language."""

from ..chunks import Buffer
from ..collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from ..program import XML, Check, MSCCLProgram, Print, Ref, ThreadblockPolicy, create_scratch
from ..program import chunk as chunk_at
from .chunk import Chunk, ReduceChunk

# `chunk` is a module here and the function programs call. A module's first import sets its name on the package: that
# has happened above, so the function has the last word however a program imports the two.
chunk = chunk_at

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
