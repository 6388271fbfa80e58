"""Parcels that leave while the rest is computed: the one loop behind every matmul that sends its result.

    caller          | start | reach 0 | reach 1 | reach 2 | ...                              | join
    communication             | await 0, carry 0 | await 1, carry 1 | ...
    following 1                         | first 0 | first 1 | ...
    following 2                                    | second 0 | second 1 | ...

`carry` sends a parcel; what has to be done with the same parcel afterwards (take what others sent, sum it and hand the
sum on, take the others' sums) are `followers`. Each has a stream of its own, so that a parcel leaves while the one
before is summed and the one before that arrives. All ranks carry the same parcels in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import UndertowError
from .product import Product

if TYPE_CHECKING:
    import torch

    from ..collective.carry import Carrier
    from ..fabric.base import Fabric, Lane, Stream
    from ..fabric.group import Group
    from ..plan.plan import Plan
    from .beside import Beside
    from .finish import Finish
    from .whole import Bringing, Exchange

Step = Callable[[int], None]


def overlap(
    fabric: Fabric,
    lane: Lane,
    plan: Plan,
    product: Product,
    carry: Step,
    followers: Sequence[Step],
    parcels: int,
    beside: Beside | None = None,
    carrier: Carrier | None = None,
) -> None:
    """Compute and carry all parcels; on return (CUDA: in the order of the current stream) everything has arrived.

    `beside`: more to bring (over `carrier`) while the product is computed, and to compute while parcels are under way.
    """
    with half_way(fabric.group):
        _overlap(fabric, lane, plan, product, carry, followers, parcels, beside, carrier)


def multiply_and_move(
    fabric: Fabric,
    product: Product,
    sums: Exchange,
    finish: Finish,
    y: torch.Tensor,
    beside: Bringing | None = None,
) -> None:
    """What `beside` brings and computes, the product, what moves of it, finished into y: nothing hides anything."""
    if not finish.nothing:
        finish.load(y, 1)
    with half_way(fabric.group):
        if beside is not None:
            beside.at_once()
        product.start()
        sums.move()
        if sums.taken.data_ptr() != y.data_ptr():
            finish.take(y, sums.taken)
        sums.over()
    fabric.poisons_itself()


@contextlib.contextmanager
def half_way(group: Group) -> Iterator[None]:
    """What fails inside, after bytes may have begun to move, ends the group: peers would wait for the rest of them."""
    try:
        yield
    except Exception as error:
        give_up(group, error)
        raise


def give_up(group: Group, error: Exception) -> None:
    """End the group, so that nobody waits for what this rank will not do."""
    if not group.failed:
        group.fail(UndertowError(reason=f"A call failed half-way: {type(error).__name__}: {error}."))


@contextlib.contextmanager
def one_by_one(fabric: Fabric, lane: Lane) -> Iterator[None]:
    """Calls over a lane come one after the other, whatever streams they are on: they share its slots and its places,
    and of two receivers on two streams both could take the first message."""
    fabric.follow(f"lane {lane.name}")
    yield
    fabric.enqueued(f"lane {lane.name}")


def compute_beside(fabric: Fabric, beside: Beside) -> None:
    """What is computed of rows that did not come is no result either, should the call be aborted."""
    beside.compute()
    if beside.gathers is not None:
        fabric.poison_if_aborted(beside.gathers.made)


def _overlap(
    fabric: Fabric,
    lane: Lane,
    plan: Plan,
    product: Product,
    carry: Step,
    followers: Sequence[Step],
    parcels: int,
    beside: Beside | None,
    carrier: Carrier | None,
) -> None:
    lane.limit(plan.share.communication_ctas)
    bring = beside.bring if beside is not None else None
    if plan.grain == "serial" and parcels == 1:
        if beside is not None:
            if bring is not None and carrier is not None:
                bring(carrier)
            compute_beside(fabric, beside)
        product.start()
        for step in (carry, *followers):
            step(0)
        lane.flush()
        return
    priority = plan.share.communication_priority
    communication = fabric.stream("communication", priority=priority)
    following = [fabric.stream(f"following {number}", priority=priority) for number in range(1, len(followers) + 1)]
    bringing = fabric.stream("beside", priority=priority) if bring is not None else None
    try:
        if bringing is not None:
            bringing.fork()
            bringing.run(lambda: bring(carrier))  # type: ignore[misc,arg-type]
        if plan.grain == "signaled":
            product.prepare()
        else:
            product.start()
        for stream in (communication, *following):
            stream.fork()
        if plan.grain == "signaled":
            product.start()
        for parcel in range(parcels):
            product.reach(parcel)
            if plan.grain == "chunked":
                communication.fork()

            def sent(parcel: int = parcel) -> None:
                with half_way(fabric.group):
                    product.await_parcel(parcel)
                    carry(parcel)

            def followed(step: Step, parcel: int = parcel) -> None:
                with half_way(fabric.group):  # at once: the streams that are joined first may be waiting for this one
                    step(parcel)

            communication.run(sent)
            for stream in following[:1]:  # my own part of the parcel is complete; what comes later needs all ranks'
                stream.after(communication)
            for stream, step in zip(following, followers, strict=True):
                stream.run(partial(followed, step))
        if beside is not None:
            if bringing is not None:
                bringing.join()
            compute_beside(fabric, beside)
            if bringing is not None and not fabric.capturing():  # a call on another stream may get its memory next
                bringing.fork()
    except Exception as error:  # an interrupt does not wait for anybody
        give_up(fabric.group, error)
        join(fabric.group, *([bringing] if bringing is not None else []), communication, *following)
        raise
    join(fabric.group, communication, *following)
    lane.flush()


def join(group: Group, *streams: Stream) -> None:
    """What follows comes after all of them. Raises what the first of them raised; then the others wait for nobody."""
    first: Exception | None = None
    for stream in streams:
        try:
            stream.join()
        except Exception as error:
            give_up(group, error)
            first = first or error
    if first is not None:
        raise first
