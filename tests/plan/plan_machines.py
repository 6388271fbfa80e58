"""Machines that were never measured, for the tests of predictor, search and tuner."""

from __future__ import annotations

import copy
from typing import Any

from undertow.plan.machine import Machine
from undertow.plan.problem import Problem

VIRTUAL_NODE: dict[str, Any] = {
    "format": "undertow machine 1",
    "name": "one GPU, four ranks",
    "device": "cuda",
    "ranks": 4,
    "shares_device": True,
    "launch_seconds": 3e-6,
    "stream_seconds": 8e-6,
    "gemm": {
        "workers": "SMs",
        "shape": [4096, 4096, 4096],
        "dtype": "bfloat16",
        "points": [[8, 2.8e-3], [16, 1.4e-3], [32, 0.7e-3]],
    },
    "lanes": {
        "dma": {
            "description": "pinned host memory",
            "emulated": False,
            "gemm_slowdown": 1.03,
            "lane_slowdown": 1.02,
            "points": [[1024, 2e-5], [1 << 16, 3e-5], [1 << 20, 1.1e-4], [1 << 24, 1.6e-3], [1 << 28, 2.45e-2]],
        },
        "peer": {
            "description": "the same memory",
            "emulated": False,
            "gemm_slowdown": 1.3,
            "lane_slowdown": 1.5,
            "points": [[1024, 8e-6], [1 << 16, 1e-5], [1 << 20, 1.2e-5], [1 << 24, 5e-5], [1 << 28, 6e-4]],
        },
    },
    "environment": {},
}

TWO_CORES: dict[str, Any] = {
    "format": "undertow machine 1",
    "name": "two cores, two ranks",
    "device": "cpu",
    "ranks": 2,
    "shares_device": False,
    "launch_seconds": 1e-6,
    "stream_seconds": 5e-5,
    "gemm": {"workers": "threads", "shape": [512, 512, 512], "dtype": "float32", "points": [[1, 2.7e-3]]},
    "lanes": {
        "dma": {
            "description": "paced to 1 GB/s",
            "emulated": True,
            "gemm_slowdown": 1.05,
            "lane_slowdown": 1.05,
            "points": [[1024, 1e-4], [1 << 20, 1.1e-3], [1 << 26, 6.7e-2]],
        }
    },
    "environment": {},
}


def machine(data: dict[str, Any] = VIRTUAL_NODE, **changes: Any) -> Machine:
    """The machine with some of its top-level keys replaced."""
    return Machine.from_dict({**copy.deepcopy(data), **changes})


def quiet(data: dict[str, Any] = VIRTUAL_NODE) -> Machine:
    """The machine on which nothing slows anything, and calls and signals cost next to nothing."""
    lanes = {name: {**lane, "gemm_slowdown": 1, "lane_slowdown": 1} for name, lane in data["lanes"].items()}
    return machine(data, lanes=lanes, launch_seconds=1e-12, stream_seconds=1e-12)


def problem(
    operator: str = "matmul_all_reduce", m: int = 8192, n: int = 8192, k: int = 7168, **changes: Any
) -> Problem:
    usual = {"dtype": "bfloat16", "ranks": 4, "device": "cuda", "multiprocessors": 32}
    return Problem.of(operator, m, n, k, **{**usual, **changes})
