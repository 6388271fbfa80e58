"""A kernel that posts one transfer to the proxy ring."""

from __future__ import annotations

import triton
import triton.language as tl

from undertow.fabric.post_ring import Post
from undertow.fabric.proxy import Proxy
from undertow.kernels.proxy import post_transfer
from undertow.kernels.signals import report_error


@triton.jit(
    do_not_specialize=[
        *("ring", "head", "capacity", "source_buffer", "source_offset", "rank", "buffer", "offset"),
        *("count", "signal", "abort", "error"),
    ]
)
def post_one(
    ring,
    head,
    capacity: tl.int32,
    source_buffer: tl.int64,
    source_offset: tl.int64,
    rank: tl.int64,
    buffer: tl.int64,
    offset: tl.int64,
    count: tl.int64,
    signal: tl.int64,
    abort,
    error,
    DEADLINE: tl.constexpr,
):
    deadline = tl.full([], DEADLINE, tl.int64)
    status = post_transfer(
        ring, head, capacity, source_buffer, source_offset, rank, buffer, offset, count, signal, abort, deadline
    )
    if status != 0:
        report_error(error, status)


def post_from_kernel(proxy: Proxy, post: Post) -> None:
    guard = proxy.group.fabric.guard
    post_one[(1,)](
        proxy.ring(),
        proxy.head,
        proxy.capacity,
        post.source_buffer,
        post.source_offset,
        post.destination_rank,
        post.destination_buffer,
        post.destination_offset,
        post.byte_count,
        post.signal_index,
        guard.abort,
        guard.error,
        DEADLINE=20_000_000_000,
    )
