"""MSCCLang programs, unchanged but for their import lines.

    from msccl.language import *               from undertow.collective.msccl.language import *
    from msccl.topologies import *             from undertow.collective.msccl.topologies import *
    from msccl.language.collectives import *   from undertow.collective.msccl.language.collectives import *

Or all of it from here.
"""

from .chunks import Buffer, Chunk, ReduceChunk
from .collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from .program import XML, Check, MSCCLProgram, Print, Ref, ThreadblockPolicy, chunk, create_scratch
from .topologies import Topology, dgx1, dgx_a100, fully_connected, hub_and_spoke, line, nvlink_only, ring, star

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
    "Topology",
    "chunk",
    "create_scratch",
    "dgx1",
    "dgx_a100",
    "fully_connected",
    "hub_and_spoke",
    "line",
    "nvlink_only",
    "ring",
    "star",
]
