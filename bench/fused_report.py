"""Scores and lines of the fused benchmarks.

E = 1 - (fused - alone) / (serial - cublas): against cuBLAS as what is alone, and against our own kernel.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

KINDS = ("scatter", "gather", "column", "row", "reduce", "decode", "leave", "arrive")


def best(median: dict[str, float], prefix: str) -> float:
    return min((took for name, took in median.items() if name.startswith(prefix)), default=math.nan)


def scores(one: dict[str, Any]) -> dict[str, float]:
    median = one["median"]
    fused, serial = best(median, "fused"), best(median, "serial")
    if one["kind"] in ("reduce", "decode"):
        serial = min(serial, best(median, "torch"))
    cublas, gemm = best(median, "cublas"), median.get("gemm", math.nan)
    exposed = serial - cublas
    return {
        "over serial": serial / fused, "over torch": best(median, "torch") / fused,
        "E": 1 - (fused - cublas) / exposed, "E own": 1 - (fused - gemm) / exposed, "share": exposed / serial,
        "over best": min(serial, best(median, "torch")) / fused,
    }  # fmt: skip


def line(one: dict[str, Any]) -> str:
    text = f"{one['kind']:7} {one['label']:11} M {one['m']:5} K {one['k']:5} N {one['n']:5}"
    for name, took in one["median"].items():
        text += f" {name} {took * 1e6:.1f}{'e' if name in one['eager'] else ''}"
    score = scores(one)
    if one["kind"] == "decode":  # what bounds it: all ranks' weights, once
        streamed = one["ranks"] * one["k"] * one["n"] * 2
        speeds = (streamed / best(one["median"], name) * 1e-12 for name in ("fused", "cublas"))
        text += " | TB/s of weights: fused {:.2f}, cublas {:.2f}".format(*speeds)
    text += f" | x serial {score['over serial']:.2f} x torch {score['over torch']:.2f}"
    text += f" E {score['E']:.2f} own {score['E own']:.2f} comm {score['share']:.0%} ({one['spent']:.1f} s)"
    return text + "".join(f"\n    {name} left out: {reason}" for name, reason in one["wrong"].items())


def mean(values: list[float]) -> float:
    good = [one for one in values if math.isfinite(one) and one > 0]
    return math.exp(statistics.mean(map(math.log, good))) if good else math.nan


def summary(found: list[dict[str, Any]]) -> str:
    lines = []
    for kind in KINDS:
        some = [scores(one) for one in found if one["kind"] == kind]
        if not some:
            continue
        exposed = [one for one in some if one["share"] >= 0.1 and math.isfinite(one["E own"])]
        serial, torch_, either = (mean([one[f"over {name}"] for one in some]) for name in ("serial", "torch", "best"))
        text = f"{kind}: {len(some)} shapes, x serial {serial:.3f}, x torch {torch_:.3f}, x best {either:.3f}"
        if exposed:
            own, other = [one["E own"] for one in exposed], [one["E"] for one in exposed]
            text += f"; comm >= 10% on {len(exposed)}: E own mean {statistics.mean(own):.2f} best {max(own):.2f}"
            text += f", E cuBLAS mean {statistics.mean(other):.2f}"
        lines.append(text)
    return "\n".join(lines)
