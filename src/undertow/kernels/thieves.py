"""Kernels that take a known part of a GPU for a known time, and say where they ran: to tell causes of slowdown apart.

| thief | takes | leaves alone |
|---|---|---|
| occupy | all registers of as many SMs as it has CTAs | memory, but for a word each |
| read, of a footprint beyond the L2 | memory bandwidth, some issue slots of its SMs | |
| read, of a footprint within the L2 | bandwidth and lines of the L2 | memory |

Each CTA runs until `nanoseconds` of the global timer have passed since it began and then records its SM. Nothing here
signals or waits for another CTA; what they store is ordered by the launch only.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

OCCUPY_WARPS = 32
OCCUPY_BLOCK = 32 * 32 * 32  # with half as many again: 48 registers of each of 1024 threads, nearly all of an SM
READ_WARPS = 16
READ_BLOCK = 8192  # int32: four 16-byte loads in each of 512 threads


@triton.jit(do_not_specialize=["record", "sink", "nanoseconds"])
def occupy_kernel(record, sink, nanoseconds: tl.int64, BLOCK: tl.constexpr):
    """record[program] = its SM; CTAs hold their registers until the time is over."""
    program = tl.program_id(0)
    began = globaltimer().to(tl.int64)
    most, rest = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 2)
    held, more = most.to(tl.float32) + program, rest.to(tl.float32) + program
    while globaltimer().to(tl.int64) - began < nanoseconds:
        held = held * 0.999 + 0.5
        more = more * 0.999 + 0.5
    tl.store(sink + most, held, mask=held < -1.0)  # never true, but the compiler does not know
    tl.store(sink + rest, more, mask=more < -1.0)
    tl.store(record + program, smid())


@triton.jit(do_not_specialize=["record", "sink", "footprint", "blocks", "nanoseconds"])
def read_kernel(record, sink, footprint, blocks: tl.int64, nanoseconds: tl.int64, BLOCK: tl.constexpr):
    """Read blocks of `footprint` again and again; record[program] = its SM, record[programs + program] = blocks read.

    Loads are of the L2's kind (.cg): the L1 would serve a small footprint by itself.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    began = globaltimer().to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    block = program.to(tl.int64)
    count = 0
    while globaltimer().to(tl.int64) - began < nanoseconds:
        first = tl.multiple_of(footprint + (block % blocks) * BLOCK, 16)
        total += tl.load(first + offsets, cache_modifier=".cg")
        block += programs
        count += 1
    tl.store(sink + offsets, total, mask=total == -123456789)
    tl.store(record + program, smid())
    tl.store(record + programs + program, count)


def occupy(record: torch.Tensor, sink: torch.Tensor, ctas: int, nanoseconds: int) -> None:
    """Take `ctas` SMs. `record`: int32, at least that many; `sink`: float32, `OCCUPY_BLOCK` of them."""
    occupy_kernel[(ctas,)](record, sink, nanoseconds, OCCUPY_BLOCK, num_warps=OCCUPY_WARPS)


def read(record: torch.Tensor, sink: torch.Tensor, footprint: torch.Tensor, ctas: int, nanoseconds: int) -> None:
    """Read int32 `footprint` for so long on `ctas` CTAs. `record`: int32, twice as many; `sink`: int32, a block."""
    blocks = footprint.numel() // READ_BLOCK
    read_kernel[(ctas,)](record, sink, footprint, blocks, nanoseconds, READ_BLOCK, num_warps=READ_WARPS)
