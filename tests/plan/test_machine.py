"""Machine files: what is written is read back, what is wrong is refused with one sentence, curves are sane between."""

from __future__ import annotations

import copy
import itertools
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.errors import InvalidArgument
from undertow.plan.machine import Machine, default_path, to_toml

DATA: dict[str, Any] = {
    "format": "undertow machine 1",
    "name": 'A "quoted" name, with µ and \\',
    "device": "cuda",
    "ranks": 4,
    "shares_device": True,
    "launch_seconds": 2.5e-6,
    "stream_seconds": 1e-5,
    "gemm": {
        "workers": "SMs",
        "shape": [4096, 4096, 4096],
        "dtype": "bfloat16",
        "points": [[8, 0.02], [32, 0.005], [132, 0.0013]],
    },
    "lanes": {
        "dma": {
            "description": "copy engines",
            "emulated": False,
            "gemm_slowdown": 1.02,
            "lane_slowdown": 1.0,
            "points": [[1024, 1e-5], [1 << 20, 1e-4], [1 << 24, 1.6e-3]],
        },
        "net": {
            "description": "torch.distributed (nccl)",
            "emulated": True,
            "gemm_slowdown": 1,
            "lane_slowdown": 2.5,
            "points": [[1024, 2e-5]],
        },
    },
    "environment": {"date": "2026-01-01T00:00:00+00:00", "torch": "2.11.0", "sms": 132, "odd key": 1.5, "ok": True},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """DATA with one value replaced; with one key removed if the value is None."""
    data = copy.deepcopy(DATA)
    *folders, last = path.split(".")
    table = data
    for folder in folders:
        table = table[folder]
    if value is None:
        del table[last]
    else:
        table[last] = value
    return data


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    machine = Machine.from_dict(DATA)
    path = tmp_path / "deeper" / "machine.toml"
    machine.save(path)
    assert Machine.load(path) == machine
    assert machine.to_dict() == DATA
    assert [one.name for one in path.parent.iterdir()] == ["machine.toml"]


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1),
        st.text(st.characters(codec="utf-8")) | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(),
    )
)
def test_the_writer_writes_toml(environment: dict[str, Any]) -> None:
    read = tomllib.loads(to_toml({"environment": environment}))["environment"]
    assert list(read) == list(environment)
    for key, value in environment.items():
        assert type(read[key]) is type(value)
        assert read[key] == value or (math.isnan(read[key]) and math.isnan(value))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("format", "undertow machine 2", "machine.format"),
        ("name", None, "without 'name'"),
        ("name", 7, "machine.name"),
        ("device", "tpu", "cpu, cuda"),
        ("ranks", 0, "machine.ranks"),
        ("ranks", True, "machine.ranks"),
        ("shares_device", 1, "true or false"),
        ("launch_seconds", -1.0, "above 0"),
        ("launch_seconds", math.inf, "above 0"),
        ("surprise", 1, "no such key"),
        ("gemm", 3, "a table"),
        ("gemm.workers", "cores", "threads, SMs"),
        ("gemm.shape", [1, 2], "M, N, K"),
        ("gemm.surprise", 1, "machine.gemm.surprise"),
        ("gemm.points", [], "machine.gemm.points"),
        ("gemm.points", [[8, 0.1], [8, 0.1]], "grow"),
        ("gemm.points", [[8, 0.0]], "machine.gemm.points"),
        ("gemm.points", [[8.5, 0.1]], "machine.gemm.points"),
        ("lanes.dma.gemm_slowdown", 0.9, "at least 1"),
        ("lanes.dma.lane_slowdown", math.nan, "at least 1"),
        ("lanes.dma.points", None, "without 'points'"),
        ("lanes.pigeon", {}, "net, peer, dma"),
        ("environment.list", [1], "machine.environment.list"),
    ],
)
def test_a_mistake_is_refused_by_name(path: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Machine.from_dict(changed(path, value))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    for text in (b"name = ", b"\xff\xfe", b"", b"a = 1"):
        path.write_bytes(text)
        with pytest.raises(InvalidArgument, match="machine"):
            Machine.load(path)
    with pytest.raises(InvalidArgument, match="No such file"):
        Machine.load(tmp_path / "absent.toml")


def test_a_lane_between_and_beyond_its_points() -> None:
    dma = Machine.from_dict(DATA).lane("dma")
    assert dma.latency == 1e-5
    assert dma.seconds(1) == dma.seconds(1024) == 1e-5
    assert dma.seconds(1 << 20) == pytest.approx(1e-4)
    assert dma.seconds(1 << 22) == pytest.approx(4e-4)  # a power law between 1 MiB and 16 MiB: in proportion here
    assert dma.bandwidth(1 << 30) == pytest.approx(dma.bandwidth(1 << 24)) == pytest.approx((1 << 24) / 1.6e-3)
    sizes = [1 << exponent for exponent in range(31)]
    assert all(dma.seconds(small) <= dma.seconds(large) for small, large in itertools.pairwise(sizes))


def test_a_lane_measured_at_one_size() -> None:
    net = Machine.from_dict(DATA).lane("net")
    assert net.seconds(512) == net.seconds(1024) == 2e-5
    assert net.seconds(4096) == pytest.approx(8e-5)


def test_a_lane_that_is_not_there() -> None:
    with pytest.raises(InvalidArgument, match="dma, net"):
        Machine.from_dict(DATA).lane("peer")


def test_matmul_between_and_beyond_its_points() -> None:
    gemm = Machine.from_dict(DATA).gemm
    assert gemm.seconds(4) == pytest.approx(0.04)
    assert gemm.seconds(8) == 0.02
    assert gemm.seconds(16) == pytest.approx(0.01)
    assert gemm.seconds(1000) == gemm.seconds(132) == pytest.approx(0.0013)
    assert gemm.flops == pytest.approx(2 * 4096**3 / 0.0013)


def test_where_machine_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path))
    assert default_path("cpu", 2) == tmp_path / "machine-cpu-2.toml"
    monkeypatch.delenv("UNDERTOW_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path("cuda", 4) == tmp_path / "undertow" / "machine-cuda-4.toml"
