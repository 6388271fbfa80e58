"""The backend itself: a ProcessGroup whose collectives are Undertow's, and whose other operations are the fallback's.

torch calls a Python subclass of ProcessGroup from Python and from C++ (DDP's reducer, functional collectives), by the
names below; newer versions have new names for some of them, and both are here. A tensor goes to Undertow if it is
dense, on the group's device and, where it is reduced, of a type and by an operation that Undertow has. All ranks see
that alike, for it follows from what a collective requires to be equal on them.

| operation | Undertow's | remark |
|---|---|---|
| allreduce, reduce, reduce_scatter | sum, avg (of floats), max, min | bool: sum and max are "any", min is "all" |
| broadcast, allgather, gather, scatter, alltoall | any type | lists may be uneven where all ranks see all sizes |
| barrier | | a sum of one number |
| send, recv | | always the fallback's |

An Undertow group comes with the first operation, which is collective. Its deadline is the `timeout` of the torch group,
or `UNDERTOW_DEADLINE` where that is set and shorter.
"""

# mypy: disable-error-code="override, assignment"
# torch's stubs list each short form as an overload of its own; here one signature takes them all.

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from .. import settings
from ..collective import operators
from ..collective.arguments import REDUCIBLE
from ..fabric.group import Group
from ..fabric.registry import as_group, default_device, seconds_to_wait
from . import NAME, fallback, lists
from .handles import Queue, Several, Streams

Tensors = Sequence[torch.Tensor]
_OPERATIONS = (
    (dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "avg"), (dist.ReduceOp.MAX, "max"), (dist.ReduceOp.MIN, "min"),
)  # fmt: skip
_OF_TRUTH = {"sum": "max", "max": "max", "min": "min"}
_CUDA_SIZES = (1, 2, 4, 8)  # bytes of an element that its kernels copy


Method = TypeVar("Method", bound=Callable[..., Any])


def _long_form(method: Method) -> Method:
    """ProcessGroup also has short forms (one tensor, arguments in place of options), which few call: the fallback's."""

    @functools.wraps(method)
    def run(self: UndertowProcessGroup, *arguments: Any, **named: Any) -> dist.Work:
        options = named.get("opts", arguments[-1] if len(arguments) > 1 else None)
        long = options is None or isinstance(options, (list, tuple)) or type(options).__name__.endswith("Options")
        if not long or isinstance(arguments[0], torch.Tensor) or set(named) - {"opts"}:
            return self._fall_back(method.__name__, "it is called in the short form", *arguments, **named)
        return cast(dist.Work, method(self, *arguments, **named))

    return cast(Method, run)


