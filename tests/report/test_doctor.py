"""The doctor: every failure is a finding, every strategy has a reason, CUDA stays out of this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from undertow.plan.plan import GRAINS
from undertow.report import cuda_facts, doctor
from undertow.report.doctor import Diagnosis, Finding, Missing, examine, judge, probe, render
from undertow.report.tables import plain

H200 = {"name": "NVIDIA H200", "memory": 139 << 30, "sms": 132, "copy_engines": 5, "compute_capability": "9.0"}


def healthy(gpus: int = 0, peer_access: bool = True, **changes: Finding) -> Diagnosis:
    """A machine where all is well, with `gpus` GPUs; `changes` replaces findings by name."""
    findings = [
        Finding("software", "backends", ["gloo", "nccl"]),
        Finding("software", "symmetric memory", True),
        Finding("shared memory", "memfd", True),
        Finding("shared memory", "other process", True),
    ]
    if gpus:
        access = [[peer_access or i == j for j in range(gpus)] for i in range(gpus)]
        findings += [
            Finding("software", "CUDA", "13.0"),
            Finding("software", "triton", "13.0.3"),
            Finding("software", "NCCL", "2.28.9"),
            Finding("gpu", "devices", [H200] * gpus),
            Finding("gpu", "peer access", access),
            Finding("gpu", "MPS", "/usr/bin/nvidia-cuda-mps-control"),
        ]
    else:
        findings.append(Finding("gpu", "devices", problem="no GPU is visible"))
    replaced = {(finding.topic, finding.name): finding for finding in changes.values()}
    return Diagnosis([replaced.get((finding.topic, finding.name), finding) for finding in findings])


def reasons(diagnosis: Diagnosis) -> dict[str, tuple[bool, str]]:
    return {each.strategy: (each.available, each.reason) for each in judge(diagnosis)}


def test_any_exception_becomes_a_finding_of_one_line() -> None:
    def broken() -> None:
        raise ValueError("first line\nsecond line")

    def absent() -> None:
        raise Missing("no such thing")

    def speechless() -> None:
        raise Speechless

    class Speechless(Exception):
        pass

    assert probe("a", "b", broken) == Finding("a", "b", problem="ValueError: first line")
    assert probe("a", "b", absent) == Finding("a", "b", problem="no such thing")
    assert probe("a", "b", speechless) == Finding("a", "b", problem="Speechless")
    assert probe("a", "b", lambda: 3) == Finding("a", "b", 3)


def test_a_machine_where_everything_fails_is_still_diagnosed() -> None:
    def broken() -> Any:
        raise OSError(5, "Input/output error")

    diagnosis = examine([(topic, name, broken) for topic, name, _ in doctor.default_probes()])
    assert all(finding.problem == "OSError: [Errno 5] Input/output error" for finding in diagnosis.findings)
    assert not any(each.available for each in diagnosis.strategies)
    assert all(each.reason for each in diagnosis.strategies)
    assert "Input/output error" in plain(render(diagnosis))
    json.dumps(diagnosis.to_json())


def test_this_machine_is_examined_without_touching_cuda() -> None:
    used_before = torch.cuda.is_initialized()
    diagnosis = examine()
    assert torch.cuda.is_initialized() == used_before
    assert {(finding.topic, finding.name) for finding in diagnosis.findings} == {
        (topic, name) for topic, name, _ in doctor.default_probes()
    }
    assert diagnosis.get("software", "torch").value == torch.__version__
    assert diagnosis.get("system", "cores").value >= 1
    assert diagnosis.get("shared memory", "memfd").value is True
    assert diagnosis.get("shared memory", "other process").value is True
    assert json.loads(json.dumps(diagnosis.to_json()))["format"] == "undertow diagnosis 1"
    text = plain(render(diagnosis))
    assert all(each.strategy in text for each in diagnosis.strategies)


def test_cpu_only_machine() -> None:
    found = reasons(healthy())
    everywhere = [f"{grain}:{lane}" for grain in GRAINS for lane in ("net", "peer", "dma")]
    assert list(found) == everywhere
    assert found["serial:net"] == (True, "CPU: torch.distributed; GPU: no GPU is visible")
    assert found["chunked:dma"][0]
    assert found["fused:peer"] == (True, "CPU: shared memory; GPU: no GPU is visible")


def test_forbidden_shared_memory_leaves_net_alone() -> None:
    problem = Finding("shared memory", "other process", problem="Permission denied")
    found = reasons(healthy(problem=problem))
    assert found["serial:net"][0]
    for lane in ("peer", "dma"):
        available, reason = found[f"chunked:{lane}"]
        assert not available
        assert "other process: Permission denied" in reason


def test_one_gpu_is_a_virtual_node() -> None:
    found = reasons(healthy(gpus=1))
    assert "one GPU shared by all ranks under MPS" in found["serial:peer"][1]
    assert "through pinned host memory" in found["serial:dma"][1]
    assert "GPU: NCCL over sockets" in found["serial:net"][1], "NCCL 2.28 refuses two ranks on one GPU"
    newer = reasons(healthy(gpus=1, nccl=Finding("software", "NCCL", "2.30.1")))
    assert found["serial:net"][1] != newer["serial:net"][1]
    assert newer["serial:net"][1].endswith("GPU: NCCL")


def test_several_gpus_with_and_without_peer_access() -> None:
    connected = reasons(healthy(gpus=4))
    assert "GPU: peer access between the GPUs" in connected["serial:peer"][1]
    assert "GPU: copy engines, peer to peer" in connected["serial:dma"][1]
    assert "GPU: NCCL" in connected["serial:net"][1]
    apart = reasons(healthy(gpus=4, peer_access=False))
    assert "GPU: not all GPUs have peer access" in apart["serial:peer"][1]
    assert "through pinned host memory" in apart["serial:dma"][1]


def test_gpu_facts_are_shown_in_words() -> None:
    text = plain(render(healthy(gpus=2, peer_access=False)))
    assert "0: NVIDIA H200, 132 SMs, 139.0 GiB, compute capability 9.0, 5 copy engines" in text
    assert "yes no" in text
    assert "no yes" in text
    assert "a single GPU" in plain(render(healthy(gpus=1)))


def test_a_process_that_hangs_or_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PATIENCE", 0.2)
    with pytest.raises(Missing, match="sleep did not answer within"):
        doctor._run(["sleep", "20"])
    monkeypatch.undo()
    with pytest.raises(Missing, match=r"^driver on fire$"):
        doctor._run([sys.executable, "-I", "-c", "raise SystemExit('first\\ndriver on fire')"])
    with pytest.raises(Missing, match="false ended with status 1"):
        doctor._run(["false"])


def test_the_driver_is_asked_once_even_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], text: str = "") -> str:
        asked.append(command)
        raise Missing("the driver did not answer")

    monkeypatch.setattr(doctor, "_run", run)
    probes = [each for each in doctor.default_probes() if each[1] in ("devices", "peer access")]
    diagnosis = examine(probes)
    assert [finding.problem for finding in diagnosis.findings] == ["the driver did not answer"] * 2
    assert len(asked) == 1


def test_driver_script_reads_the_driver_library(tmp_path: Path) -> None:
    """Compiled against a stand-in driver with two GPUs that have no peer access to each other."""
    source = tmp_path / "driver.c"
    source.write_text(
        """
        #include <string.h>
        #include <stddef.h>
        int cuInit(unsigned flags) { return 0; }
        int cuDeviceGetCount(int *count) { *count = 2; return 0; }
        int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
        int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Stand-in", size); return 0; }
        int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)80 << 30; return 0; }
        int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute; return 0; }
        int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return 0; }
        """
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], timeout=60, check=True)
    done = subprocess.run(
        [sys.executable, "-I", cuda_facts.__file__],
        env={"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    device = {"name": "Stand-in", "memory": 80 << 30, "sms": 16, "copy_engines": 40, "compute_capability": "75.76"}
    assert json.loads(done.stdout) == {"devices": [device, device], "peer_access": [[True, False], [False, True]]}
