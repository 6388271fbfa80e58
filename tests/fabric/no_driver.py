"""Modules that look for CUDA's driver, imported over one that is not there."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_real = ctypes.CDLL


class NoDriver:
    """Every function of it does nothing, and succeeds."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0


@contextlib.contextmanager
def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module; what is imported for it goes with the test, from its package, too, where it would be found again."""
    before = set(sys.modules)
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name, *rest, **more: NoDriver() if "libcuda" in str(name) else _real(name, *rest, **more)
    )
    yield importlib.import_module(name)
    for one in sorted(set(sys.modules) - before):
        if one.startswith("undertow."):
            del sys.modules[one]
            package, _, child = one.rpartition(".")
            if package in sys.modules and hasattr(sys.modules[package], child):
                delattr(sys.modules[package], child)
