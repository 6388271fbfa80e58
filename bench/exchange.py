"""Short notices between ranks of one node on the host, side by side: over the board in shared memory, and over Gloo.

    python bench/exchange.py [--ranks 2,4,8]

Every exchange of addresses, shapes, plans and decisions, and every barrier, is one of these. Blocks of both alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time

import undertow as ut

BLOCKS, CALLS = 10, {"board": 30, "gloo": 6}


def measure() -> dict[str, tuple[float, float]]:
    """Median and ninth decile of an exchange over each, in milliseconds."""
    group = ut.init()
    board, times = group._board, {name: [] for name in CALLS}
    for _ in range(BLOCKS):
        for name, calls in CALLS.items():
            group._board = board if name == "board" else None
            for number in range(calls):
                began = time.perf_counter()
                group.exchange([number, "some text", "a shape"], "a notice")
                times[name].append((time.perf_counter() - began) * 1e3)
    group._board = board
    return {name: (statistics.median(found), sorted(found)[len(found) * 9 // 10]) for name, found in times.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4,8")
    for ranks in [int(one) for one in parser.parse_args().ranks.split(",")]:
        found = ut.launch(measure, ranks, "cpu")[0]
        words = ", ".join(
            f"{name} {middle:.3f} ms (nine of ten below {high:.3f})" for name, (middle, high) in found.items()
        )
        print(f"{ranks} ranks: {words}", flush=True)
