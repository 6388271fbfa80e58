"""Modules whose parameters hold nothing, until `load_checkpoint` fills what this rank keeps of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary


class _Patch:
    """Of `torch.nn.Module.register_parameter`, there while any thread wants it, and for those threads alone."""

    def __init__(self) -> None:
        self._lock, self._wanted, self._here = threading.Lock(), 0, threading.local()
        self._real = torch.nn.Module.register_parameter

    @contextlib.contextmanager
    def wanted(self) -> Iterator[None]:
        before = getattr(self._here, "made", None)
        with self._lock:
            if self._wanted == 0:
                self._real = torch.nn.Module.register_parameter
                torch.nn.Module.register_parameter = self._registered()  # type: ignore[method-assign]
            self._wanted += 1
        self._here.made = WeakIdKeyDictionary() if before is None else before
        try:
            yield
        finally:
            self._here.made = before
            with self._lock:
                self._wanted -= 1
                if self._wanted == 0:
                    torch.nn.Module.register_parameter = self._real  # type: ignore[method-assign]

    def _registered(self) -> Any:
        def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
            self._real(module, name, parameter)
            made = getattr(self._here, "made", None)
            if made is None or parameter is None or parameter.is_meta or is_lazy(parameter):
                return
            if parameter not in made:  # one that several modules get stays one
                empty = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                empty.__dict__.update(parameter.__dict__)
                made[parameter] = empty
            module._parameters[name] = made[parameter]

        return register


_patch = _Patch()


def without_weights() -> contextlib.AbstractContextManager[None]:
    """Parameters of modules that are made inside, on this thread, hold nothing (`meta`); buffers are as ever.

    What was made before and is shared with one that is made inside is shared no more.
    """
    return _patch.wanted()
