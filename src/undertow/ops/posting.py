"""What calls on a GPU share that post to the proxy's ring: the proxy, memory used in turn, counts in device memory.

**Memory.** What a rank posts is made in, and what others post lands in, one symmetric buffer of two halves, used in
turn. A rank writes to the half of the call before last in a kernel that stands behind its waiting kernels of the last
call. So it has what the others posted in the last call, which they did behind their taking of the call before: they
have read what it posted then, and it may write there again, here and at their places. Where in a call two ranks have
nothing for each other, that proves nothing, and the call ends with a barrier of all ranks' streams; a graph cannot hold
one.

**Before anything waits.** Loading a kernel, pinning memory or making symmetric memory may wait for the kernels of this
rank, with the lock of torch's context or the interpreter's, which the proxy's thread may need, for which a waiting
kernel waits. So whatever is new is made on an idle stream; a call like one before it waits for nothing.

What callers do while such a call is under way, and how far their hosts run ahead, is their own affair where the
proxy's copies have a context of their own, but that over `net` nobody may wait for kernels with the interpreter's lock
in hand, which its threads need. Where there was no room for a context (`fabric/copy_context.py`), the copies' streams
share queues and a lock with all others of this rank, so whatever is enqueued behind a waiting kernel might stand before
a copy that this waits for: there the host waits at each call's end, before it enqueues anything else. (Launches of the
call itself stand behind its first kernel all the same.) For a replay of a captured one it cannot; whoever loads a
kernel then, copies from memory that is not pinned, or enqueues a thousand launches more, settles the stream first.

**Graphs.** Halves and counts of arrivals are the kernels' own, in device memory, so a captured call can be replayed.
The proxy's thread serves replays as it serves calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument
from ..fabric.base import WAITING
from ..fabric.proxy import Proxy
from ..plan.bags import aligned
from ..plan.posts import PARCELS, SIGNALS

if TYPE_CHECKING:
    from ..fabric.cuda import CudaFabric
    from ..fabric.symmetric import SymmetricBuffer

_HALVES = 2
_POSTING: dict[str, object] = {"dma": object(), "net": object()}  # names of what is kept with a fabric


class Posting:
    """The proxy of a group over one lane, and what its kernels keep in device memory. Made collectively.

    `state`: calls, whether one failed, and how many posts of each signal were waited for. `tickets`: zeros, which each
    launch leaves as zeros.
    """

    def __init__(self, fabric: CudaFabric, lane: str) -> None:
        from ..kernels.embedding_posts import STATE_WORDS

        fabric.rest()  # of the other lane's calls
        signals = fabric.group.size * SIGNALS
        with torch.inference_mode(False):  # it outlives this call
            self.proxy = Proxy(fabric, signals=signals, lane=lane)
            self.state = torch.zeros(STATE_WORDS + signals, dtype=torch.int32, device=fabric.device)
            self.idle = torch.zeros_like(self.state)  # for launches that only load
            self.tickets = torch.zeros(fabric.group.size * PARCELS + 1, dtype=torch.int32, device=fabric.device)
        fabric.settle()
        self._name, self._largest = f"posts over {lane}", 0

    @staticmethod
    def of(fabric: CudaFabric, lane: str) -> Posting:
        key = id(_POSTING[lane])
        found = fabric.kept.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                was = f"the first fused one over {lane}, inside a CUDA graph capture"
                raise InvalidArgument(argument="call", was=was, must="made once before it is captured: it makes a ring")
            found = fabric.kept[key] = Posting(fabric, lane)
        assert isinstance(found, Posting)
        return found

    def memory(self, fabric: CudaFabric, nbytes: int) -> tuple[SymmetricBuffer, int]:
        """Two halves of so many bytes, and the number by which posts name them. Collective where they grow."""
        if nbytes > self._largest and not torch.cuda.is_current_stream_capturing():
            fabric.settle()
            self._largest = nbytes
        space = fabric.workspace(self._name, _HALVES * nbytes)
        is_new = space.identity not in self.proxy.posts.attached
        number = self.proxy.attach(space)
        if is_new:
            self.proxy.group.barrier()  # all know it before any post names it
        return space, number

    @staticmethod
    def follow(fabric: CudaFabric) -> None:
        """Calls on different streams come one after the other. When a graph is replayed is for its owner to order."""
        fabric.follow(WAITING)

    def finish(self, fabric: CudaFabric, meets: bool) -> None:
        """The end of a call. `meets`: every rank had something for every other one."""
        fabric.enqueued(WAITING)
        if torch.cuda.is_current_stream_capturing():
            return  # it meets (`refuse_capture`)
        if not meets or not self.proxy.copies().is_own:
            fabric.settle()
        if not meets:
            fabric.group.barrier()


def half_of(space: SymmetricBuffer) -> int:
    """Bytes of a half of the memory, which all shapes share: not of a call's shape."""
    return space.nbytes // _HALVES // aligned(1) * aligned(1)


def refuse_capture(meets: bool, lane: str) -> None:
    """A call in which two ranks have nothing for each other ends with a barrier, which a graph cannot hold."""
    if not meets and torch.cuda.is_current_stream_capturing():
        was = "one in which two ranks have nothing for each other, inside a CUDA graph capture"
        must = f"outside a capture over {lane}: such calls end with a barrier of all ranks"
        raise InvalidArgument(argument="call", was=was, must=must)
