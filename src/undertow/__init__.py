"""Undertow hides multi-GPU communication beneath computation.

Names are loaded at first use: `undertow --help` must not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import c3, collective, nn, sim
    from .c3.together import concurrent
    from .errors import UndertowError
    from .fabric.group import Group
    from .fabric.launch import launch
    from .fabric.memory import memory, reserve
    from .fabric.registry import as_group, init, shutdown
    from .ops.all_gather_matmul import all_gather_matmul
    from .ops.all_to_all_matmul import all_to_all_matmul
    from .ops.embedding_all_to_all import embedding_all_to_all, embedding_layout
    from .ops.explain import explain
    from .ops.matmul_all_reduce import matmul_all_reduce
    from .ops.matmul_all_to_all import matmul_all_to_all
    from .ops.matmul_reduce_scatter import matmul_reduce_scatter
    from .ops.replicated_matmul import replicated_matmul
    from .ops.tuning import tune
    from .plan.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "Group",
    "Plan",
    "UndertowError",
    "all_gather_matmul",
    "all_to_all_matmul",
    "as_group",
    "c3",
    "collective",
    "concurrent",
    "embedding_all_to_all",
    "embedding_layout",
    "explain",
    "init",
    "launch",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "memory",
    "nn",
    "replicated_matmul",
    "reserve",
    "shutdown",
    "sim",
    "tune",
]

_HOMES = {
    "Group": ".fabric.group",
    "Plan": ".plan.plan",
    "UndertowError": ".errors",
    "all_gather_matmul": ".ops.all_gather_matmul",
    "all_to_all_matmul": ".ops.all_to_all_matmul",
    "as_group": ".fabric.registry",
    "concurrent": ".c3.together",
    "embedding_all_to_all": ".ops.embedding_all_to_all",
    "embedding_layout": ".ops.embedding_all_to_all",
    "explain": ".ops.explain",
    "init": ".fabric.registry",
    "launch": ".fabric.launch",
    "matmul_all_reduce": ".ops.matmul_all_reduce",
    "matmul_all_to_all": ".ops.matmul_all_to_all",
    "matmul_reduce_scatter": ".ops.matmul_reduce_scatter",
    "memory": ".fabric.memory",
    "replicated_matmul": ".ops.replicated_matmul",
    "reserve": ".fabric.memory",
    "shutdown": ".fabric.registry",
    "tune": ".ops.tuning",
}
_ROOMS = ("c3", "collective", "nn", "sim")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'undertow' has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
