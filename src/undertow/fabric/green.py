"""A GPU divided into two parts that share no SM: green contexts made from one split of the card.

Two green contexts that are made one by one may overlap, for each takes its SMs from the whole card. So the card's SMs
are split once: a group of the size asked for, and what remains. Each half becomes a context with a stream of its own;
work enqueued on that stream stays on that half. The driver rounds sizes up (Hopper: to multiples of 8).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .. import errors

_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, the only flag there is, and required
_NON_BLOCKING = 1


class _Resource(ctypes.Structure):
    """CUdevResource: 144 bytes in every version of the driver's interface; the number of SMs leads its last part."""

    _fields_ = (
        ("type", c_uint),
        ("internal", ctypes.c_ubyte * 92),
        ("multiprocessors", c_uint),
        ("external", ctypes.c_ubyte * 44),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """Some SMs of a GPU, and a stream whose work stays on them. Contexts live as long as the process."""

    multiprocessors: int
    context: int
    stream: torch.cuda.Stream


def divided(device: torch.device, multiprocessors: int) -> tuple[Part, Part]:
    """A part of about so many SMs for computing, and the others for communicating.

    The others are split off: the driver rounds that part up, which may take a few SMs from a large computing part;
    rounding up the large one might leave the other nothing.
    """
    visible = int(torch.cuda.get_device_properties(device).multi_processor_count)
    beside, computing = halves(device.index, visible - multiprocessors)
    return computing, beside


@cache
def halves(device: int, multiprocessors: int) -> tuple[Part, Part]:
    """A part of at least so many SMs and the remaining ones. Made once for each size."""
    visible = int(torch.cuda.get_device_properties(device).multi_processor_count)
    if not 1 <= multiprocessors < visible:
        must = f"between 1 and {visible - 1}, so that both sides have SMs"
        raise errors.InvalidArgument(argument="multiprocessors", was=multiprocessors, must=must)
    torch.cuda.synchronize(device)  # torch's context exists and is current
    driver = ctypes.CDLL("libcuda.so.1")
    whole, part, rest = _Resource(), _Resource(), _Resource()
    _call(driver, "cuDeviceGetDevResource", c_int(device), ctypes.byref(whole), c_int(_SM))
    groups = c_uint(1)
    _call(
        driver, "cuDevSmResourceSplitByCount", ctypes.byref(part), ctypes.byref(groups), ctypes.byref(whole),
        ctypes.byref(rest), c_uint(0), c_uint(multiprocessors),
    )  # fmt: skip
    if groups.value != 1 or rest.multiprocessors == 0:
        reason = f"the driver cannot take {multiprocessors} of {whole.multiprocessors} SMs and leave any"
        raise errors.StrategyUnavailable(strategy="a partition", reason=reason, possible="fewer SMs for one side")
    return _part(driver, device, part), _part(driver, device, rest)


def _part(driver: Any, device: int, resource: _Resource) -> Part:
    description, context, stream = c_void_p(), c_void_p(), c_void_p()
    _call(driver, "cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(resource), c_uint(1))
    _call(driver, "cuGreenCtxCreate", ctypes.byref(context), description, c_int(device), c_uint(_DEFAULT_STREAM))
    _call(driver, "cuGreenCtxStreamCreate", ctypes.byref(stream), context, c_uint(_NON_BLOCKING), c_int(0))
    made = torch.cuda.ExternalStream(stream.value, device=device)  # type: ignore[no-untyped-call]
    assert context.value is not None
    return Part(int(resource.multiprocessors), int(context.value), made)


def _call(driver: Any, name: str, *arguments: Any) -> None:
    function = getattr(driver, name, None)
    code = -1 if function is None else int(function(*arguments))
    if code:
        reason = f"the driver has no {name}" if function is None else f"{name} failed with CUDA error {code}"
        raise errors.StrategyUnavailable(strategy="a partition", reason=reason, possible="the whole GPU")
