"""Files nobody vouches for: read with a bound on everything, and every complaint is one sentence with a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from ...errors import UnreadableFile

MOST_BYTES = 64 << 20
MOST_RANKS = 1024
LONGEST_WORD = 255
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,9}")


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
    """An integer of at most nine digits; None for anything else, however Python would read it."""
    return int(text) if _WHOLE_NUMBER.fullmatch(text) else None


def shown(text: object) -> str:
    """Something from a file as part of a sentence: short, and printable whatever it was."""
    said = ascii(text)
    return said if len(said) <= 40 else f"{said[:37]}..."
