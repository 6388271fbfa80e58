"""A computation and a collective at the same time.

    done = ut.concurrent(lambda: block(x), lambda: ut.collective.all_reduce(gradient), share="priority")
    done.compute, done.collective              # what the two returned

    with ut.concurrent(collective=lambda: ut.collective.all_gather(shard, out=whole), share="dma"):
        y = block(x)                           # the collective runs beside all that is enqueued here

    with ut.concurrent(share="auto") as beside:
        loss.backward()                        # hooks call beside.post(lambda: ut.collective.all_reduce(bucket))

| | caller's stream (thread) | stream of the collective |
|---|---|---|
| begin | work so far | starts after that |
| inside | `compute`, in its part of the device | `collective`, on its lane and CTAs |
| end | goes on after both | |

Lifetime. On CUDA everything is enqueued. What the collective reads and writes is recorded with its stream, so that the
allocator does not hand it out again while the stream is at work, whoever drops it when; what it returns is recorded
with the caller's stream. The callables themselves are kept until the end.

Failing. A computation that raises leaves the collective to complete: other ranks count on it. The error comes out
after the join, and the group stays usable. A collective that raises half-way ends the group, as everywhere.

Inside, the group belongs to the collective: other calls on it are refused, for ranks would not agree on their order.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch

from ..errors import InvalidArgument, StrategyUnavailable
from ..fabric import placement
from ..fabric.placement import Placement
from ..fabric.registry import as_group
from ..fabric.share import on_part
from ..plan.plan import Share
from .spans import Spans
from .strategies import Place, Strategy, given, strategy

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.base import Fabric
    from ..fabric.cuda import CudaFabric
    from ..fabric.group import Group

    AnyGroup = Group | dist.ProcessGroup | DeviceMesh | None

C = TypeVar("C")
T = TypeVar("T")
_UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class Outcome(Generic[C, T]):
    """What the two callables returned, and how they ran."""

    compute: C
    collective: T
    strategy: Strategy


@overload
def concurrent(
    compute: Callable[[], C],
    collective: Callable[[], T],
    *,
    share: str | Share = "auto",
    lane: str = "auto",
    ctas: int | None = None,
    group: AnyGroup = None,
    name: str = "",
) -> Outcome[C, T]: ...


@overload
def concurrent(
    compute: None = None,
    collective: Callable[[], object] | None = None,
    *,
    share: str | Share = "auto",
    lane: str = "auto",
    ctas: int | None = None,
    group: AnyGroup = None,
    name: str = "",
) -> Concurrent: ...


def concurrent(
    compute: Callable[[], Any] | None = None,
    collective: Callable[[], Any] | None = None,
    *,
    share: str | Share = "auto",
    lane: str = "auto",
    ctas: int | None = None,
    group: AnyGroup = None,
    name: str = "",
) -> Outcome[Any, Any] | Concurrent:
    """Run `compute()` beside `collective()`, any callable that makes Undertow collectives on `group`. Collective.

    `share`: a strategy's name (`strategies`), a `Share`, or "auto". `lane`: of the collective, "auto" for the
    strategy's. `ctas`: for a collective on SMs. Without `compute`, a context manager for the caller's own work.
    "auto" runs the first two calls of a kind one after the other and times them; `name` tells kinds apart where the
    callables do not.
    """
    for argument, value in (("compute", compute), ("collective", collective)):
        if value is not None and not callable(value):
            raise InvalidArgument(argument=argument, was=type(value).__name__, must="a callable without arguments")
    if compute is not None and collective is None:
        raise InvalidArgument(argument="collective", was="None", must="a callable, where compute is one")
    on = as_group(group)
    if isinstance(share, str) and share == "auto":
        from .auto import learning

        return learning(compute, collective, on, lane, ctas, name)
    place = place_of(on)
    chosen = given(share, place, lane) if isinstance(share, Share) else strategy(share, place, lane, ctas)
    made = Concurrent(on, chosen)
    if compute is None:
        if collective is not None:
            made.post(collective)
        return made
    assert collective is not None
    return run(on, chosen, compute, collective)


def run(
    group: Group, chosen: Strategy, compute: Callable[[], C], collective: Callable[[], T], spans: Spans | None = None
) -> Outcome[C, T]:
    """Both, as the strategy says. `spans` takes down when each began and ended."""
    both = Concurrent(group, chosen, spans)
    first = chosen.compute_first and group.device.type == "cuda" and chosen.name != "serial"
    posted: Posted[T] | None = None if first else both.post(collective)
    result: Any = _UNKNOWN
    try:
        with both:
            try:
                result = compute()
            finally:  # other ranks count on the collective, whatever became of the computation here
                if posted is None:
                    posted = both._post_beside(collective)
    finally:
        both.let_go()
    assert posted is not None
    both._streams.keep(result)
    return Outcome(result, posted.result, chosen)


class Posted(Generic[T]):
    """A collective under way. `result` is what its callable returned, once the block is left."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._result: Any = _UNKNOWN

    def __call__(self) -> None:
        assert self._work is not None
        self._result = self._work()

    @property
    def result(self) -> T:
        if self._result is _UNKNOWN:
            raise InvalidArgument(argument="result", was="asked for inside the block", must="asked for after it")
        return self._result  # type: ignore[no-any-return]

    def done(self) -> None:
        self._work = None


