"""What msccl-tools keeps inside its compiler, and programs have no counterpart of here."""

from __future__ import annotations

from typing import NoReturn


def missing(module: str, name: str) -> NoReturn:
    """For names that a program imports from such a module; those that Python itself asks for are just not there."""
    reason = f"{name} is a part of msccl-tools' compiler, which {module} does not have: a program compiles by XML()"
    raise AttributeError(reason) if name.startswith("__") else ImportError(reason)