class UndertowProcessGroup(dist.ProcessGroup):
    """What `init_process_group(backend="undertow")` and `new_group` make."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]  # the stubs lack this one
        self._store = options.store
        self._timeout: float = options.timeout.total_seconds()
        members = options.global_ranks_in_group  # none are named where the group is everybody's
        self._device = default_device(members[options.group_rank] if members else options.group_rank)
        self._backends = backends = fallback.make_backends(options, self._device, self._wait_at_most)
        fallback.install(self, backends)  # for what C++ calls by names that Python cannot override
        #: an ordinary ProcessGroup over the same ranks, for all that is not Undertow's
        self.carrier = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        fallback.install(self.carrier, backends)
        self._known_group: Group | None = None
        self._queue = Queue(str(options.group_id))
        self._streams: Streams | None = None
        self._coalesced: list[dist.Work] | None = None
        self._carrier_joins = False  # what it is given meanwhile into one call of its own

    # -- what torch asks a group for -----------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def get_group_store(self) -> dist.Store:
        return self._store  # type: ignore[no-any-return]

    def shutdown(self) -> None:
        """Of `destroy_process_group`: everything that was queued is over, then the group is closed."""
        self._queue.close()
        if self._known_group is not None:
            self._known_group.close()
        super().shutdown()

    def abort(self) -> None:
        if self._known_group is not None:
            self._known_group.close()
        super().abort()

    @property
    def undertow(self) -> Group:
        """The Undertow group of these ranks; making it, the first time, is collective."""
        found = self._known_group
        if found is None:
            found = self._known_group = as_group(self, deadline=self._deadline)
        return found

    @property
    def _deadline(self) -> float:
        return min(self._timeout, seconds_to_wait(None)) if settings.DEADLINE.name in os.environ else self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._wait_at_most(timeout)

    def _wait_at_most(self, timeout: timedelta) -> None:
        """What torch's functions that set a timeout come to; the fallback has it already."""
        self._timeout = timeout.total_seconds()
        if self._known_group is not None:
            self._known_group.deadline = self._deadline

    # -- collectives ---------------------------------------------------------------------------------------------

    @_long_form
    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self._all_reduces("allreduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self._all_reduces("allreduce_coalesced", tensors, opts)

    @_long_form
    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        operation = _reduction(opts)
        why = self._why_not(tensors, operation) or _only_one(tensors)
        if why:
            return self._fall_back("reduce", why, tensors, *_given(opts))
        tensor, name = _of_numbers(tensors[0].detach(), str(operation))
        out = tensor if self.rank() == _root(opts) else None
        call = partial(operators.reduce, tensor, root=_root(opts), out=out, op=name, group=self.undertow)
        return self._start("reduce", [call], tensors, tensors, _is_async(opts))

    @_long_form
    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        why = self._why_not(tensors) or _only_one(tensors)
        if why:
            return self._fall_back("broadcast", why, tensors, *_given(opts))
        call = partial(operators.broadcast, tensors[0].detach(), root=_root(opts), group=self.undertow)
        return self._start("broadcast", [call], tensors, tensors, _is_async(opts))

    @_long_form
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        outputs = list(output_tensors[0])
        why = (
            self._why_not([*input_tensors, *outputs]) or _only_one(input_tensors) or lists.misfit(outputs, self.size())
        )
        if why:
            return self._fall_back("allgather", why, output_tensors, input_tensors, *_given(opts))
        call = partial(lists.all_gather, _plain(outputs), input_tensors[0].detach(), self.undertow)
        return self._start("all_gather", [call], input_tensors, outputs, _is_async(opts))

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        outputs = [tensor for each in zip(*output_lists, strict=True) for tensor in each]
        why = self._why_not([*inputs, *outputs])
        if why:
            return self._fall_back("allgather_coalesced", why, output_lists, inputs, *_given(opts))
        calls = [
            partial(lists.all_gather, _plain(outs), tensor.detach(), self.undertow)
            for outs, tensor in zip(zip(*output_lists, strict=True), inputs, strict=True)
        ]
        return self._start("all_gather", calls, inputs, outputs, _is_async(opts))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._all_gather_singles("_allgather_base", [output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._all_gather_singles("allgather_into_tensor_coalesced", outputs, inputs, opts)

    @_long_form
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        inputs = list(input_tensors[0])
        operation = _reduction(opts)
        why = self._why_not([*output_tensors, *inputs], operation) or _only_one(output_tensors)
        why = why or lists.misfit(inputs, self.size()) or lists.unequal(inputs)
        if why:
            return self._fall_back("reduce_scatter", why, output_tensors, input_tensors, *_given(opts))
        out, name = _of_numbers(output_tensors[0].detach(), str(operation))
        parts = [_of_numbers(one, name)[0] for one in _plain(inputs)]
        call = partial(lists.reduce_scatter, out, parts, name, self.undertow)
        return self._start("reduce_scatter", [call], inputs, output_tensors, _is_async(opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._reduce_scatter_singles("_reduce_scatter_base", [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._reduce_scatter_singles("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    @_long_form
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        why = self._why_not(input_tensors) or _only_one(input_tensors)
        if why:
            return self._fall_back("gather", why, output_tensors, input_tensors, *_given(opts))
        outputs = list(output_tensors[0]) if output_tensors else []
        call = partial(lists.gather, _plain(outputs), input_tensors[0].detach(), _root(opts), self.undertow)
        return self._start("gather", [call], input_tensors, outputs, _is_async(opts))

    @_long_form
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        why = self._why_not(output_tensors) or _only_one(output_tensors)
        if why:
            return self._fall_back("scatter", why, output_tensors, input_tensors, *_given(opts))
        inputs = list(input_tensors[0]) if input_tensors else []
        call = partial(lists.scatter, output_tensors[0].detach(), _plain(inputs), _root(opts), self.undertow)
        return self._start("scatter", [call], inputs, output_tensors, _is_async(opts))

    @_long_form
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> dist.Work:
        why = self._why_not([*output_tensors, *input_tensors])
        if why:
            return self._fall_back("alltoall", why, output_tensors, input_tensors, *_given(opts))
        call = partial(lists.all_to_all, _plain(output_tensors), _plain(input_tensors), self.undertow)
        return self._start("all_to_all", [call], input_tensors, output_tensors, _is_async(opts))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Splits that are given on one rank must be given on all: whoever gives none promises equal ones everywhere."""
        to, by = list(output_split_sizes or ()), list(input_split_sizes or ())
        why = self._why_not([output, input])
        if why:
            return self._fall_back("alltoall_base", why, output, input, to, by, *_given(opts))
        call = partial(lists.all_to_all_single, output.detach(), input.detach(), to, by, self.undertow)
        return self._start("all_to_all", [call], [input], [output], _is_async(opts))

    def barrier(self, opts: Any = None, timeout: object = None) -> dist.Work:
        """A sum of one number; on a GPU the host waits for it, as it does with NCCL."""
        mark = torch.zeros(1, dtype=torch.int32, device=self._device)
        call = partial(operators.all_reduce, mark, group=self.undertow)
        return self._start("barrier", [call], [mark], [mark], _is_async(opts), host_waits=True)

    # Names of earlier versions of torch, and of its C++.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- single messages, and calls made together --------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> dist.Work:
        return self._fall_back("send", _MESSAGE, tensors, dstRank, tag)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> dist.Work:
        return self._fall_back("recv", _MESSAGE, tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        return self._fall_back("recv_anysource", _MESSAGE, tensors, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []
        self._carrier_joins = bool(self.carrier._get_backend(device).supports_coalescing)
        if self._carrier_joins:
            self.carrier._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        if self._carrier_joins:
            theirs = self.carrier._end_coalescing(device)
            works += [theirs] if theirs is not None else []
        return Several(works)

    # -- how they are done -------------------------------------------------------------------------------------------

    def _start(
        self,
        what: str,
        calls: Sequence[Callable[[], object]],
        inputs: Tensors,
        outputs: Tensors,
        asynchronous: bool,
        host_waits: bool = False,
    ) -> dist.Work:
        group = self.undertow  # here, not on the queue's thread: making groups is collective, in the order of calls
        blocking = not asynchronous and self._coalesced is None
        call = calls[0] if len(calls) == 1 else partial(_one_by_one, calls)
        work: dist.Work
        if group.device.type == "cpu":
            work = self._queue.add(what, call, outputs, blocking)
        else:
            if self._streams is None:
                self._streams = Streams(group)
            work = self._streams.add(what, call, inputs, outputs, blocking, host_waits)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _fall_back(self, operation: str, why: str, *arguments: Any, **named: Any) -> dist.Work:
        fallback.say(f"{operation} of torch.distributed", why, self.carrier.name())
        work = fallback.call(self.carrier, operation, arguments, named)
        if self._coalesced is not None and not self._carrier_joins:
            self._coalesced.append(work)
        return work

    def _why_not(self, tensors: Sequence[torch.Tensor], operation: str | None = "") -> str:
        """Why Undertow cannot do it; empty if it can. `operation` "": nothing is reduced; None: one that it lacks."""
        if operation is None:
            return "Undertow reduces by sum, avg, max and min only"
        for tensor in tensors:
            if tensor.device != self._device:
                return f"its tensors are on {tensor.device}, this group's are on {self._device}"
            if tensor.layout != torch.strided:
                return f"its tensors are {str(tensor.layout).removeprefix('torch.')}"
            dtype = tensor.dtype
            if operation and not (dtype in REDUCIBLE or (dtype == torch.bool and operation in _OF_TRUTH)):
                return f"Undertow does not reduce {dtype}"
            if operation == "avg" and not dtype.is_floating_point:
                return f"an average of {dtype}"
            if self._device.type == "cuda" and dtype.itemsize not in _CUDA_SIZES:
                return f"elements of {dtype.itemsize} bytes on a GPU"
        return ""

    def _all_reduces(self, operation: str, tensors: Tensors, opts: Any) -> dist.Work:
        reduction = _reduction(opts)
        why = self._why_not(tensors, reduction)
        if why:
            return self._fall_back(operation, why, tensors, *_given(opts))
        calls = [partial(self._reduce_one, tensor.detach(), reduction) for tensor in tensors]
        return self._start("all_reduce", calls, tensors, tensors, _is_async(opts))

    def _reduce_one(self, tensor: torch.Tensor, operation: str | None) -> None:
        numbers, name = _of_numbers(tensor, str(operation))
        operators.all_reduce(numbers, op=name, group=self.undertow)

    def _all_gather_singles(self, operation: str, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        why = self._why_not([*outputs, *inputs])
        if why:
            together = (outputs, inputs) if operation.endswith("coalesced") else (outputs[0], inputs[0])
            return self._fall_back(operation, why, *together, *_given(opts))
        calls = [
            partial(lists.all_gather_single, out.detach(), tensor.detach(), self.undertow)
            for out, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._start("all_gather", calls, inputs, outputs, _is_async(opts))

    def _reduce_scatter_singles(self, operation: str, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        reduction = _reduction(opts)
        why = self._why_not([*outputs, *inputs], reduction)
        if why:
            together = (outputs, inputs) if operation.endswith("coalesced") else (outputs[0], inputs[0])
            return self._fall_back(operation, why, *together, *_given(opts))
        calls = []
        for out, tensor in zip(outputs, inputs, strict=True):
            numbers, name = _of_numbers(tensor.detach(), str(reduction))
            calls.append(
                partial(lists.reduce_scatter_single, _of_numbers(out.detach(), name)[0], numbers, name, self.undertow)
            )
        return self._start("reduce_scatter", calls, inputs, outputs, _is_async(opts))


_MESSAGE = "Undertow has collectives, not single messages"


def _one_by_one(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _plain(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in tensors]


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _only_one(tensors: Sequence[torch.Tensor]) -> str:
    return "" if len(tensors) == 1 else f"it has {len(tensors)} tensors on this rank"


def _is_async(opts: Any) -> bool:
    """Callers in C++ leave it out and mean an asynchronous call."""
    return bool(getattr(opts, "asyncOp", True))


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", 0))


def _reduction(opts: Any) -> str | None:
    """Undertow's name for the operation; None where it has none."""
    wanted = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    return next((name for known, name in _OPERATIONS if wanted == known), None)


def _of_numbers(tensor: torch.Tensor, operation: str) -> tuple[torch.Tensor, str]:
    """Truth values as bytes: their sum is whether any is true."""
    if tensor.dtype != torch.bool:
        return tensor, operation
    return tensor.view(torch.uint8), _OF_TRUTH.get(operation, operation)
