"""Loops that Numba compiles where it is there, and Python runs where it is not: the same source, so the same results.

`UNDERTOW_SIM_CORE=python` asks for the second, which is some hundred times slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import settings


def _machine_code() -> Any:
    if settings.SIM_CORE.get() == "python":
        return None
    try:
        from ..fabric import machine_code
    except ImportError:
        return None
    return machine_code


_MACHINE_CODE = _machine_code()
CORE = "python" if _MACHINE_CODE is None else "numba"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled if possible. No fast arithmetic: both cores must round alike.

    Without Numba's counting of references, which is half of the time where many arrays are handed down; so a compiled
    function makes no arrays. Inlined into the loop that calls it: an array is seven arguments, which a call would push.
    """
    if _MACHINE_CODE is None:
        return function
    options = {"boundscheck": False, "_nrt": False, "forceinline": True}
    return _MACHINE_CODE.compiled(function, **options)  # type: ignore[no-any-return]
