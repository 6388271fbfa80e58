"""The context of the proxy's copies under a driver that is not there: what is asked in it, and what without one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from no_driver import imported

DEVICE = torch.device("cuda", 3)
OWN, TORCHS = 77, 5


class Driver:
    """Which context is current, and in which one each call was made. `refuses`: what the making of one returns."""

    def __init__(self, refuses: int = 0) -> None:
        self.current, self.calls, self.refuses = [TORCHS], [], refuses  # type: ignore[var-annotated]

    def _made(self, name: str) -> None:
        self.calls.append((name, self.current[-1]))

    def cuCtxCreate_v2(self, handle: Any, flags: int, device: int) -> int:
        self._made("context")
        if not self.refuses:
            handle._obj.value = OWN
            self.current.append(OWN)
        return self.refuses

    def cuCtxPushCurrent_v2(self, context: int) -> int:
        self.current.append(context)
        return 0

    def cuCtxPopCurrent_v2(self, handle: Any) -> int:
        handle._obj.value = self.current.pop()
        return 0

    def cuStreamCreateWithPriority(self, handle: Any, flags: int, priority: int) -> int:
        assert priority < 0
        self._made("stream")
        handle._obj.value = 100 + len(self.calls)
        return 0

    def cuStreamSynchronize(self, stream: int) -> int:
        self._made(f"synchronize {stream}")
        return 0

    def cuStreamDestroy_v2(self, stream: int) -> int:
        self._made(f"destroy {stream}")
        return 0


@pytest.fixture(name="module")
def copy_context(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with imported("undertow.fabric.copy_context", monkeypatch) as module:
        memory = module.stream_memory
        handle = SimpleNamespace(cuda_stream=9)
        monkeypatch.setattr(memory, "new_stream", lambda device, priority: handle)
        yield module


def driven(module: Any, monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    real = module.stream_memory._driver
    for name in [one for one in dir(driver) if one.startswith("cu") and one != "current"]:
        monkeypatch.setitem(real, name, getattr(driver, name))


def test_streams_and_waits_are_asked_for_in_its_own_context(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driven(module, monkeypatch, driver)
    copies = module.copy_context(DEVICE, 1)
    assert copies is module.copy_context(DEVICE, 1)
    assert copies.is_own
    assert driver.current == [TORCHS], "the new context is still current where it was made"
    first, second = copies.new_stream(), copies.new_stream()
    assert first != second
    with copies.current():
        assert driver.current == [TORCHS, OWN]
    with pytest.raises(KeyError), copies.current():
        raise KeyError
    copies.rest()
    copies.end(first)
    copies.rest()
    assert driver.current == [TORCHS]
    assert driver.calls == [
        ("context", TORCHS), ("stream", OWN), ("stream", OWN), (f"synchronize {first}", OWN),
        (f"synchronize {second}", OWN), (f"synchronize {first}", OWN), (f"destroy {first}", OWN),
        (f"synchronize {second}", OWN),
    ]  # fmt: skip


@pytest.mark.parametrize(("refuses", "sharing"), [(2, 1), (809, 4), (0, 5)])
def test_without_room_the_copies_are_torchs_and_that_is_said_once(
    refuses: int, sharing: int, module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(refuses)
    driven(module, monkeypatch, driver)
    monkeypatch.setattr(logging.getLogger("undertow"), "propagate", True)
    for _ in range(2):
        copies = module.copy_context(DEVICE, sharing)
    assert not copies.is_own
    assert copies.new_stream() == 9
    with copies.current():
        assert driver.current == [TORCHS]
    copies.rest()
    copies.end(9)  # torch's object ends it
    asked = [one for one, _ in driver.calls if one != "context"]
    assert asked == ["synchronize 9", "synchronize 9"]
    assert sum("no more than 500 launches" in one.getMessage() for one in caplog.records) == 1


def test_other_refusals_are_errors(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driven(module, monkeypatch, Driver(700))
    with pytest.raises(Exception, match="lost"):
        module.copy_context(DEVICE, 1)
