"""How many ranks suit this machine, for commands that were not told."""

from __future__ import annotations

import torch

from .environment import usable_cores

VIRTUAL_RANKS = 4
MOST_CPU_RANKS = 4
FEWEST_CPU_RANKS = 2  # one rank has nobody to talk to, so even a single core hosts two


def resolve_device(device: str) -> str:
    """`auto` to what it means here. Asks the driver's library: makes no context."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.device_count() else "cpu"


def default_ranks(device: str) -> int:
    """CPU: as many as cores, within limits. One GPU: a virtual node. Several: a rank each."""
    if resolve_device(device) == "cpu":
        return max(FEWEST_CPU_RANKS, min(MOST_CPU_RANKS, usable_cores()))
    gpus = torch.cuda.device_count()
    return gpus if gpus > 1 else VIRTUAL_RANKS
