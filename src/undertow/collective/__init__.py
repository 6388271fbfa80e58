"""Collectives as programs: a language, a compiler, a checker, runtimes; and the usual ones as plain calls.

Names are loaded at first use, as in the package itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithms import LIBRARY
    from .checker import check
    from .contract import Contract, custom
    from .language import Program, Ref, Trace, program
    from .operators import (
        all_gather,
        all_reduce,
        all_to_all,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )
    from .schedule import Schedule
    from .topology import Topology

_HOMES = {
    "LIBRARY": ".algorithms",
    "check": ".checker",
    "Contract": ".contract",
    "custom": ".contract",
    "Program": ".language",
    "Ref": ".language",
    "Trace": ".language",
    "program": ".language",
    "all_gather": ".operators",
    "all_reduce": ".operators",
    "all_to_all": ".operators",
    "broadcast": ".operators",
    "gather": ".operators",
    "reduce": ".operators",
    "reduce_scatter": ".operators",
    "scatter": ".operators",
    "Schedule": ".schedule",
    "Topology": ".topology",
}
__all__ = [
    "LIBRARY",
    "Contract",
    "Program",
    "Ref",
    "Schedule",
    "Topology",
    "Trace",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "check",
    "custom",
    "gather",
    "program",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'undertow.collective' has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
