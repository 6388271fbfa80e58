"""Simulation: schedules, plans and whole steps on machines that need not be here. Imports no torch.

Names are loaded at first use, as in the package itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster import Cluster
    from .collectives import Collectives
    from .plans import simulate_plan
    from .schedules import Result, Rules, simulate
    from .steps import Step
    from .tasks import Outcome, Task, Tasks

_HOMES = {
    "Cluster": ".cluster",
    "Collectives": ".collectives",
    "Outcome": ".tasks",
    "Result": ".schedules",
    "Rules": ".schedules",
    "Step": ".steps",
    "Task": ".tasks",
    "Tasks": ".tasks",
    "simulate": ".schedules",
    "simulate_plan": ".plans",
}
__all__ = [
    "Cluster",
    "Collectives",
    "Outcome",
    "Result",
    "Rules",
    "Step",
    "Task",
    "Tasks",
    "simulate",
    "simulate_plan",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'undertow.sim' has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
