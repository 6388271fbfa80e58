"""Driver calls that torch has no names for: stream memory operations, pinned registration, copies by address.

Ordering, from the driver's documentation: `write` is preceded by a system-wide fence (what the stream did before is
visible to whoever sees the value); `wait` is followed by one (what comes after sees what was released).

Called through ctypes: a staged transfer makes eight such calls per chunk, and this is the cheapest way there is from
Python (about a microsecond, without the GIL).
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from ctypes import c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch

from .. import errors

_WAIT_32, _WRITE_32 = 1, 2  # CUstreamBatchMemOpType
_OPERATION = struct.Struct("<iiQQIiQQ")  # type, padding, address, value, flags, padding, alias, padding
_MOST_OPERATIONS = 255  # of one batch: the driver's limit
_HOST, _DEVICE = 1, 2  # CUmemorytype
# CUDA_MEMCPY2D. Of source and destination: x, y, type, padding, host, device, array, pitch. Then width and height.
_ROWS = struct.Struct("<QQIIQQQQ" + "QQIIQQQQ" + "QQ")
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: int32(seen - value) >= 0, cyclic as ours
_PORTABLE_AND_MAPPED = 1 | 2
_NON_BLOCKING = 1
_MAP_HOST = 8  # CU_CTX_MAP_HOST
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_NO_ROOM = frozenset({2, 46, 801, 808, 809})  # out of memory or channels, busy, not supported, too many under MPS
_DISABLE_TIMING = 2
_CAPTURE_MODE_RELAXED = 2
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_NOT_READY = 600
_LOST = frozenset(  # whatever is called then returns the same
    {
        214,  # uncorrectable error of memory
        220,  # uncorrectable error of NVLink
        226,  # contained: such as a wrong access over NVLink
        700,  # illegal address
        702,  # a kernel took too long for a GPU with a display
        709,  # context is destroyed
        710,  # device assert
        714,  # hardware stack error
        715,  # illegal instruction
        716,  # misaligned address
        717,  # invalid address space
        718,  # invalid program counter
        719,  # launch failed
        721,  # tensor memory leaked
        805,  # MPS connection failed
        806,  # MPS remote procedure call failed
        810,  # MPS client terminated
        999,  # unknown
    }
)


def _declare() -> dict[str, Any]:
    """The driver's functions with their argument types; a wrong one would be a wrong address."""
    library = ctypes.CDLL("libcuda.so.1")
    signatures: dict[str, list[Any]] = {
        "cuStreamWriteValue32_v2": [c_void_p, c_uint64, c_uint32, c_uint32],
        "cuStreamWaitValue32_v2": [c_void_p, c_uint64, c_uint32, c_uint32],
        "cuStreamBatchMemOp_v2": [c_void_p, c_uint32, c_void_p, c_uint32],
        "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint32],
        "cuMemHostUnregister": [c_void_p],
        "cuMemcpyDtoHAsync_v2": [c_void_p, c_uint64, c_size_t, c_void_p],
        "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
        "cuMemcpy2DAsync_v2": [c_void_p, c_void_p],
        "cuStreamQuery": [c_void_p],
        "cuStreamSynchronize": [c_void_p],
        "cuStreamCreateWithPriority": [ctypes.POINTER(c_void_p), c_uint32, c_int],
        "cuThreadExchangeStreamCaptureMode": [ctypes.POINTER(c_int)],
        "cuStreamDestroy_v2": [c_void_p],
        "cuDeviceGet": [ctypes.POINTER(c_int), c_int],
        "cuDeviceGetP2PAttribute": [ctypes.POINTER(c_int), c_uint32, c_int, c_int],
        "cuDevicePrimaryCtxRetain": [ctypes.POINTER(c_void_p), c_int],
        "cuCtxGetCurrent": [ctypes.POINTER(c_void_p)],
        "cuCtxSetCurrent": [c_void_p],
        "cuCtxDestroy_v2": [c_void_p],
        "cuCtxCreate_v2": [ctypes.POINTER(c_void_p), c_uint32, c_int],
        "cuCtxPushCurrent_v2": [c_void_p],
        "cuCtxPopCurrent_v2": [ctypes.POINTER(c_void_p)],
        "cuEventCreate": [ctypes.POINTER(c_void_p), c_uint32],
        "cuEventRecord": [c_void_p, c_void_p],
        "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint32],
        "cuGetErrorName": [c_int, ctypes.POINTER(ctypes.c_char_p)],
    }
    functions = {}
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
        functions[name] = function
    return functions


