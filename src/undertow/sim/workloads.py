"""Training steps that come with the simulator: a recommendation model, and a transformer's layers.

Strategies: *serial*, nothing beside a collective that depends on it; *chunked*, a producer and its collective in two
parts; *fused*, in sixteen parts, each leaving as soon as it is made, which is what a fused kernel does with tiles: it
moves them itself, so that no other kernel holds multiprocessors. Other collectives hold what the machine's file says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InvalidArgument
from .cluster import Cluster
from .collectives import Collectives
from .steps import Step
from .tasks import Outcome

PARTS = {"serial": 1, "chunked": 2, "fused": 16}
STRATEGIES = tuple(PARTS)
_HALF = 2  # bytes of an element


@dataclass(frozen=True, slots=True)
class Dlrm:
    """Sizes of a recommendation model. All tables have one width; `batch` is that of a rank, `tables` too.

    Width, pooling and the number of layers are as recalled of arXiv 2305.06942, not read again; the rest are round
    numbers that make its parts of comparable size.
    """

    batch: int = 512
    tables: int = 8
    width: int = 92
    pooling: int = 70
    bottom_layers: int = 8
    top_layers: int = 20
    hidden: int = 2048

    @property
    def layer_flops(self) -> float:
        return 2.0 * self.batch * self.hidden * self.hidden


def dlrm(
    cluster: Cluster, strategy: str = "serial", model: Dlrm | None = None, known: Collectives | None = None
) -> Outcome:
    """One training step: tables are spread over ranks, everything else is replicated.

    forward: lookup of all ranks' samples in my tables, AllToAll of the pooled rows, beside it the bottom MLP; top MLP.
    backward: top MLP, AllToAll of gradients, tables; bottom MLP; AllReduce of the MLPs' gradients beside all of it.
    """
    sizes = model if model is not None else Dlrm()
    parts = _parts(strategy)
    step, held = Step(cluster, known), _held(strategy)
    looked = cluster.ranks * sizes.batch * sizes.tables  # bags
    rows = float(looked * sizes.pooling * sizes.width * _HALF)
    pooled = float(looked * sizes.width * _HALF)
    sent = []
    for part in range(parts):
        made = step.compute(f"lookup {part}", nbytes=(rows + pooled) / parts)
        sent.append(
            step.collective(
                "all_to_all", pooled / parts, after=[made], name=f"pooled rows {part}", multiprocessors=held
            )
        )
    bottom = step.compute("bottom mlp", flops=sizes.bottom_layers * sizes.layer_flops)
    top = step.compute("top mlp", flops=sizes.top_layers * sizes.layer_flops, after=[bottom, *sent])
    back = step.compute("top mlp backward", flops=2 * sizes.top_layers * sizes.layer_flops, after=[top])
    gradients = []
    for part in range(parts):
        # The gradients of the rows are the first thing the backward pass has.
        name = f"row gradients {part}"
        gradients.append(step.collective("all_to_all", pooled / parts, after=[back], name=name, multiprocessors=held))
    weights = 1.0 * sizes.hidden * sizes.hidden * _HALF
    step.collective("all_reduce", sizes.top_layers * weights, after=[back], name="top gradients", stream="gradients")
    below = step.compute("bottom mlp backward", flops=2 * sizes.bottom_layers * sizes.layer_flops, after=[back])
    for part, came in enumerate(gradients):
        step.compute(f"update tables {part}", nbytes=2 * rows / parts, after=[came])
    step.collective(
        "all_reduce", sizes.bottom_layers * weights, after=[below], name="bottom gradients", stream="gradients"
    )
    return step.run()


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder's layers, as Megatron-LM splits them: tensors over a node, sequences too, data across nodes.

    `stages`: of a pipeline of equal parts, each run by nodes of its own; `microbatches` go through it one by one.
    """

    hidden: int = 8192
    sequence: int = 4096
    batch: int = 1
    layers: int = 8
    stages: int = 1
    microbatches: int = 4
    sequence_parallel: bool = True

    def layer_flops(self) -> tuple[float, float, float, float]:
        """Of one layer, forward, all ranks: the projections of attention, attention itself, both of the MLP."""
        tokens = 1.0 * self.batch * self.sequence
        square = 2.0 * tokens * self.hidden * self.hidden
        return 4 * square, 4.0 * tokens * self.sequence * self.hidden, 4 * square, 4 * square


