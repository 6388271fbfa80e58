"""Computation and communication at the same time: run them, measure how much they disturb each other, choose how.

Names are loaded at first use, as in the package itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..fabric.share import bound
    from .advice import Advice, Side, advise
    from .strategies import STRATEGIES, Strategy, strategy
    from .together import Concurrent, Outcome, concurrent

_HOMES = {
    "Advice": ".advice",
    "Side": ".advice",
    "advise": ".advice",
    "Concurrent": ".together",
    "Outcome": ".together",
    "concurrent": ".together",
    "STRATEGIES": ".strategies",
    "Strategy": ".strategies",
    "strategy": ".strategies",
    "bound": "..fabric.share",
}
__all__ = [
    "STRATEGIES",
    "Advice",
    "Concurrent",
    "Outcome",
    "Side",
    "Strategy",
    "advise",
    "bound",
    "concurrent",
    "strategy",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'undertow.c3' has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
