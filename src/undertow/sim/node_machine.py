"""A node of a cluster as the planner's machine: what `undertow profile` would write there, found by simulating.

So the same plans, the same predictor and the same search work on machines that nobody has. The curve of the matmul is a
straight one: `efficiency` of the device's peak, in proportion to its multiprocessors. Collectives are run on the node's
links at a few sizes, by kernels (lane `net`) and, where there are some, by copy engines (lane `dma`). Nothing slows
anything unless the cluster's interference, or the one given, says so.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import InvalidArgument
from ..plan.interference import Interference
from ..plan.machine import GemmCurve, LaneCurve, Machine
from ..plan.plan import OPERATORS
from ..plan.tables import Points
from ..plan.work import Work
from .cluster import Cluster
from .collectives import Collectives

LANE, ENGINES = "net", "dma"
_SHAPE = (8192, 8192, 8192)
_SIZES = tuple(1 << bits for bits in range(14, 32))
_COLLECTIVE = {
    "matmul_all_reduce": "all_reduce",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_to_all": "all_to_all",
    "all_gather_matmul": "all_gather",
}


def plan_machine(
    cluster: Cluster,
    ranks: int,
    *,
    efficiency: float,
    launch_seconds: float,
    stream_seconds: float,
    interference: Interference | None = None,
) -> Machine:
    """The machine of `ranks` ranks of one node."""
    if not 2 <= ranks <= cluster.shape.per_node or cluster.shape.nodes != 1:
        must = f"2 to {cluster.shape.per_node}, on a cluster of one node"
        raise InvalidArgument(argument="ranks", was=ranks, must=must)
    part = replace(cluster, shape=replace(cluster.shape, per_node=ranks))
    device = cluster.device
    rate = efficiency * device.peak / device.multiprocessors
    work = 2 * _SHAPE[0] * _SHAPE[1] * _SHAPE[2]
    sms = sorted({1, device.multiprocessors // 2, device.multiprocessors})
    gemm = GemmCurve("SMs", _SHAPE, "bfloat16", tuple((count, work / (rate * count)) for count in sms))
    parts = {LANE: Collectives(part)}
    if cluster.copy_engines is not None:
        parts[ENGINES] = Collectives(part.by_engines())
    times: dict[str, dict[str, Points]] = {
        operator: {
            lane: tuple((size, known.time(_COLLECTIVE[operator], size).seconds) for size in _SIZES)
            for lane, known in parts.items()
        }
        for operator in OPERATORS
    }
    said = f"simulated on {cluster.name}"
    lanes = {lane: LaneCurve(lane, said, True, times["matmul_all_to_all"][lane], 1.0, 1.0) for lane in parts}
    return Machine(
        name=f"{cluster.name}, {ranks} ranks",
        device="cuda",
        ranks=ranks,
        shares_device=False,
        launch_seconds=launch_seconds,
        stream_seconds=stream_seconds,
        gemm=gemm,
        lanes=lanes,
        interference=interference if interference is not None else cluster.interference,
        work=Work(copy_speed=device.memory_bandwidth / 2),
        collectives=times,
    )