def transformer(
    cluster: Cluster, strategy: str = "serial", model: Transformer | None = None, known: Collectives | None = None
) -> Outcome:
    """A training step: every microbatch forward, then backward, through all stages; gradients summed across nodes."""
    sizes = model if model is not None else Transformer()
    parts = _parts(strategy)
    if sizes.stages < 1 or sizes.layers % sizes.stages:
        raise InvalidArgument(argument="stages", was=sizes.stages, must=f"a divisor of the {sizes.layers} layers")
    step, held = Step(cluster, known), _held(strategy)
    tensor = cluster.shape.per_node
    activations = 1.0 * sizes.batch * sizes.sequence * sizes.hidden * _HALF
    last: dict[int, int] = {}

    def block(stage: int, label: str, flops: float, work: float) -> None:
        """One half of a layer: gather the sequence, multiply, scatter the sum; or multiply and sum."""
        before = [last[stage]] if stage in last else []
        done = []
        for _ in range(parts):
            ready = before
            if sizes.sequence_parallel:
                gathered = step.collective(
                    "all_gather", activations / parts, group="node", after=before, stage=stage, name=f"{label} gather",
                    multiprocessors=held,
                )  # fmt: skip
                ready = [gathered]
            made = step.compute(label, flops=work * flops / tensor / parts, after=ready, stage=stage)
            kind = "reduce_scatter" if sizes.sequence_parallel else "all_reduce"
            done.append(
                step.collective(
                    kind, activations / parts, group="node", after=[made], stage=stage, name=f"{label} sum",
                    stream="sums", multiprocessors=held,
                )
            )  # fmt: skip
        last[stage] = step.compute(f"{label} ends", seconds=0.0, after=done, stage=stage)

    projections, attention, up, down = sizes.layer_flops()
    for work, direction in ((1.0, "forward"), (2.0, "backward")):
        for microbatch in range(sizes.microbatches):
            order = range(sizes.stages) if work == 1.0 else range(sizes.stages - 1, -1, -1)
            came = -1
            for stage in order:
                if came >= 0:
                    before = [came, last[stage]] if stage in last else [came]
                    last[stage] = step.compute("receive", seconds=0.0, after=before, stage=stage)
                for _ in range(sizes.layers // sizes.stages):
                    block(stage, f"attention {direction} {microbatch}", projections + attention, work)
                    block(stage, f"mlp {direction} {microbatch}", up + down, work)
                neighbour = stage + 1 if work == 1.0 else stage - 1
                if 0 <= neighbour < sizes.stages:
                    part = activations / tensor
                    came = step.send(part, source=stage, destination=neighbour, after=[last[stage]])
    weights = 12.0 * sizes.hidden * sizes.hidden * sizes.layers / sizes.stages / tensor * _HALF
    for stage in range(sizes.stages):
        step.collective("all_reduce", weights, group="across", after=[last[stage]], stage=stage, name="gradients")
    return step.run()


def _held(strategy: str) -> int | None:
    """Multiprocessors beside those of the kernel that makes what is moved; None: what the machine's file says."""
    return 0 if strategy == "fused" else None


def _parts(strategy: str) -> int:
    if strategy not in PARTS:
        raise InvalidArgument(argument="strategy", was=repr(strategy), must=f"one of {', '.join(PARTS)}")
    return PARTS[strategy]


PRESETS: dict[str, Callable[..., Outcome]] = {"dlrm": dlrm, "transformer": transformer}
