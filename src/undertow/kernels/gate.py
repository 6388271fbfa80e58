"""The kernel of a gate: one small CTA a rank, which ends when all ranks have come as far (`fabric/gate.py`).

    epoch + 1 -> set own word at every rank -> wait until all own words have it -> advance the epoch

Memory ordering. Words are set by releases and waited for by acquires at system scope. So what kernels behind a gate
write comes after what kernels in front of it, on any rank, have read (`Fabric.meeting`); what a fused kernel lets pass
has an order of its own. The epoch is read and written by one CTA; the launch orders it.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .interpret import poll
from .signals import ARRIVED, LATE, report_error, signal_set_each


@triton.jit(do_not_specialize=["words", "epoch", "ranks", "abort", "error", "deadline_ns"])
def gate_kernel(words, epoch, ranks: tl.int32, abort, error, deadline_ns: tl.int64, LANES: tl.constexpr):
    """`words`: addresses, first of this rank's word at every rank, then of every rank's word at this one. `ranks` 0:
    nothing happens. LANES: threads of the CTA, at least as many as ranks.
    """
    lanes = tl.arange(0, LANES)
    here = lanes < ranks
    number = tl.load(epoch) + tl.where(ranks > 0, 1, 0)
    theirs = tl.load(words + lanes, mask=here, other=0).to(tl.pointer_type(tl.int32))
    mine = tl.load(words + ranks + lanes, mask=here, other=0).to(tl.pointer_type(tl.int32))
    wanted = tl.zeros_like(lanes) + number
    signal_set_each(theirs, wanted, here)
    status = tl.max(poll(mine, wanted, here, abort, deadline_ns), axis=0)
    tl.debug_barrier()  # every thread has read the epoch
    tl.store(epoch, number)
    if status != ARRIVED:
        report_error(error, status)
        if status == LATE:  # the watchdog will say so too, but this rank's next kernels need not wait for it
            report_error(abort, 1)
