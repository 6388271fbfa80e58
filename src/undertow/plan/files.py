"""JSON files of the user's cache: plans, and tables of collectives. What is wrong with one makes it as good as absent.

A file is written under a name of its own and then renamed, so readers see all of it or none, and of several writers the
last one wins. Nothing read here is executed: JSON, of bounded size.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
DAMAGE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
"""What reading a damaged file may raise; InvalidArgument is a ValueError."""


def write(path: Path, content: dict[str, Any]) -> None:
    """Put `content` there, all at once; raises OSError where the folder cannot be written, leaving nothing."""
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            scratch = file.name
            json.dump(content, file, indent=1, sort_keys=True)
        os.replace(scratch, path)
    except OSError:
        if scratch is not None:
            with suppress(OSError):
                os.unlink(scratch)
        raise


def read(path: Path) -> Any:
    """The content of an ordinary file that is not too large. A pipe would block, so it is opened without waiting."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no ordinary file")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES} bytes")
    return json.loads(content.decode("utf-8"))


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
