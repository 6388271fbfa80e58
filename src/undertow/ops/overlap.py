"""Parcels that leave while the rest is computed: the one loop behind every matmul that sends its result.

    caller          | start | reach 0 | reach 1 | reach 2 | ...                              | join
    communication             | await 0, carry 0 | await 1, carry 1 | ...
    collecting                          | collect 0 | collect 1 | ...

`carry` sends a parcel and, where it is reduced, sums what came; `collect` takes what others send of the same parcel.
They are apart so that a parcel's sums can leave while the next parcel's pieces arrive. All ranks carry the same parcels
in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..errors import UndertowError
from .product import Product

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane, Stream
    from ..fabric.group import Group
    from ..plan.plan import Plan

Step = Callable[[int], None]


def overlap(
    fabric: Fabric, lane: Lane, plan: Plan, product: Product, carry: Step, collect: Step | None, parcels: int
) -> None:
    """Compute and carry all parcels; on return (CUDA: in the order of the current stream) everything has arrived."""
    with half_way(fabric.group):
        _overlap(fabric, lane, plan, product, carry, collect, parcels)


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


def _overlap(
    fabric: Fabric, lane: Lane, plan: Plan, product: Product, carry: Step, collect: Step | None, parcels: int
) -> None:
    lane.limit(plan.share.communication_ctas)
    if plan.grain == "serial" and parcels == 1:
        product.start()
        carry(0)
        if collect is not None:
            collect(0)
        lane.flush()
        return
    priority = plan.share.communication_priority
    communication = fabric.stream("communication", priority=priority)
    collecting = fabric.stream("collecting", priority=priority) if collect is not None else None
    try:
        if plan.grain == "signaled":
            product.prepare()
        else:
            product.start()
        communication.fork()
        if collecting is not None:
            collecting.fork()
        if plan.grain == "signaled":
            product.start()
        for parcel in range(parcels):
            product.reach(parcel)
            if plan.grain == "chunked":
                communication.fork()

            def sent(parcel: int = parcel) -> None:
                product.await_parcel(parcel)
                carry(parcel)

            communication.run(sent)
            if collecting is not None and collect is not None:
                collecting.run(lambda parcel=parcel: collect(parcel))  # type: ignore[misc]
    except Exception as error:  # an interrupt does not wait for anybody
        give_up(fabric.group, error)
        join(fabric.group, communication, collecting)
        raise
    join(fabric.group, communication, collecting)
    lane.flush()


def join(group: Group, *streams: Stream | None) -> None:
    """What follows comes after all of them. Raises what the first of them raised; then the others wait for nobody."""
    first: Exception | None = None
    for stream in streams:
        if stream is not None:
            try:
                stream.join()
            except Exception as error:
                give_up(group, error)
                first = first or error
    if first is not None:
        raise first
