"""Flux: training on 128 GPUs, prefill and decode with tensor parallelism of 8, fused against serial.

PYTHONPATH=src python bench/papers/flux.py
"""

from __future__ import annotations

from dataclasses import replace

from side_by_side import Figure, print_figures

from undertow.sim.cluster import Cluster
from undertow.sim.collectives import Collectives
from undertow.sim.steps import Step
from undertow.sim.what_if import changed
from undertow.sim.workloads import PARTS, Transformer, transformer

EFFICIENCY = 0.67  # of peak, as in flash_overlap.py
HIDDEN, LAYERS, HALF = 12288, 8, 2  # GPT-3 175B's width; layers are alike, so a few of them do


def slower(cluster: Cluster) -> Cluster:
    """The cluster with matmuls at what they reach, not at peak."""
    return replace(cluster, device=replace(cluster.device, peak=EFFICIENCY * cluster.device.peak))


def training(cluster: Cluster) -> float:
    known = Collectives(cluster)
    model = Transformer(hidden=HIDDEN, sequence=2048, batch=2, layers=LAYERS, microbatches=8)
    serial, fused = (transformer(cluster, one, model, known).seconds for one in ("serial", "fused"))
    return serial / fused


def forward(cluster: Cluster, tokens: int) -> tuple[float, float]:
    """(speed-up, overlap efficiency) of one layer's four matmuls on one node, gather and scatter around each pair."""
    known = Collectives(cluster)
    device, ranks = cluster.device, cluster.ranks

    def run(parts: int, moving: bool = True) -> float:
        step, before = Step(cluster, known), []
        for inner, outer in ((3 * HIDDEN, HIDDEN), (4 * HIDDEN, 4 * HIDDEN)):
            done = []
            for _ in range(parts):
                size = tokens / parts * HIDDEN * HALF
                came = [step.collective("all_gather", size, after=before, multiprocessors=0)] if moving else before
                weights = HIDDEN * (inner + outer) / ranks * HALF / parts  # read once, whatever the parts
                flops = 2 * tokens / parts * HIDDEN * (inner + outer) / ranks
                seconds = max(flops / device.peak, weights / device.memory_bandwidth)
                made = step.compute("matmuls", seconds=seconds, after=came)
                if moving:  # by the same kernel: it holds no multiprocessors of its own
                    made = step.collective("reduce_scatter", size, after=[made], stream="sums", multiprocessors=0)
                done.append(made)
            before = done
        return step.run().seconds

    serial, alone = run(1), run(1, moving=False)
    fused = run(PARTS["fused"])
    return serial / fused, 1 - (fused - alone) / (serial - alone)


if __name__ == "__main__":
    node, pod = slower(Cluster.load("a100x8")), slower(Cluster.load("a100x16").scaled(16))
    h800 = changed(slower(Cluster.load("h100x8")), "nvlink", bandwidth=8 / 18)
    prefill, decode = forward(node, 8192), forward(node, 64)
    hopper = forward(h800, 8192)
    print_figures(
        "Flux: fused against serial",
        [
            Figure("training, 128 A100", "up to 1.24× over Megatron-LM", f"{training(pod):.2f}×"),
            Figure("prefill, 8 A100, 8192 tokens", "up to 1.66× over vLLM", f"{prefill[0]:.2f}×"),
            Figure("decode, 8 A100, 64 tokens", "up to 1.30× over vLLM", f"{decode[0]:.2f}×"),
            Figure("overlap, 8 A100, 8192 tokens", "up to 96%", f"{prefill[1]:.0%}"),
            Figure("overlap, 8 H800, 8192 tokens", "up to 96%", f"{hopper[1]:.0%}"),
        ],
        [
            "Serial here is the same schedule without overlap; vLLM's times hold more than these matmuls, so its ratios"
            " are no bound for ours, nor ours for its.",
            "Decode: sixteen parts of 64 tokens pay sixteen latencies each, and nothing is merged as a kernel would; a"
            " real fused kernel pays one. So the simulated figure is too low.",
            "No slowdown between the two sides is simulated: none is published for these kernels.",
            "H800: the H100's node with 8 of its 18 links.",
        ],
    )
