"""Where MSCCLang programs look for buffers and policies; the rest of msccl-tools' module is its compiler's own."""

from typing import NoReturn

from ..chunks import Buffer
from ..internals import missing
from ..program import ThreadblockPolicy

__all__ = ["Buffer", "ThreadblockPolicy"]


def __getattr__(name: str) -> NoReturn:
    missing(__name__, name)