_driver = _declare()
_write, _wait = _driver["cuStreamWriteValue32_v2"], _driver["cuStreamWaitValue32_v2"]
_batch = _driver["cuStreamBatchMemOp_v2"]
_record, _wait_event = _driver["cuEventRecord"], _driver["cuStreamWaitEvent"]
_copy_rows = _driver["cuMemcpy2DAsync_v2"]
_to_host, _to_device = _driver["cuMemcpyDtoHAsync_v2"], _driver["cuMemcpyHtoDAsync_v2"]


def check(code: int, rank: int | str = "unknown") -> None:
    """Raise the error of a driver call: `DeviceLost` where the context is gone."""
    if code == 0:
        return
    name = ctypes.c_char_p()
    _driver["cuGetErrorName"](code, ctypes.byref(name))
    text = name.value.decode() if name.value else str(code)
    if code in _LOST:
        raise errors.DeviceLost(rank=rank, reason=text)
    raise errors.UndertowError(reason=f"The CUDA driver refused a call: {text}.")


class _Threads(threading.local):
    """The devices whose context the driver knows on this thread."""

    def __init__(self) -> None:
        self.met: set[int] = set()


_threads = _Threads()


def meet(device: torch.device) -> None:
    """Make torch's context current on this thread, unless another one is: an autograd thread begins without any, and
    torch brings it only with its own first call there. Without the interpreter's lock, unlike that."""
    context = c_void_p()
    check(_driver["cuCtxGetCurrent"](ctypes.byref(context)))
    if not context.value:
        retain = _driver["cuDevicePrimaryCtxRetain"]
        check(retain(ctypes.byref(context), _number(device.index)))  # torch's, alive anyway
        check(_driver["cuCtxSetCurrent"](context))
    _threads.met.add(device.index)


def _number(index: int) -> int:
    """The driver's for a device, which need not be torch's."""
    number = c_int()
    check(_driver["cuDeviceGet"](ctypes.byref(number), index))
    return number.value


def has_atomics(index: int, peer: int) -> bool:
    """Whether one GPU's kernels can add to words in the memory of another one: over NVLink they can, over PCIe seldom.
    Asks without making a context of the other."""
    answer = c_int()
    numbers = _number(index), _number(peer)
    check(_driver["cuDeviceGetP2PAttribute"](ctypes.byref(answer), _NATIVE_ATOMICS, *numbers))
    return bool(answer.value)


def current_stream(device: torch.device) -> int:
    """Handle of the current stream, without making an object for it. What follows may call the driver."""
    if device.index not in _threads.met:
        meet(device)
    return torch._C._cuda_getCurrentRawStream(device.index)  # type: ignore[no-any-return,attr-defined,unused-ignore]


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream of its own, not one of torch's pool.

    Streams share a few hardware queues, and a stream that waits for a word blocks whatever is behind it in its queue.
    The pool makes 32 streams at once; two of those that wait for each other's work would often share a queue.
    """
    handle = c_void_p()
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # the driver needs torch's context, current on this thread
        check(_driver["cuStreamCreateWithPriority"](ctypes.byref(handle), _NON_BLOCKING, priority))
    stream = torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]
    weakref.finalize(stream, _driver["cuStreamDestroy_v2"], handle.value).atexit = False
    return stream


def bare_stream(priority: int = 0) -> int | None:
    """The handle of a new stream of the current context, or None where the GPU has no room; follow with
    `end_stream`."""
    handle = c_void_p()
    code = _driver["cuStreamCreateWithPriority"](ctypes.byref(handle), _NON_BLOCKING, priority)
    if code in _NO_ROOM:
        return None
    check(code)
    return handle.value


def new_context(device: torch.device) -> int | None:
    """A context of `device` beside torch's, not current on any thread; None where the GPU has no room for one."""
    torch.cuda.synchronize(device)  # torch's context exists
    handle = c_void_p()
    code = _driver["cuCtxCreate_v2"](ctypes.byref(handle), _MAP_HOST, _number(device.index))
    if code in _NO_ROOM:
        return None
    check(code)
    leave_context()
    return handle.value


