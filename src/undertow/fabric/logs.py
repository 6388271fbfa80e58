"""The `undertow` logger: standard logging, with the rank in every record.

Undertow never falls back silently, so its warnings reach standard error even where the program set up no logging. If
the program did, its handlers get the records instead (with `record.rank`), and nothing is printed twice.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from .. import settings
from ..errors import InvalidArgument

FORMAT = "[undertow rank %(rank)s] %(levelname)s %(message)s"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_said: set[str] = set()
_lock = threading.Lock()


class _AddRank(logging.Filter):
    """Puts the rank on the record. Read each time: a launcher's child learns its rank after the import."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = os.environ.get("RANK", "-")
        return True


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    """Writes to what is standard error at that moment, unless the program has handlers of its own."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.always = False
        self.addFilter(_AddRank())
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        if self.always or not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


def get_logger() -> logging.Logger:
    """The library's logger, made ready at the first call."""
    found = logging.getLogger("undertow")
    with _lock:
        if not any(isinstance(handler, _StandardError) for handler in found.handlers):
            found.addFilter(_AddRank())
            found.addHandler(_StandardError())
            level = settings.LOG.get().strip().upper()
            found.setLevel(level if level in LEVELS else settings.LOG.default)
            if level not in LEVELS:
                found.warning("%s is %r, but must be one of %s.", settings.LOG.name, level, ", ".join(LEVELS))
    return found


def configure(level: str) -> None:
    """Set the level and print records to standard error, whatever other handlers there are: for command lines."""
    if level.upper() not in LEVELS:
        raise InvalidArgument(argument="log level", was=repr(level), must=f"one of {', '.join(LEVELS)}")
    found = get_logger()
    found.setLevel(level.upper())
    for handler in found.handlers:
        if isinstance(handler, _StandardError):
            handler.always = True


def once(key: str, message: str, level: int = logging.WARNING) -> None:
    """Log `message` the first time this process meets `key`: a fallback is told once, not at every call."""
    with _lock:
        if key in _said:
            return
        _said.add(key)
    logger.log(level, message)


logger = get_logger()
