"""`undertow doctor`: what this machine offers, which strategies it can run, and why not the others.

It must work on the machines where nothing else does. So each fact is found by a probe of its own, and whatever a probe
raises becomes its finding, in one line. `examine` leaves no CUDA context in the calling process: what only the driver
knows is asked in a short process of its own.
"""

from __future__ import annotations

import functools
import importlib
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..fabric.environment import commit, cpu_model, driver_version, nccl_version, usable_cores
from ..fabric.segment import Segment, available_memory, human
from . import cuda_facts

PATIENCE = 20.0
"""Seconds after which a probe's process is given up: a broken driver may never answer."""


class Missing(Exception):
    """Raised by a probe for something that is plainly not there; its text says so to the user."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact: a `value`, or else the `problem` that stood in its way."""

    topic: str
    name: str
    value: Any = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class StrategyFinding:
    """Whether a strategy can run on this machine, and through what, or why not."""

    strategy: str
    available: bool
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """All findings, JSON-able by `to_json`."""

    findings: list[Finding] = field(default_factory=list)
    strategies: list[StrategyFinding] = field(default_factory=list)

    def get(self, topic: str, name: str) -> Finding:
        for finding in self.findings:
            if (finding.topic, finding.name) == (topic, name):
                return finding
        return Finding(topic, name, problem="not probed")

    def to_json(self) -> dict[str, Any]:
        return {"format": "undertow diagnosis 1", **asdict(self)}


Probe = tuple[str, str, Callable[[], Any]]


