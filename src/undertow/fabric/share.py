"""Keeping computation to a part of the device while communication runs beside it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from .. import errors


@contextlib.contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """The CPU's partition: torch computes with `count` threads inside."""
    before = torch.get_num_threads()
    _check(count)
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def on_multiprocessors(count: int | None, device: torch.device, shares_device: bool) -> Iterator[None]:
    """The GPU's partition, a green context: what is enqueued inside, on the stream that is current inside, stays on
    `count` SMs. It begins after the caller's work so far, and the caller's next work comes after it.
    """
    _check(count)
    visible = int(torch.cuda.get_device_properties(device).multi_processor_count)
    if count is None:
        yield
        return
    if count > visible:
        raise errors.InvalidArgument(argument="multiprocessors", was=count, must=f"at most the {visible} SMs seen here")
    if shares_device:
        reason = "ranks share this GPU, and MPS and green contexts exclude each other"
        raise errors.StrategyUnavailable(strategy="a partition", reason=reason, possible="kernels with a bounded grid")
    context = _green_context(device.index, count)
    outside = torch.cuda.current_stream(device)
    context.set_context()
    try:
        torch.cuda.current_stream(device).wait_stream(outside)
        yield
        outside.wait_stream(torch.cuda.current_stream(device))
    finally:
        context.pop_context()


_bound = threading.local()


def bound() -> int | None:
    """How many SMs kernels of this thread should size their persistent grids for; None: all that they see."""
    return getattr(_bound, "count", None)


@contextlib.contextmanager
def bounded_grids(count: int | None, device: torch.device) -> Iterator[None]:
    """The partition of a GPU that several ranks share, where no driver can divide it: grids of at most `count` CTAs.

    Kernels that size their own grid ask `bound()`; cuBLAS is told the number of SMs that it should fill. Kernels that
    know of neither take what they take: this is a request, and only what keeps to it is bounded.
    """
    _check(count)
    if count is None:
        yield
        return
    visible = int(torch.cuda.get_device_properties(device).multi_processor_count)
    if count > visible:
        raise errors.InvalidArgument(argument="multiprocessors", was=count, must=f"at most the {visible} SMs seen here")
    library, carved = torch.backends.cuda.preferred_blas_library(), torch._C._get_sm_carveout_experimental()
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the one of the two that takes a number of SMs
    torch._C._set_sm_carveout_experimental(visible - count)
    before, _bound.count = bound(), count
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(carved)
        torch.backends.cuda.preferred_blas_library(library)
        _bound.count = before


@contextlib.contextmanager
def on_part(count: int) -> Iterator[None]:
    """On `count` SMs, to which the driver keeps what is enqueued inside. A grid whose CTAs wait for each other must
    not be larger, so kernels that size their own ask `bound()` here, too.
    """
    before = bound()
    _bound.count = count if before is None else min(count, before)
    try:
        yield
    finally:
        _bound.count = before


def _check(count: int | None) -> None:
    if count is not None and count < 1:
        raise errors.InvalidArgument(argument="multiprocessors", was=count, must="at least 1, or None for all")


@cache
def _green_context(device: int, count: int) -> Any:
    """Made once for each size: contexts made one by one may overlap, and making one takes milliseconds."""
    try:
        from torch.cuda.green_contexts import GreenContext

        return GreenContext.create(num_sms=count, device_id=device)
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise errors.StrategyUnavailable(strategy="a partition", reason=reason, possible="the whole GPU") from error