def end_context(context: int) -> None:
    """Give its memory back: nobody has streams in it."""
    check(_driver["cuCtxDestroy_v2"](context))


def enter_context(context: int) -> None:
    """`context` is this thread's current one until `leave_context`."""
    check(_driver["cuCtxPushCurrent_v2"](context))


def leave_context() -> None:
    """The one before is current again."""
    check(_driver["cuCtxPopCurrent_v2"](ctypes.byref(c_void_p())))


def end_stream(stream: int) -> None:
    """Let go of what `bare_stream` made."""
    check(_driver["cuStreamDestroy_v2"](stream))


def synchronize(stream: int) -> None:
    """Wait until `stream` has done what it was given so far."""
    code = _driver["cuStreamSynchronize"](stream)
    if code:
        check(code)


def write(stream: int, address: int, value: int) -> None:
    """Set the word at `address` when `stream` gets there. Releases what the stream did before."""
    code = _write(stream, address, value & 0xFFFFFFFF, 0)
    if code:
        check(code)


def wait(stream: int, address: int, target: int) -> None:
    """Hold `stream` until the word at `address` reaches `target`. Acquires. Occupies no SM."""
    code = _wait(stream, address, target & 0xFFFFFFFF, _AT_LEAST)
    if code:
        check(code)


def packed(operations: Sequence[tuple[bool, int, int]]) -> bytes:
    """Waits (True, address, target) and writes (False, address, value) as `batch` takes them; these can be joined."""
    return b"".join(
        _OPERATION.pack(_WAIT_32 if waits else _WRITE_32, 0, address, value & 0xFFFFFFFF, _AT_LEAST, 0, 0, 0)
        for waits, address, value in operations
    )


def batch(stream: int, operations: bytes) -> None:
    """What `packed` made, in its order, in one stop of the stream (more than 255: in several); each as by `wait` or
    `write`.
    """
    count = len(operations) // _OPERATION.size
    if count > _MOST_OPERATIONS:
        head = _MOST_OPERATIONS * _OPERATION.size
        batch(stream, operations[:head])
        batch(stream, operations[head:])
        return
    code = _batch(stream, count, operations, 0)
    if code:
        check(code)


def new_event(device: torch.device) -> int:
    """An event for `after`; it lives as long as the process."""
    handle = c_void_p()
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # the driver needs torch's context, current on this thread
        check(_driver["cuEventCreate"](ctypes.byref(handle), _DISABLE_TIMING))
    assert handle.value is not None
    return handle.value


def after(stream: int, other: int, event: int) -> None:
    """What `stream` does next comes after what `other` was given so far. `event` is free again at once."""
    code = _record(event, other) or _wait_event(stream, event, 0)
    if code:
        check(code)


def record(stream: int, event: int) -> None:
    """Let `event` stand for what `stream` was given so far."""
    code = _record(event, stream)
    if code:
        check(code)


def wait_event(stream: int, event: int) -> None:
    """What `stream` does next comes after what `event` stands for."""
    code = _wait_event(stream, event, 0)
    if code:
        check(code)


