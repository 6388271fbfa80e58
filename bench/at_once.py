"""Device time of a call that all ranks of one GPU begin at the same nanosecond, their hosts ahead of it.

The clock is the GPU's own (%globaltimer), which ranks of a virtual node share. Everybody learns a time some
milliseconds ahead, enqueues a kernel that lasts until then, then the call, then a kernel that writes down the time:

    seconds = the last rank's end - the common begin

What the host needs to enqueue the call is not in it, as long as it needs less than `lead`: so it is where a training
step keeps the GPU busy. CUDA events cannot say this: ranks' begins lie apart by as much as their hosts do, or as one
rank's matmul holds up another's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

import undertow as ut


@triton.jit(do_not_specialize=["when"])
def _until_kernel(when: tl.int64):
    now = globaltimer().to(tl.int64)
    while now < when:
        now = globaltimer().to(tl.int64)


@triton.jit
def _stamp_kernel(word):
    tl.store(word, globaltimer().to(tl.int64))


class AtOnce:
    """`seconds(call)`: of all ranks of `group`, the same number everywhere. Collective."""

    def __init__(self, group: ut.Group, lead: float = 8e-3) -> None:
        self._group, self._lead = group, round(lead * 1e9)
        self._word = torch.zeros(1, dtype=torch.int64, device=group.device)
        self._until: Any = _until_kernel
        self._stamp: Any = _stamp_kernel
        self._until[(1,)](0, num_warps=1)
        self._now()

    def _now(self) -> int:
        self._stamp[(1,)](self._word, num_warps=1)
        return int(self._word.item())

    def seconds(self, call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        begin = max(self._group.exchange(self._now(), "the time")) + self._lead
        self._until[(1,)](begin, num_warps=1)
        call()
        end = self._now()
        return (max(self._group.exchange(end, "the end")) - begin) * 1e-9