class Concurrent:
    """A block of the caller's own work with collectives beside it. Made by `concurrent`; used once."""

    def __init__(self, group: Group, chosen: Strategy, spans: Spans | None = None) -> None:
        self.strategy = chosen
        self._group, self._fabric = group, group.fabric
        self._posted: list[Posted[Any]] = []
        self._waiting: list[Posted[Any]] = []
        self._inside = self._used = False
        self._spans = spans
        self._side = contextlib.ExitStack()
        self._streams = _streams(self._fabric, chosen)
        self._holds = False

    def post(self, collective: Callable[[], T]) -> Posted[T]:
        """Run `collective` beside what follows, after the work so far. Before the block: when it is entered."""
        if not callable(collective):
            must = "a callable without arguments"
            raise InvalidArgument(argument="collective", was=type(collective).__name__, must=must)
        posted = Posted(collective)
        self._posted.append(posted)
        if self._inside and self.strategy.name != "serial":
            self._streams.fork()
            self._start(posted)
        else:
            self._waiting.append(posted)
        return posted

    def _post_beside(self, collective: Callable[[], T]) -> Posted[T]:
        """As if posted before the block, though enqueued now."""
        posted = Posted(collective)
        self._posted.append(posted)
        self._start(posted)
        return posted

    def __del__(self) -> None:
        if getattr(self, "_waiting", None) and not self._used:
            said = "A collective was given to ut.concurrent, which was never entered by `with`: it did not run."
            warnings.warn(said, RuntimeWarning, stacklevel=1)

    def __enter__(self) -> Concurrent:
        if self._used:
            raise InvalidArgument(argument="the block", was="entered a second time", must="made anew by ut.concurrent")
        self._used = True
        group = self._group
        group.check()
        with group.lock:
            if group.reserved:
                was = f"{group.name}, a collective of which runs beside this call"
                raise InvalidArgument(argument="group", was=was, must="another group, or the call after it")
            group.reserved = self._holds = True
        try:
            if self._spans is not None:
                self._spans.begin()
            self._streams.begin()
            self._inside = True
            if self.strategy.name != "serial":
                for posted in self._waiting:
                    self._start(posted)
                self._waiting.clear()
            self._side.enter_context(self._streams.computing())
            if self._spans is not None:
                self._side.callback(self._spans.computed)
        except BaseException:
            self.let_go()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside = False
        try:
            self._side.close()
            if kind is not None and not issubclass(kind, Exception):
                return  # an interrupt waits for nobody
            for posted in self._waiting:  # serial: after the computation
                self._start(posted)
            self._waiting.clear()
            if self._spans is not None and not self._posted:
                self._spans.communicated()  # nothing was posted: it took no time
            self._streams.join()
            if self._spans is not None:
                self._spans.whole = error is None
            for posted in self._posted:
                self._streams.keep(posted._result)
                posted.done()
        finally:
            self.let_go()

    def let_go(self) -> None:
        """The group may be used again."""
        if self._holds:
            self._holds = self._group.reserved = False

    def _start(self, posted: Posted[Any]) -> None:
        share = self.strategy.share
        # Where the card itself is divided, its part bounds the collective, and more CTAs fill that better.
        where = Placement(self.strategy.lane, None if self._streams.bounds else share.communication_ctas)

        def work() -> None:
            with torch.no_grad(), placement.placed(where):
                posted()
            if self._spans is not None:
                self._spans.communicated()

        self._streams.run(work)


