"""Collectives on local CPU ranks, side by side: Undertow, Gloo and Open MPI, fp32, 1 KB to 64 MB.

    round 1   for every number of ranks and every size:   one job of Undertow, one of Gloo, one of Open MPI
    round 2   the same again, the jobs in the other order; and so on

Each party has processes of its own: with four ranks on two cores, the threads that Gloo leaves behind cost whoever
shares its processes up to half as much again. Jobs alternate, each half a second long: what the machine does to one
party, it does to all. A block is a row of calls on one buffer; its time is the slowest rank's, and its result is
checked, exactly. The table has the median over rounds of the median over blocks; ratios are formed within rounds. A job
during which other programs computed is run again while `--patience` lasts; rounds that stay disturbed count only where
no other is left.

Open MPI runs with the best settings found for a number of ranks (`--search-mpi` finds them: about six minutes).
What `bytes` means for each collective is in mpi_collectives.py, beside the workload.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi_collectives import COLLECTIVES, WARMUP_BLOCKS, Case, Neighbours, Workload, time_block

import undertow as ut
from undertow.fabric.environment import environment
from undertow.fabric.group import Group
from undertow.fabric.timer import compare

UNDERTOW, GLOO, MPI = PARTIES = ("undertow", "gloo", "mpi")
BLOCKS = 40
NEIGHBOURS = 0.2
"""Cores that other programs may use during a job before it counts as disturbed."""
REPEAT_SECONDS = 60.0
"""Time that one run spends on repeating disturbed jobs: a busy machine must not stop it."""
LIMIT_SECONDS = 330.0
JOB_SECONDS = 120
"""After which an MPI job counts as failed."""

_UCX = ["--mca", "pml", "ucx", "--mca", "opal_common_ucx_tls", "any", "--mca", "opal_common_ucx_devices", "any"]
_VADER = ["--mca", "pml", "ob1", "--mca", "btl", "self,vader"]
_TWO_COPIES = ["--mca", "btl_vader_single_copy_mechanism", "none"]
_YIELD = ["--mca", "mpi_yield_when_idle", "1"]
_BOUND = ["--bind-to", "core:overload-allowed", "--map-by", "core"]
MPI_SETTINGS: dict[str, list[str]] = {
    "vader, single copy": _VADER,
    "vader, two copies": _VADER + _TWO_COPIES,
    "vader, single copy, yield, bound": _VADER + _YIELD + _BOUND,
    "vader, two copies, yield, bound": _VADER + _TWO_COPIES + _YIELD + _BOUND,
    "ucx": _UCX,
    "ucx, yield, bound": _UCX + _YIELD + _BOUND,
}
"""Ways to run Open MPI on one node. Its own choice is the first, with yielding where ranks outnumber cores."""
BEST_WITH_A_CORE_EACH = "ucx"
BEST_WITH_SHARED_CORES = "ucx, yield, bound"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: all ranks and jobs get the same."""

    collective: str
    in_place: bool
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    parties: tuple[str, ...]
    rounds: int
    seconds: float
    limit: float

    def cases(self) -> list[Case]:
        return [Case(self.collective, ranks, size, self.in_place) for ranks in self.ranks for size in self.sizes]


@dataclass(frozen=True, slots=True)
class Job:
    """What a job found: blocks by party, in seconds per call, and the cores that others used meanwhile."""

    samples: dict[str, list[float]]
    neighbours: float


@dataclass(slots=True)
class Round:
    """One round of a line: by party, the median over blocks in seconds per call, and the cores that others used."""

    medians: dict[str, float] = field(default_factory=dict)
    neighbours: dict[str, float] = field(default_factory=dict)

    def add(self, job: Job) -> None:
        for party, samples in job.samples.items():
            self.medians[party] = statistics.median(samples)
            self.neighbours[party] = job.neighbours

    @property
    def is_quiet(self) -> bool:
        return all(cores <= NEIGHBOURS for cores in self.neighbours.values())

    def to_json(self) -> dict[str, Any]:
        microseconds = {party: round(seconds * 1e6, 3) for party, seconds in self.medians.items()}
        return {"us": microseconds, "neighbours": {party: round(one, 2) for party, one in self.neighbours.items()}}


