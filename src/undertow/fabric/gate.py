"""Where ranks share a GPU: nobody's waiting kernel takes SMs before all ranks have come as far.

    rank 0   ... matmul | gate | fused kernel: waits in all its CTAs for what others compute in theirs
    rank 3   ... matmul in clusters of 8 SMs, for which three waiting grids would leave no room | gate | fused kernel

A fused kernel is as large as its rank's part of the GPU, and its CTAs wait for those of other ranks. On a GPU of its
own that is nobody's loss. On a shared one the rank that is waited for may have a matmul in front which needs several
SMs of one cluster (cuBLAS takes up to 8), and finds only single ones between the others' CTAs: all wait until the
deadline. So each rank first launches one CTA that waits for all others. `UNDERTOW_GATE=off` leaves it out, to measure
kernels as they are on GPUs of their own. Ranks that share a GPU and cannot reach each other's memory have no gate.

The same meeting lets ranks use one memory for call after call where addresses must not change (`Fabric.meeting`), on
any node and whatever UNDERTOW_GATE says: who is through it overwrites what others read before they came to it. Each use
has a gate of its own: ranks that come to different ones wait until the deadline, and nobody takes one for the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .cuda import CudaFabric


class Gate:
    """Call it: the current stream goes on when all ranks of the group have called it as often. Making it is collective.

    It counts on the device, so captured calls are replayed; calls on several streams come one after the other.
    """

    def __init__(self, fabric: CudaFabric, name: str) -> None:
        group = fabric.group
        self._fabric, self._name, self._signals = fabric, name, fabric.signals(group.size)
        here, ranks = group.rank, range(group.size)
        addresses = [self._signals.address(one, here) for one in ranks]
        addresses += [self._signals.address(here, one) for one in ranks]
        self._words = torch.tensor(addresses, dtype=torch.int64, device=fabric.device)
        self._epoch = torch.zeros(1, dtype=torch.int32, device=fabric.device)
        self._lanes = max(32, 1 << (group.size - 1).bit_length())
        self._launch(0)  # compiled and loaded before anybody waits in it
        torch.cuda.synchronize(fabric.device)
        group.barrier()

    def __call__(self) -> None:
        self.follow()
        self._launch(self._fabric.group.size)
        self._fabric.enqueued(self._name)

    def follow(self) -> None:
        """The current stream comes after the last call. Refused on a second stream of one capture."""
        self._fabric.follow(self._name)

    def _launch(self, ranks: int) -> None:
        from ..kernels.gate import gate_kernel

        guard, deadline = self._fabric.guard, int(self._fabric.group.deadline * 1e9)
        kernel: Any = gate_kernel
        kernel[(1,)](
            self._words, self._epoch, ranks, guard.abort, guard.error, deadline, LANES=self._lanes,
            num_warps=self._lanes // 32,
        )  # fmt: skip
