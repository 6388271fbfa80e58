"""Loops that Numba compiles where it is there, and Python runs where it is not: the same source, so the same results.

`UNDERTOW_SIM_CORE=python` asks for the second, which is some hundred times slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import settings


def _numba() -> Any:
    if settings.SIM_CORE.get() == "python":
        return None
    try:
        import numba
    except ImportError:
        return None
    return numba


_NUMBA = _numba()
CORE = "python" if _NUMBA is None else "numba"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled if possible. No fast arithmetic: both cores must round alike.

    Without Numba's counting of references, which is half of the time where many arrays are handed down; so a compiled
    function makes no arrays. Inlined into the loop that calls it: an array is seven arguments, which a call would push.
    """
    if _NUMBA is None:
        return function
    options = {"cache": True, "nogil": True, "boundscheck": False, "_nrt": False, "forceinline": True}
    return _NUMBA.njit(**options)(function)  # type: ignore[no-any-return]