@dataclass(slots=True)
class Line:
    """A line of the table. Disturbed rounds count only if there are no others."""

    case: Case
    rounds: list[Round] = field(default_factory=list)

    def new_round(self) -> Round:
        self.rounds.append(Round())
        return self.rounds[-1]

    @property
    def counted(self) -> list[Round]:
        return [one for one in self.rounds if one.is_quiet] or self.rounds

    def microseconds(self, party: str) -> float | None:
        """Time per call, None for a party that is missing."""
        found = [one.medians[party] for one in self.counted if party in one.medians]
        return statistics.median(found) * 1e6 if found else None

    def ratios(self, party: str) -> list[float]:
        """How many times longer `party` took than Undertow, round by round."""
        both = [one.medians for one in self.counted if party in one.medians and UNDERTOW in one.medians]
        return [medians[party] / medians[UNDERTOW] for medians in both]

    @property
    def remark(self) -> str:
        quiet = sum(one.is_quiet for one in self.rounds)
        if quiet == len(self.rounds):
            return ""
        return f"   {quiet} of {len(self.rounds)} rounds were quiet" if quiet else "   DISTURBED"

    def to_json(self) -> dict[str, Any]:
        found = {party: self.microseconds(party) for party in PARTIES}
        ratios = {f"{party}/{UNDERTOW}": self.ratios(party) for party in PARTIES if party != UNDERTOW}
        return {
            **asdict(self.case),
            "calls": self.case.calls,
            "us": {party: round(value, 3) for party, value in found.items() if value is not None},
            "ratios": {name: round(statistics.median(values), 3) for name, values in ratios.items() if values},
            "quiet": any(one.is_quiet for one in self.rounds),
            "rounds": [one.to_json() for one in self.rounds],
        }


# -- Undertow and Gloo: this function runs in every rank ---------------------------------------------------------------


