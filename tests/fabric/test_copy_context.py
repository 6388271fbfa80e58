"""The context of the proxy's copies under a driver that is not there: what is asked in it, and what without one."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from no_driver import imported

DEVICE = torch.device("cuda", 3)
OWN, TORCHS = 77, 5


class Driver:
    """Which context is current, and in which one each call was made. `refuses`, `no_streams`: what making a context
    returns, or a stream after the first."""

    def __init__(self, refuses: int = 0, no_streams: int = 0) -> None:
        self.current, self.calls, self.refuses = [TORCHS], [], refuses  # type: ignore[var-annotated]
        self.no_streams, self.streams = no_streams, 0

    def _made(self, name: str) -> None:
        self.calls.append((name, self.current[-1]))

    def cuCtxCreate_v2(self, handle: Any, flags: int, device: int) -> int:
        self._made("context")
        if not self.refuses:
            handle._obj.value = OWN
            self.current.append(OWN)
        return self.refuses

    def cuCtxDestroy_v2(self, context: int) -> int:
        assert context == OWN
        assert OWN not in self.current
        self._made("end context")
        return 0

    def cuCtxPushCurrent_v2(self, context: int) -> int:
        self.current.append(context)
        return 0

    def cuCtxPopCurrent_v2(self, handle: Any) -> int:
        handle._obj.value = self.current.pop()
        return 0

    def cuStreamCreateWithPriority(self, handle: Any, flags: int, priority: int) -> int:
        assert priority < 0
        self._made("stream")
        self.streams += 1
        handle._obj.value = 100 + self.streams
        return self.no_streams if self.streams > 1 else 0

    def cuStreamSynchronize(self, stream: int) -> int:
        self._made(f"synchronize {stream}")
        return 0

    def cuStreamDestroy_v2(self, stream: int) -> int:
        self._made(f"destroy {stream}")
        return 0


@pytest.fixture(name="module")
def copy_context(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    before = list(gc.callbacks)
    with imported("undertow.fabric.copy_context", monkeypatch) as module:
        handles = iter(range(9, 99))
        monkeypatch.setattr(
            module.stream_memory, "new_stream", lambda device, priority: SimpleNamespace(cuda_stream=next(handles))
        )
        yield module
    gc.callbacks[:] = before


def driven(module: Any, monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Driver:
    for name in [one for one in dir(driver) if one.startswith("cu") and one != "current"]:
        monkeypatch.setitem(module.stream_memory._driver, name, getattr(driver, name))
    return driver


def test_streams_and_waits_are_asked_for_in_its_own_context(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driven(module, monkeypatch, Driver())
    copies = module.Copies(DEVICE, 1)
    assert copies.is_own
    assert (copies.out, copies.into) == (101, 102)
    assert driver.current == [TORCHS], "the new context is still current where it was made"
    with copies.current(), copies.current():
        assert driver.current == [TORCHS, OWN]
    with pytest.raises(KeyError), copies.current():
        raise KeyError
    copies.rest()
    copies.end()
    assert driver.current == [TORCHS]
    rest = [("synchronize 101", OWN), ("synchronize 102", OWN)]
    assert driver.calls == [
        ("context", TORCHS), ("stream", OWN), ("stream", OWN), *rest, *rest, ("destroy 101", OWN), ("destroy 102", OWN),
    ]  # fmt: skip


def test_all_proxies_of_a_process_share_one(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever groups they are of, and when threads make them."""
    driver = driven(module, monkeypatch, Driver())
    real = driver.cuCtxCreate_v2

    def slow(*arguments: Any) -> int:
        time.sleep(0.05)
        return real(*arguments)

    monkeypatch.setitem(module.stream_memory._driver, "cuCtxCreate_v2", slow)
    threads = [threading.Thread(target=module.Copies, args=(DEVICE, sharing)) for sharing in (1, 2, 4, 4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sum(name == "context" for name, _ in driver.calls) == 1
    assert driver.streams == 8


def test_garbage_is_collected_in_torchs_context(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driven(module, monkeypatch, Driver())
    copies, found = module.Copies(DEVICE, 1), []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            found.append(driver.current[-1])

    with copies.current():
        Cycle()
        gc.collect()
        with copies.current():  # as where a thread of the proxy rests
            Cycle()
            gc.collect()
        assert driver.current == [TORCHS, OWN]
    Cycle()
    gc.collect()
    assert found == [TORCHS] * 3
    assert driver.current == [TORCHS]


@pytest.mark.parametrize(("refuses", "no_streams", "sharing"), [(2, 0, 1), (809, 0, 4), (0, 0, 5), (0, 2, 1)])
def test_without_room_the_copies_are_torchs_and_that_is_said_once(
    refuses: int, no_streams: int, sharing: int, module: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    driver = driven(module, monkeypatch, Driver(refuses, no_streams))
    monkeypatch.setattr(logging.getLogger("undertow"), "propagate", True)
    for number in range(2):
        copies = module.Copies(DEVICE, sharing)
        assert not copies.is_own
        assert (copies.out, copies.into) == (9 + 2 * number, 10 + 2 * number)
    with copies.current():
        assert driver.current == [TORCHS]
    copies.end()  # torch's objects end the streams
    asked = [one for one, _ in driver.calls if one not in ("context", "stream")]
    assert asked == [*(["destroy 101", "end context"] if no_streams else []), "synchronize 11", "synchronize 12"]
    assert driver.current == [TORCHS]
    assert sum("no more than 500 launches" in one.getMessage() for one in caplog.records) == 1


def test_a_context_that_another_proxy_has_streams_in_is_left_alone(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driven(module, monkeypatch, Driver(0, 0))
    first = module.Copies(DEVICE, 1)
    driver.no_streams = 2
    assert not module.Copies(DEVICE, 1).is_own
    assert ("end context", TORCHS) not in driver.calls
    first.end()
    assert ("destroy 101", OWN) in driver.calls


def test_other_refusals_are_errors(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driven(module, monkeypatch, Driver(700))
    with pytest.raises(Exception, match="lost"):
        module.Copies(DEVICE, 1)
