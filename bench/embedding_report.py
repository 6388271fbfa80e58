"""What `gpu_embedding.py` measures of a shape, and how it is told."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

PUBLISHED = "4 GPUs of a node -25% mean, up to -35%; between nodes -31% mean, up to -58% (arXiv 2305.06942)"


@dataclass(frozen=True)
class Case:
    batch: int
    tables: int
    dim: int
    pooling: int
    dtype: str
    indices: str

    def __str__(self) -> str:
        kind = "bf16" if self.dtype == "bfloat16" else "fp32"
        return f"B{self.batch:5} T{self.tables:3} D{self.dim:4} L{self.pooling:3} {kind} {self.indices:7}"


def fastest_over_host(one: dict[str, Any]) -> str:
    """The name of the fastest way to overlap over the host link."""
    m = one["median"]
    ways = ("host signaled", "host chunked", "host fused")
    return min((name for name in m if name.startswith(ways)), key=lambda name: m[name])


def numbers(one: dict[str, Any], stream: float) -> dict[str, float]:
    """The figures that are asked for."""
    m = one["median"]
    torchs = min(m["torch"], m["torch stacked"])
    found = {
        "lookup/stream": one["bytes"] / m["lookup"] / stream, "torch/lookup": torchs / m["lookup"],
        "fused/lookup": m["fused"] / m["lookup"], "reduction": 1 - m["fused"] / m["serial"],
        "against chunked": 1 - m["fused"] / m["chunked"],
        "hidden": 1 - (m["fused"] - m["lookup"]) / max(1e-9, m["serial"] - m["lookup"]),
        "lookup GB/s": one["bytes"] / m["lookup"] / 1e9, "fused GB/s": one["bytes"] / m["fused"] / 1e9,
    }  # fmt: skip
    if "host serial" in m:
        best = m[fastest_over_host(one)]
        ideal = min(m["lookup"], m["host move"]) / (m["lookup"] + m["host move"])
        found |= {
            "host reduction": 1 - best / m["host serial"], "host ideal": ideal,
            "host share": (1 - best / m["host serial"]) / ideal,
        }  # fmt: skip
    return found


def line(one: dict[str, Any], stream: float) -> str:
    m, n = one["median"], numbers(one, stream)
    text = (
        f"{Case(**one['case'])} | lookup {m['lookup'] * 1e3:7.3f} ms {n['lookup/stream']:4.2f} of stream,"
        f" torch {n['torch/lookup']:5.2f}x | serial {m['serial'] * 1e3:7.3f} move {m['move'] * 1e3:6.3f}"
        f" chunked {m['chunked'] * 1e3:7.3f}"
        f" fused {m['fused'] * 1e3:7.3f} = {n['fused/lookup']:4.2f} lookup, {-n['reduction']:+5.0%}"
        f" hidden {n['hidden']:4.0%} | GB/s {n['lookup GB/s']:5.0f} alone {n['fused GB/s']:5.0f} fused"
    )
    if "host serial" in m:
        text += f" | host serial {m['host serial'] * 1e3:6.2f} move {m['host move'] * 1e3:6.2f}"
        for grain in ("signaled", "fused"):
            if f"host {grain}" in m:
                text += f" {grain} {m[f'host {grain}'] * 1e3:6.2f}"
                text += "".join(
                    f" in {key.split()[-1]} {m[key] * 1e3:.2f}" for key in m if key.startswith(f"host {grain} ")
                )
        text += (
            f" chunked {m['host chunked'] * 1e3:6.2f} best {fastest_over_host(one)[5:]} {-n['host reduction']:+5.0%}"
            f" ideal {-n['host ideal']:+5.0%}"
        )
    if one.get("copied"):
        text += f" | {one['copied']} captured results were copied out: no place was free"
    return text


def mean(values: list[float]) -> float:
    return statistics.mean(values) if values else math.nan


def summary(found: dict[str, Any]) -> str:
    stream = found["stream"]["read"]
    every = [(one, numbers(one, stream)) for one in found["cases"]]
    wide = [n for one, n in every if one["row"] >= 256 and one["case"]["pooling"] >= 10]
    short = [n for one, n in every if one["case"]["pooling"] == 1]
    host = [n for _, n in every if "host share" in n]
    ways = Counter(fastest_over_host(one)[5:] for one, n in every if "host share" in n)

    def planned(grain: str) -> float:
        """The reduction by the parcels that the plan itself chooses."""
        both = [(one["median"].get(f"host {grain}"), one["median"].get("host serial")) for one, _ in every]
        return mean([1 - ours / serial for ours, serial in both if ours and serial])

    rows = [
        ("fused / own lookup, mean (asked <= 1.08)", mean([n["fused/lookup"] for _, n in every])),
        ("All-to-All time hidden, mean (>= 0.80)", mean([n["hidden"] for _, n in every])),
        ("reduction against serial at pooling 1, mean (>= 0.35)", mean([n["reduction"] for n in short])),
        ("reduction against serial, mean", mean([n["reduction"] for _, n in every])),
        ("reduction against serial, least (>= 0)", min([n["reduction"] for _, n in every], default=math.nan)),
        ("reduction against chunked, mean", mean([n["against chunked"] for _, n in every])),
        ("the same, least", min([n["against chunked"] for _, n in every], default=math.nan)),
        ("host link: share of the ideal reduction, mean (>= 0.80)", mean([n["host share"] for n in host])),
        ("host link: reduction by the plan's own parcels, signaled, mean", planned("signaled")),
        ("the same, fused: posted by the kernel", planned("fused")),
        ("host link: least reduction (>= 0)", min([n["host reduction"] for n in host], default=math.nan)),
        ("own lookup / stream, rows >= 256 B, pooling >= 10, mean", mean([n["lookup/stream"] for n in wide])),
        ("the same, least (>= 0.85)", min([n["lookup/stream"] for n in wide], default=math.nan)),
        ("torch's faster embedding_bag / own lookup there, mean (>= 1.2)", mean([n["torch/lookup"] for n in wide])),
        ("the same, least", min([n["torch/lookup"] for n in wide], default=math.nan)),
    ]
    text = "\n".join(f"{name:60} {value:6.3f}" for name, value in rows)
    fastest = ", ".join(f"{name} {count}" for name, count in ways.most_common())
    return f"{len(every)} shapes\n{text}\nhost link, without graphs, fastest: {fastest}\npublished: {PUBLISHED}"
