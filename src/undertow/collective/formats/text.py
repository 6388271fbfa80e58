"""Files nobody vouches for: read with a bound on everything, and every complaint is one sentence with a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from ...errors import UnreadableFile

MOST_BYTES = 64 << 20
MOST_RANKS = 1024
LONGEST_WORD = 255
# No leading zero: C's strtol, with which others read such files, takes that for octal.
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,8}")
_BYTES = re.compile(r"0|[1-9][0-9]{0,19}")


def read_bytes(path: str | Path) -> bytes:
    """All of a file, if it is not too long."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UnreadableFile(path=path, reason=(getattr(error, "strerror", None) or str(error)).lower()) from error
    if len(data) > MOST_BYTES:
        raise UnreadableFile(path=path, reason=f"it is longer than {MOST_BYTES >> 20} MiB")
    return data


def damaged(path: str, line: int, reason: str) -> NoReturn:
    place = f"line {line}: " if line else ""
    raise UnreadableFile(path=path, reason=f"{place}{reason}")


def whole_number(text: str) -> int | None:
    """A decimal integer of at most nine digits; None for anything else, however Python or C would read it."""
    return int(text) if _WHOLE_NUMBER.fullmatch(text) else None


def byte_count(text: str) -> int | None:
    """A number of bytes below 2^64, in decimal digits; None for anything else."""
    return int(text) if _BYTES.fullmatch(text) and int(text) < 1 << 64 else None


def shown(text: object) -> str:
    """Something from a file as part of a sentence: short, and printable whatever it was."""
    said = ascii(text)
    return said if len(said) <= 40 else f"{said[:37]}..."
