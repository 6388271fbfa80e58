"""Which lane carries a walk inside a node, and what that lane holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ..fabric.signals import Handoffs
from . import lane_plan as plan

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane


class Near:
    """The lane inside a node: one of its own with as many slots as the schedule needs, or the fabric's own."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self._fabric, self._name = fabric, name
        self._shared: Lane | None = None
        self._made: Lane | None = None
        self._pairs: list[Handoffs] = []
        self.group, self.device = fabric.group, fabric.group.device  # a lane's constructor takes this for its fabric
        self.guard: Any = getattr(fabric, "guard", None)
        self._slots = 0
        if name == "net" or name not in fabric.lanes():
            fabric.lane(name)  # refuses a name that is none
            self.holds = plan.MEETING
            return
        self.holds = plan.PLACES
        if self.device.type == "cuda":
            self._shared = fabric.lane(name)
            from ..fabric.cuda_lanes import StagedLane

            # Its ring of pinned memory is large and has two messages for each pair, whatever the place.
            self.holds = plan.TWO if isinstance(self._shared, StagedLane) else plan.PLACES

    def open(self, slots: int) -> Lane:
        """Collective."""
        if self._shared is not None and self.holds == plan.TWO:
            return self._shared
        self._slots = slots
        kind: Any = type(self._shared)
        if self._shared is None:
            from ..fabric.cpu_lanes import DmaLane, PeerLane

            kind = DmaLane if self._name == "dma" else PeerLane
        self._made = cast("Lane", kind(self))
        return self._made

    def handoffs(self) -> Handoffs:
        """As a fabric's, with enough slots."""
        self._pairs.append(self._fabric.handoffs(self._slots))
        return self._pairs[-1]

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None
        for pairs in self._pairs:
            pairs.release()
        self._pairs.clear()