class CheckedClock:
    """Wall time of a block that begins with fresh inputs and ends with a check of the result."""

    name = "wall, checked"
    default_calls = 1

    def __init__(self, group: Group, workload: Workload, party: str) -> None:
        self._group, self._workload, self._party = group, workload, party

    def now(self) -> float:
        return time.monotonic()

    def sampler(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        def sample() -> float:
            self._workload.fill()
            self._group.barrier()
            seconds = time_block(call, calls)
            self._group.barrier()  # whoever is done first must not check on the core of one who is not
            self._workload.check(self._party)
            return seconds

        return sample


def measure(party: str, case: Case, seconds: float) -> Job:
    """Undertow or Gloo, on one rank."""
    group = ut.init()
    neighbours = Neighbours(lambda value: float(sum(group.exchange(value, "cpu time"))))
    workload = Workload(case, group.rank)
    source = torch.from_numpy(workload.source)
    target = source if case.in_place else torch.from_numpy(workload.target)
    call = {UNDERTOW: bind_undertow, GLOO: bind_gloo}[party](case, source, target)
    found = compare(
        {party: call},
        clock=CheckedClock(group, workload, party),
        calls=case.calls,
        repeats=BLOCKS,
        warmup=WARMUP_BLOCKS,
        budget_seconds=seconds,
        reduce_max=group.reduce_max,
    )
    return Job(found.samples, neighbours.cores())


def bind_undertow(case: Case, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    from undertow import collective

    call: Callable[..., object] = getattr(collective, case.collective)
    return lambda: call(source, out=target)


def bind_gloo(case: Case, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    group = gloo_group()
    torch_dist: Any = dist
    if case.collective == "all_gather":  # under its new name, where torch has it: the old one warns in every call
        gather = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
        return lambda: gather(target, source, group=group)
    if case.collective == "reduce_scatter":
        scatter = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor
        return lambda: scatter(target, source, group=group)
    if case.collective == "all_to_all":
        return lambda: dist.all_to_all_single(target, source, group=group)
    if case.in_place:
        return lambda: dist.all_reduce(target, group=group)

    def copy_and_reduce() -> None:  # Gloo reduces in place only
        target.copy_(source)
        dist.all_reduce(target, group=group)

    return copy_and_reduce


def gloo_group() -> dist.ProcessGroup:
    """A Gloo group whose threads may use every core, though the rank is bound to its own: Gloo is faster so."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # threads inherit it; cores that are not ours are left out
    try:
        made = dist.new_group(backend="gloo")
    finally:
        os.sched_setaffinity(0, mine)
    assert isinstance(made, dist.ProcessGroup)
    return made


def torch_job(party: str, case: Case, seconds: float) -> Job:
    """Undertow or Gloo."""
    found = ut.launch(measure, case.ranks, device="cpu", args=(party, case, seconds), deadline=60)[0]
    assert isinstance(found, Job)
    return found


# -- Open MPI ----------------------------------------------------------------------------------------------------------


class PartyFailed(Exception):
    """A party cannot take part; the message says why."""


@dataclass(frozen=True, slots=True)
class MpiRunner:
    """Runs mpi_collectives.py under mpirun. `settings` names the one of `MPI_SETTINGS` for each number of ranks."""

    python: Path
    settings: dict[int, str]

    def refuse_if_missing(self) -> None:
        if shutil.which("mpirun") is None:
            raise PartyFailed("no mpirun here (Debian: openmpi-bin and libopenmpi-dev)")
        if shutil.which(self.python) is None:
            raise PartyFailed(f"{self.python} is missing (a venv with mpi4py and numpy; see --mpi-python)")
        tried = subprocess.run([self.python, "-c", "import mpi4py.MPI, numpy"], capture_output=True, text=True)
        if tried.returncode != 0:
            raise PartyFailed(f"{self.python} cannot import mpi4py and numpy: {_gist(tried.stderr)}")

    def command(self, ranks: int) -> list[str]:
        every = ["mpirun", "-n", str(ranks), "--allow-run-as-root", "--oversubscribe"]
        return [*every, *MPI_SETTINGS[self.settings[ranks]]]

    def job(self, case: Case, seconds: float) -> Job:
        task = {**asdict(case), "sizes": [case.nbytes], "seconds": seconds, "blocks": BLOCKS}
        script = Path(__file__).with_name("mpi_collectives.py")
        program = [str(self.python), "-m", "mpi4py", str(script), json.dumps(task)]
        limit = ["--timeout", str(JOB_SECONDS)]
        ended = subprocess.run([*self.command(case.ranks), *limit, *program], capture_output=True, text=True)
        if ended.returncode != 0:
            raise PartyFailed(f"mpirun ended with {ended.returncode}: {_gist(ended.stderr)}")
        found = json.loads(ended.stdout.strip().splitlines()[-1])
        return Job({MPI: found["samples"][str(case.nbytes)]}, found["neighbours"])


def _gist(text: str) -> str:
    """The first lines of `text` that say something, or the last one of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
    if lines and lines[0].startswith("Traceback"):
        return next((line for line in lines if "Error: " in line or "Result: " in line), lines[-1])
    return " ".join(lines[:4]) or "no message"


def best_setting(ranks: int) -> str:
    return BEST_WITH_A_CORE_EACH if ranks <= len(os.sched_getaffinity(0)) else BEST_WITH_SHARED_CORES


def search(plan: Plan, python: Path, patience: Patience) -> dict[int, str]:
    """The setting with the least time for each number of ranks, as the geometric mean over sizes; prints all."""
    best: dict[int, str] = {}
    for ranks in plan.ranks:
        cases = [case for case in plan.cases() if case.ranks == ranks]
        lines = {name: [Line(case) for case in cases] for name in MPI_SETTINGS}
        for _ in range(3):
            for number, case in enumerate(cases):
                for name in [one for one in MPI_SETTINGS if one in lines]:
                    runner = MpiRunner(python, {ranks: name})
                    try:
                        job = patience.undisturbed(functools.partial(runner.job, case, plan.seconds / 2))
                    except PartyFailed as error:
                        print(f"mpi, {ranks} ranks, {name}: {error}")
                        del lines[name]
                        continue
                    lines[name][number].new_round().add(job)
        times = {name: [line.microseconds(MPI) or math.inf for line in found] for name, found in lines.items()}
        if not times:
            raise PartyFailed("no setting works")
        scores = {name: statistics.geometric_mean(found) for name, found in times.items()}
        best[ranks] = min(scores, key=lambda name: scores[name])
        print(f"\nOpen MPI, {ranks} ranks, us per call at {', '.join(human(size) for size in plan.sizes)}")
        for name in sorted(scores, key=lambda one: scores[one]):
            print(f"{name:<34}" + "".join(f"{value:>10.1f}" for value in times[name]))
    return best


# -- the run -----------------------------------------------------------------------------------------------------------


class Patience:
    """Repeats jobs that other programs disturbed, as long as the seconds given for that last."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.repeated = 0

    def undisturbed(self, run: Callable[[], Job]) -> Job:
        """The first job that nobody disturbed, or else the least disturbed."""
        best = run()
        while best.neighbours > NEIGHBOURS and self.left > 0:
            start = time.monotonic()
            self._wait_for_quiet()
            again = run()
            self.repeated += 1
            self.left -= time.monotonic() - start
            best = min(best, again, key=lambda job: job.neighbours)
        return best

    def _wait_for_quiet(self) -> None:
        end = time.monotonic() + self.left
        while time.monotonic() < end:
            neighbours = Neighbours(lambda own: own)
            time.sleep(0.3)
            if neighbours.cores() <= NEIGHBOURS:
                return


def run(plan: Plan, mpi: MpiRunner, patience: Patience, absent: dict[str, str]) -> list[Line]:
    """All rounds that the limit leaves time for, at least one. Parties that fail on the way join those `absent`."""
    lines = [Line(case) for case in plan.cases()]
    begin = time.monotonic()
    for number in range(plan.rounds):
        elapsed = time.monotonic() - begin
        if number and elapsed / number * (number + 1) > plan.limit:
            break
        print(f"{elapsed:4.0f} s: round {number + 1} of {plan.rounds}", file=sys.stderr)
        for line in lines:
            case, this_round = line.case, line.new_round()
            jobs: list[Callable[[], Job]] = [
                functools.partial(mpi.job if party == MPI else functools.partial(torch_job, party), case, plan.seconds)
                for party in plan.parties
                if party not in absent
            ]
            for job in jobs if number % 2 == 0 else reversed(jobs):
                try:
                    this_round.add(patience.undisturbed(job))
                except PartyFailed as error:
                    absent[MPI] = str(error)
    return lines


def missing(plan: Plan, mpi: MpiRunner) -> dict[str, str]:
    """Why parties of the plan cannot take part, for those that cannot."""
    absent: dict[str, str] = {}
    if UNDERTOW in plan.parties:
        from undertow import collective

        if not callable(getattr(collective, plan.collective, None)):
            absent[UNDERTOW] = f"undertow.collective has no {plan.collective}"
    if MPI in plan.parties:
        try:
            mpi.refuse_if_missing()
        except PartyFailed as error:
            absent[MPI] = str(error)
    return absent


def human(nbytes: int) -> str:
    power = min(2, int(math.log2(nbytes)) // 10) if nbytes else 0
    return f"{nbytes / 1024**power:g} {('B', 'KB', 'MB')[power]}"


def print_table(plan: Plan, mpi: MpiRunner, lines: Sequence[Line], absent: Mapping[str, str]) -> None:
    place = ("in place" if plan.in_place else "out of place") + ", fp32"
    others = [party for party in plan.parties if party != UNDERTOW and UNDERTOW in plan.parties]
    for ranks in plan.ranks:
        print(f"\n{plan.collective} on {ranks} ranks, {place}; us per call, medians of {len(lines[0].rounds)} rounds")
        if MPI in plan.parties and MPI not in absent:
            print(f"Open MPI: {mpi.settings[ranks]}")
        heads = "".join(f"{party:>12}" for party in plan.parties)
        print(f"{'bytes':>8}{heads}" + "".join(f"{party + '/' + UNDERTOW:>24}" for party in others))
        for line in lines:
            if line.case.ranks != ranks:
                continue
            row = f"{human(line.case.nbytes):>8}"
            for party in plan.parties:
                value = line.microseconds(party)
                row += f"{'missing':>12}" if value is None else f"{value:>12.1f}"
            for party in others:
                found = line.ratios(party)
                spread = f"{statistics.median(found):.2f} [{min(found):.2f}, {max(found):.2f}]" if found else "-"
                row += f"{spread:>24}"
            print(row + line.remark)
    for party, reason in absent.items():
        print(f"{party} is missing: {reason}")


def write(path: Path, plan: Plan, mpi: MpiRunner, lines: Sequence[Line], absent: Mapping[str, str]) -> None:
    document = {
        "environment": environment({"ranks": list(plan.ranks), "mpi": mpi_version()}),
        "plan": asdict(plan),
        "absent": absent,
        "mpi": {ranks: {"setting": mpi.settings[ranks], "command": mpi.command(ranks)} for ranks in plan.ranks},
        "lines": [line.to_json() for line in lines],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"Written: {path}")


def mpi_version() -> str | None:
    if shutil.which("mpirun") is None:
        return None
    return subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


def parse_size(text: str) -> int:
    """Bytes of `64K`, `1M`, `512`."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    if not digits.isdigit() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; 1K or 64M is")
    return int(digits) * factor


def parse_sizes(text: str) -> tuple[int, ...]:
    """`1K..64M` by powers of four, or a list with commas."""
    low, dots, high = text.partition("..")
    if not dots:
        return tuple(parse_size(one) for one in text.split(","))
    first, last = parse_size(low), parse_size(high)
    return tuple(first << 2 * step for step in range(64) if first << 2 * step <= last)


def parse_ranks(text: str) -> tuple[int, ...]:
    if not all(one.isdigit() and int(one) >= 2 for one in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of rank numbers; 2,4 is")
    return tuple(int(one) for one in text.split(","))


def parse_parties(text: str) -> tuple[str, ...]:
    chosen = text.split(",")
    if not set(chosen) <= set(PARTIES):
        raise argparse.ArgumentTypeError(f"{text!r} names others than {', '.join(PARTIES)}")
    return tuple(party for party in PARTIES if party in chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    named = Path("bench/results") / f"cpu_collectives_{today}.json"
    parser.add_argument("--collective", choices=COLLECTIVES, default="all_reduce")
    parser.add_argument("--out-of-place", action="store_true", help="all_reduce into a second buffer")
    parser.add_argument("--ranks", type=parse_ranks, default=(2, 4), help="2,4")
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1K..64M"), help="1K..64M, or 1K,1M")
    parser.add_argument("--parties", type=parse_parties, default=PARTIES, help=",".join(PARTIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of blocks, for each party, size and round")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, help="seconds that no round may exceed, the first excepted"
    )
    parser.add_argument("--patience", type=float, default=REPEAT_SECONDS, help="seconds for repeating disturbed jobs")
    parser.add_argument("--mpi-python", type=Path, default=Path("python3"), help="has mpi4py")
    parser.add_argument("--search-mpi", action="store_true", help="first look for the best settings of Open MPI")
    parser.add_argument("--out", nargs="?", type=Path, const=named, help=f"write JSON; without a value to {named}")
    options = parser.parse_args()
    plan = Plan(
        collective=options.collective,
        in_place=options.collective == "all_reduce" and not options.out_of_place,
        ranks=options.ranks,
        sizes=options.sizes,
        parties=options.parties,
        rounds=options.rounds,
        seconds=options.seconds,
        limit=options.limit,
    )
    mpi = MpiRunner(options.mpi_python, {ranks: best_setting(ranks) for ranks in plan.ranks})
    absent = missing(plan, mpi)
    patience = Patience(options.patience)
    if options.search_mpi and MPI in plan.parties and MPI not in absent:
        mpi = MpiRunner(options.mpi_python, search(plan, options.mpi_python, patience))
    lines = run(plan, mpi, patience, absent)
    print_table(plan, mpi, lines, absent)
    print(f"{patience.repeated} jobs were repeated because other programs computed meanwhile.")
    if options.out is not None:
        write(options.out, plan, mpi, lines, absent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
