"""Options that several commands share, and the check of an output file before the work is done."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InvalidArgument


class Device(StrEnum):
    """Where ranks compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Mps(StrEnum):
    """How ranks share a GPU."""

    auto = "auto"
    off = "off"
    require = "require"


DeviceOption = Annotated[Device, typer.Option(help="auto: the GPUs if there are any.")]
RanksOption = Annotated[int | None, typer.Option("--ranks", "-n", min=2, help="Unset: what suits this machine.")]


def check_writable(path: Path, option: str = "--out") -> None:
    """Refuse a file that cannot be written now, not after a minute of measuring. Only trying tells: root may all."""
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        must = f"a file that can be written ({error.strerror})"
        raise InvalidArgument(argument=option, was=str(path), must=must) from error
    if not existed:
        path.unlink()
