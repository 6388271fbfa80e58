"""Compile times against their bars: programs of many ranks, traced, compiled and checked on one core.

    trace     the program's Python function, run once
    compile   order, fuse, give to workers, synchronise; target direct, in place
    check     the schedule judged as it will run

Each row is a process of its own, on one core, with Numba's cache filled before: `peak` is the most memory that process
ever held, Python and its libraries included. Seconds are CPU time, which a busy machine does not stretch; the wall time
of the whole is beside them. A row is measured several times, and its fastest run counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """A program for `nodes` nodes of `per_node` ranks, with its bars in seconds and megabytes."""

    program: str
    nodes: int
    per_node: int
    bar: float
    most_mb: float | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Result:
    """What one process found."""

    trace: float
    compile: float
    check: float
    wall: float
    peak_mb: float
    instructions: int
    waits: int

    @property
    def total(self) -> float:
        return self.trace + self.compile + self.check


ROWS = (
    Row("ring", 1, 128, 1.0),
    Row("ring", 1, 1024, 15.0),
    Row("all_pairs_chunks", 1, 32, 2.0),
    Row("halving_doubling", 1, 128, 1.0),
    Row("hierarchical", 16, 8, 2.0),
    Row("all_to_all_two_step", 32, 8, 4.0, 600.0),
)
WARM_UP = Row("hierarchical", 2, 2, 60.0)


def measure(row: Row) -> Result:
    """In this process. Two measurements in one process would share the peak of memory."""
    from undertow.collective.algorithms import LIBRARY
    from undertow.collective.checker import check
    from undertow.collective.compiler import compile_trace
    from undertow.collective.topology import Topology

    LIBRARY["ring"].compile(2, target="direct", in_place=True)  # loads what is compiled
    topology = Topology.grid(row.nodes, row.per_node)
    began, clock = time.perf_counter(), [time.process_time()]
    trace = LIBRARY[row.program].trace(topology=topology)
    clock.append(time.process_time())
    schedule = compile_trace(trace, target="direct", in_place=True, check=False)
    clock.append(time.process_time())
    report = check(schedule)
    clock.append(time.process_time())
    wall = time.perf_counter() - began
    seconds = [after - before for before, after in itertools.pairwise(clock)]
    # Of this program alone: what getrusage says of a child begins with what its parent took.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return Result(*seconds, wall, peak, report.instructions, report.waits)


def measured(row: Row) -> Result:
    """In a process of its own, on one core."""
    code = f"import compile_time as b, dataclasses, json; print(json.dumps(dataclasses.asdict(b.measure(b.{row!r}))))"
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}}); {code}"],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Result(**json.loads(done.stdout))


def is_good(row: Row, found: Result) -> bool:
    return found.total <= row.bar and (row.most_mb is None or found.peak_mb <= row.most_mb)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = Path("bench/results") / f"compile_time_{datetime.now(UTC):%Y-%m-%d}.json"
    parser.add_argument("--out", nargs="?", type=Path, const=named, help=f"write JSON; without a value to {named}")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    measured(WARM_UP)
    print(f"{'program':<22}{'ranks':>7}{'trace s':>9}{'compile s':>11}{'check s':>9}{'total s':>9}{'bar s':>7}", end="")
    print(f"{'wall s':>8}{'peak MB':>9}")
    lines = []
    for row in ROWS:
        found = min((measured(row) for _ in range(options.repeats)), key=lambda one: one.total)
        good = is_good(row, found)
        lines.append({**asdict(row), "ranks": row.ranks, **asdict(found), "total": found.total, "good": good})
        print(f"{row.program:<22}{row.ranks:>7}{found.trace:>9.2f}{found.compile:>11.2f}{found.check:>9.2f}", end="")
        print(f"{found.total:>9.2f}{row.bar:>7g}{found.wall:>8.2f}{found.peak_mb:>9.0f}", end="  ")
        memory = "" if row.most_mb is None else f"<= {row.most_mb:g} MB  "
        print(f"{memory}{'ok' if good else 'MISSED'}", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"rows": lines, "repeats": options.repeats}, indent=1) + "\n")
        print(f"Written: {options.out}")
    return 0 if all(line["good"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