@contextlib.contextmanager
def current(stream: torch.cuda.Stream) -> Iterator[None]:
    """`stream` is the current one inside; torch's own context manager takes ten times as long."""
    index = stream.device_index
    before = torch._C._cuda_getCurrentStream(index)
    torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)
    try:
        yield
    finally:
        torch._C._cuda_setStream(*before)


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    return torch.cuda.is_current_stream_capturing()


@cache
def _capture_info() -> Any:
    """Found at its first use: few need it."""
    function = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    to = ctypes.POINTER
    function.argtypes = [c_void_p, to(c_int), to(c_uint64), to(c_void_p), c_void_p, c_void_p]
    function.restype = c_int
    return function


def capture_of(stream: int) -> int:
    """The number of the capture that `stream` is in, different for every capture of the process; 0 for none."""
    return captured_graph(stream)[0]


def captured_graph(stream: int) -> tuple[int, int]:
    """That number, and the handle of the graph that is being captured; zeros for none."""
    status, number, graph = c_int(), c_uint64(), c_void_p()
    found = ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph)
    check(_capture_info()(stream, *found, None, None))
    return (number.value, graph.value or 0) if status.value == _CAPTURING else (0, 0)


def to_host(stream: int, host: int, device: int, size: int) -> None:
    """Copy by a copy engine, device to host, in the order of `stream`."""
    code = _to_host(host, device, size, stream)
    if code:
        check(code)


def to_device(stream: int, device: int, host: int, size: int) -> None:
    """Copy by a copy engine, host to device, in the order of `stream`."""
    code = _to_device(device, host, size, stream)
    if code:
        check(code)


class Rows(NamedTuple):
    """`height` rows of `size` bytes: the first at `host` and at `device`, each next one so many bytes further."""

    host: int
    device: int
    size: int
    height: int = 1
    host_step: int = 0
    device_step: int = 0

    @property
    def nbytes(self) -> int:
        return self.size * self.height

    @property
    def _on_host(self) -> tuple[int, ...]:
        return 0, 0, _HOST, 0, self.host, 0, 0, self.host_step

    @property
    def _on_device(self) -> tuple[int, ...]:
        return 0, 0, _DEVICE, 0, 0, self.device, 0, self.device_step

    def leave(self, stream: int) -> None:
        """Copy them by a copy engine, device to host, as one operation in the order of `stream`."""
        if self.height == 1:
            to_host(stream, self.host, self.device, self.size)
        else:
            check(_copy_rows(_ROWS.pack(*self._on_device, *self._on_host, self.size, self.height), stream))

    def arrive(self, stream: int) -> None:
        """The same, host to device."""
        if self.height == 1:
            to_device(stream, self.device, self.host, self.size)
        else:
            check(_copy_rows(_ROWS.pack(*self._on_host, *self._on_device, self.size, self.height), stream))


def entry_points() -> tuple[int, int, int]:
    """Addresses of what `to_host`, `to_device` and `write` call, for compiled code."""
    found = (ctypes.cast(one, c_void_p).value for one in (_to_host, _to_device, _write))
    to_host, to_device, write = (one for one in found if one is not None)
    return to_host, to_device, write


def register(address: int, size: int) -> None:
    """Pin host memory of any origin and map it into the device, at the same address."""
    check(_driver["cuMemHostRegister_v2"](address, size, _PORTABLE_AND_MAPPED))


def unregister(address: int) -> None:
    check(_driver["cuMemHostUnregister"](address))


def query(stream: int, rank: int) -> bool:
    """Whether `stream` is idle; raises `DeviceLost` if the context is gone."""
    code = _driver["cuStreamQuery"](stream)
    if code == _NOT_READY:
        return False
    check(code, rank)
    return True


def allow_other_captures() -> None:
    """Let this thread make calls while another thread captures a graph; the capture is not ours to break."""
    check(_driver["cuThreadExchangeStreamCaptureMode"](ctypes.byref(c_int(_CAPTURE_MODE_RELAXED))))