# -- the two orders of work --------------------------------------------------------------------------------------------


class _Streams:
    """A stream for the collective beside the caller's own; on a CPU a thread."""

    bounds = False  # whether what runs on it is kept to its part by the driver

    def __init__(self, fabric: Fabric, chosen: Strategy) -> None:
        self._fabric, self._chosen = fabric, chosen
        priority = chosen.share.communication_priority
        self._stream = fabric.stream("beside", priority)

    def begin(self) -> None:
        self._stream.fork()

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return self._fabric.sharing(self._chosen.share.multiprocessors)

    def fork(self) -> None:
        """What is run next comes after the caller's work so far."""
        self._stream.fork()

    def run(self, work: Callable[[], None]) -> None:
        if self._chosen.name == "serial":
            work()
        else:
            self._stream.run(work)

    def join(self) -> None:
        if self._chosen.name != "serial":
            self._stream.join()

    def keep(self, result: object) -> None:
        """What came from the other stream is now used on the caller's."""
        if self._fabric.group.device.type != "cuda":
            return
        here = torch.cuda.current_stream(self._fabric.group.device)
        for tensor in tensors_in(result):
            tensor.record_stream(here)


class _Divided(_Streams):
    """The two halves of a whole card, each with a stream of its green context."""

    bounds = True

    def __init__(self, fabric: CudaFabric, chosen: Strategy) -> None:
        super().__init__(fabric, chosen)
        assert chosen.share.multiprocessors is not None
        self._device = fabric.device
        computing, beside = fabric.divide(chosen.share.multiprocessors)
        self._compute, self._beside, self._room = computing.stream, beside.stream, computing.multiprocessors
        self._caller = torch.cuda.current_stream(fabric.device)

    def begin(self) -> None:
        self._caller = torch.cuda.current_stream(self._device)
        self._compute.wait_stream(self._caller)
        self._beside.wait_stream(self._caller)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.stream(self._compute), on_part(self._room):
            yield

    def fork(self) -> None:
        self._beside.wait_stream(torch.cuda.current_stream(self._device))

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._beside):
            work()

    def join(self) -> None:
        self._caller.wait_stream(self._compute)
        self._caller.wait_stream(self._beside)


def _streams(fabric: Fabric, chosen: Strategy) -> _Streams:
    if (
        divides(fabric)
        and chosen.share.multiprocessors is not None
        and chosen.share.multiprocessors < fabric.multiprocessors
    ):
        if torch.cuda.is_current_stream_capturing():
            reason = "parts of a divided card have contexts of their own, and a graph is captured in one"
            possible = "base, priority, dma, or a divided card without a graph"
            raise StrategyUnavailable(strategy=chosen.name, reason=reason, possible=possible)
        return _Divided(fabric, chosen)  # type: ignore[arg-type]
    return _Streams(fabric, chosen)


def divides(fabric: Fabric) -> bool:
    """Whether the driver can divide this rank's GPU."""
    return fabric.group.device.type == "cuda" and not getattr(fabric, "shares_device", True)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors on a GPU in what a callable returned: itself, or in tuples, lists and dictionaries of it."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def place_of(group: Group) -> Place:
    """Where this group's strategies have to fit."""
    fabric = group.fabric
    return Place(group.device.type, fabric.multiprocessors, fabric.lanes(), divides(fabric))
