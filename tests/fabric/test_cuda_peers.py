"""When ranks can address each other's GPU memory, and what errors mean, on nodes of GPUs that are not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from no_driver import imported


def why_no_peers(
    monkeypatch: pytest.MonkeyPatch, *, mine: int = 1, indices: tuple[int, ...] = (0, 1), access: bool = True,
    atomics: int = 1, visible: str = "ab", devices: str = "ab", folder: str = "/tmp/first",
) -> str:  # fmt: skip
    """Of the rank on GPU `mine`, in a group whose ranks have `devices`; `visible` are those that it sees."""

    def attribute(answer: Any, kind: int, source: int, destination: int) -> int:
        assert (kind, source, destination) == (3, 100 + mine, 100 + (1 - mine)), "of native atomics, from here"
        answer._obj.value = atomics
        return 0

    def number(handle: Any, index: int) -> int:
        handle._obj.value = 100 + index
        return 0

    with imported("undertow.fabric.cuda", monkeypatch) as module:
        monkeypatch.delenv(module.OVERLAPPING, raising=False)
        monkeypatch.setenv("TMPDIR", folder)
        for name, function in {"cuDeviceGetP2PAttribute": attribute, "cuDeviceGet": number}.items():
            monkeypatch.setitem(module.stream_memory._driver, name, function)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=visible[index]))
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: access)
        fabric: Any = object.__new__(module.CudaFabric)
        fabric.device, fabric.shares_device = torch.device("cuda", mine), len(set(devices)) < len(devices)
        fabric.group = SimpleNamespace(
            size=len(devices), local_ranks=(0, 1),
            exchange=lambda value, purpose: [["", indices[0], "/tmp/first"], [value[0], indices[1], value[2]]],
        )  # fmt: skip
        return str(fabric._why_no_peers(list(devices)))


def test_gpus_with_peer_access_are_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_peers(monkeypatch) == ""


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({"access": False}, "no peer access"),
        ({"atomics": 0}, "without atomics"),
        ({"visible": "xb"}, "does not see the GPUs of all ranks"),
        ({"devices": "bb"}, "ranks share a GPU"),
        ({"indices": (1, 1)}, "number their GPUs differently"),
        ({"folder": "/tmp/second"}, "different temporary folders"),
    ],
)
def test_why_they_are_not(node: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels add to semaphores in others' memory; torch tells GPUs apart by their numbers."""
    assert reason in why_no_peers(monkeypatch, **node)


@pytest.mark.parametrize(("code", "error"), [(226, "DeviceLost"), (716, "DeviceLost"), (801, "UndertowError")])
def test_errors_that_a_context_does_not_survive(code: int, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between GPUs there are more of them than on one: a wrong access over NVLink is *contained*."""
    with imported("undertow.fabric.stream_memory", monkeypatch) as module:
        with pytest.raises(RuntimeError) as raised:
            module.check(code, 3)
        assert type(raised.value).__name__ == error