def probe(topic: str, name: str, function: Callable[[], Any]) -> Finding:
    """Run one probe. The one place in Undertow that catches every exception: here any failure *is* the answer."""
    try:
        return Finding(topic, name, function())
    except Missing as missing:
        return Finding(topic, name, problem=str(missing))
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Finding(topic, name, problem=f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def examine(probes: Iterable[Probe] | None = None) -> Diagnosis:
    """Run all probes (or those given) and judge every strategy by what they found."""
    diagnosis = Diagnosis([probe(*each) for each in (default_probes() if probes is None else probes)])
    diagnosis.strategies.extend(judge(diagnosis))
    return diagnosis


def default_probes() -> list[Probe]:
    ask_driver = functools.cache(functools.partial(probe, "gpu", "driver's answer", _ask_driver))  # once, good or bad

    def answer(key: str) -> Any:
        found = ask_driver()
        if found.problem is not None:
            raise Missing(found.problem)
        return found.value[key]

    return [
        ("system", "os", platform.platform),
        ("system", "cpu", cpu_model),
        ("system", "cores", usable_cores),
        ("system", "memory", _memory),
        ("software", "undertow", _undertow),
        ("software", "python", platform.python_version),
        ("software", "torch", lambda: torch.__version__),
        ("software", "numba", lambda: _distribution("numba")),
        ("software", "triton", lambda: _distribution("triton")),
        ("software", "CUDA", lambda: _or_missing(torch.version.cuda, "torch was built without CUDA")),
        ("software", "NCCL", lambda: _or_missing(nccl_version(), "torch was built without NCCL")),
        ("software", "backends", _backends),
        ("software", "symmetric memory", _symmetric_memory),
        ("shared memory", "memfd", _memory_file),
        ("shared memory", "other process", _other_process),
        ("shared memory", "ptrace scope", _ptrace_scope),
        ("shared memory", "/dev/shm", _shared_memory_file_system),
        ("gpu", "driver", lambda: _or_missing(driver_version(), "no NVIDIA driver is installed")),
        ("gpu", "devices", lambda: answer("devices")),
        ("gpu", "peer access", lambda: answer("peer_access")),
        ("gpu", "MPS", lambda: _program("nvidia-cuda-mps-control")),
        ("gpu", "MPS daemon", _mps_daemon),
        ("two hosts", "ip", lambda: _program("ip")),
        ("two hosts", "tc", lambda: _program("tc")),
        ("two hosts", "root", _root),
        ("two hosts", "namespaces", _namespaces),
    ]


def _or_missing(value: str | None, problem: str) -> str:
    if value is None:
        raise Missing(problem)
    return value


def _memory() -> str:
    total = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return f"{human(total)}, {human(available_memory())} available"


def _undertow() -> str:
    from .. import __version__

    found = commit()
    return f"{__version__} ({found[:12]})" if found else __version__


def _distribution(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise Missing("not installed") from None


def _backends() -> list[str]:
    if not torch.distributed.is_available():
        raise Missing("torch was built without torch.distributed")
    known = {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }
    return [name for name, there in known.items() if there]


def _symmetric_memory() -> bool:
    importlib.import_module("torch.distributed._symmetric_memory")
    return True


def _memory_file() -> bool:
    segment = Segment.create(mmap.PAGESIZE, "doctor")
    try:
        segment.tensor(0, (1,), torch.uint8).fill_(7)
    finally:
        segment.close()
    return True


def _other_process() -> bool:
    """Whether another process can open and write this one's segment, which security modules may forbid."""
    segment = Segment.create(mmap.PAGESIZE, "doctor")
    try:
        _run([sys.executable, "-I", "-c", "import sys; open(sys.argv[1], 'r+b').write(b'7')", segment.path])
        if segment.tensor(0, (1,), torch.uint8).item() != ord("7"):
            raise Missing("another process wrote to the memory, but the byte did not arrive")
    finally:
        segment.close()
    return True


def _ptrace_scope() -> int | str:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    return int(path.read_text()) if path.exists() else "unrestricted (no Yama)"


def _shared_memory_file_system() -> str:
    facts = os.statvfs("/dev/shm")
    return f"{human(facts.f_blocks * facts.f_frsize)}, {human(facts.f_bavail * facts.f_frsize)} free"


def _ask_driver() -> dict[str, Any]:
    answer = json.loads(_run([sys.executable, "-I", cuda_facts.__file__]))
    if not answer["devices"]:
        raise Missing("no GPU is visible")
    return dict(answer)


def _program(name: str) -> str:
    return _or_missing(shutil.which(name), f"no program {name} on the path")


def _mps_daemon() -> str:
    """Asks the daemon for its servers: it answers, with none, also before the first client came."""
    _run([_program("nvidia-cuda-mps-control")], text="get_server_list\n")
    return f"running at {os.environ.get('CUDA_MPS_PIPE_DIRECTORY', '/tmp/nvidia-mps')}"


def _root() -> bool:
    if os.geteuid() != 0:
        raise Missing("not root, which network namespaces need")
    return True


def _namespaces() -> bool:
    """Root in a container may still lack the right to make namespaces; this one ends with its process."""
    _run([_program("unshare"), "--net", "--mount", "true"])
    return True


def _run(command: list[str], text: str = "") -> str:
    """The standard output of `command`, or what it said last if it failed."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise Missing(f"{Path(command[0]).name} did not answer within {PATIENCE:.0f} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise Missing(said[-1] if said else f"{Path(command[0]).name} ended with status {done.returncode}")
    return done.stdout


def judge(diagnosis: Diagnosis) -> list[StrategyFinding]:
    """The strategies, each judged for CPU ranks and for GPU ranks; one of the two suffices."""
    cpu, gpu = _cpu_lanes(diagnosis), _gpu_lanes(diagnosis)
    found = []
    for grain in ("serial", "chunked", "signaled", "fused"):
        for lane in ("net", "peer", "dma"):
            on_cpu, on_gpu = cpu[lane], gpu[lane]
            reason = f"CPU: {on_cpu[1]}; GPU: {on_gpu[1]}"
            found.append(StrategyFinding(f"{grain}:{lane}", on_cpu[0] or on_gpu[0], reason))
    return found


Verdict = tuple[bool, str]


def _cpu_lanes(diagnosis: Diagnosis) -> dict[str, Verdict]:
    net = _needs(diagnosis, [("software", "backends")], "torch.distributed")
    memory = [("shared memory", "memfd"), ("shared memory", "other process")]
    return {
        "net": net,
        "peer": _needs(diagnosis, memory, "shared memory"),
        "dma": _needs(diagnosis, memory, "a helper thread over shared memory"),
    }


def _gpu_lanes(diagnosis: Diagnosis) -> dict[str, Verdict]:
    devices = diagnosis.get("gpu", "devices")
    if devices.problem is not None:
        return dict.fromkeys(("net", "peer", "dma"), (False, devices.problem))
    access = diagnosis.get("gpu", "peer access").value or []
    every_peer = all(all(row) for row in access)
    several = len(devices.value) > 1
    base = [("software", "CUDA")]
    through_net = "NCCL" if _nccl_serves(diagnosis, several) else "NCCL over sockets, as ranks share a GPU"
    net = _needs(diagnosis, [("software", "CUDA"), ("software", "backends")], through_net)
    if several and not every_peer:
        peer: Verdict = (False, "not all GPUs have peer access to each other")
    else:
        shared = "MPS" if diagnosis.get("gpu", "MPS").problem is None else "time slicing, as there is no MPS"
        through = "peer access between the GPUs" if several else f"one GPU shared by all ranks under {shared}"
        peer = _needs(diagnosis, [*base, ("software", "triton"), ("software", "symmetric memory")], through)
    staged = "copy engines, peer to peer" if several and every_peer else "copy engines, through pinned host memory"
    dma = _needs(diagnosis, [*base, ("shared memory", "other process")], staged)
    return {"net": net, "peer": peer, "dma": dma}


def _nccl_serves(diagnosis: Diagnosis, several: bool) -> bool:
    """NCCL before 2.30 refuses two ranks on one GPU, unless they pretend to be two hosts, as a launch makes them do."""
    version = diagnosis.get("software", "NCCL").value
    return version is not None and (several or tuple(map(int, version.split(".")[:2])) >= (2, 30))


def _needs(diagnosis: Diagnosis, wanted: list[tuple[str, str]], through: str) -> Verdict:
    """Available `through` something if all `wanted` findings are good, else the first problem."""
    for topic, name in wanted:
        finding = diagnosis.get(topic, name)
        if finding.problem is not None:
            return False, f"{name}: {finding.problem}"
    return True, through


def render(diagnosis: Diagnosis) -> RenderableType:
    """The diagnosis for people: facts by topic, then the strategies."""
    facts = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    facts.add_column("topic", style="bold", no_wrap=True)
    facts.add_column("name", no_wrap=True)
    facts.add_column("value")
    topic = ""
    for finding in diagnosis.findings:
        if finding.topic != topic and topic:
            facts.add_section()
        value = Text(finding.problem, style="yellow") if finding.problem is not None else Text(_words(finding))
        facts.add_row("" if finding.topic == topic else finding.topic, finding.name, value)
        topic = finding.topic
    strategies = Table(box=box.SIMPLE, pad_edge=False)
    strategies.add_column("strategy", no_wrap=True)
    strategies.add_column("available", no_wrap=True)
    strategies.add_column("through, or why not")
    for each in diagnosis.strategies:
        mark = Text("yes", style="green") if each.available else Text("no", style="yellow")
        strategies.add_row(each.strategy, mark, Text(each.reason))
    return Group(facts, strategies)


def _words(finding: Finding) -> str:
    value = finding.value
    if value is True:
        return "yes"
    if (finding.topic, finding.name) == ("gpu", "devices"):
        return "\n".join(f"{index}: {_device(device)}" for index, device in enumerate(value))
    if (finding.topic, finding.name) == ("gpu", "peer access"):
        if len(value) == 1:
            return "a single GPU"
        return "\n".join(" ".join("yes" if cell else "no" for cell in row) for row in value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _device(device: dict[str, Any]) -> str:
    return (
        f"{device['name']}, {device['sms']} SMs, {human(device['memory'])}, compute capability"
        f" {device['compute_capability']}, {device['copy_engines']} copy engines"
    )
