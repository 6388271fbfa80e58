"""msccl-tools' graph of instructions: its compiler's own, so nothing of it is here, and that is said."""

from typing import NoReturn

from ..internals import missing

__all__: list[str] = []


def __getattr__(name: str) -> NoReturn:
    missing(__name__, name)
