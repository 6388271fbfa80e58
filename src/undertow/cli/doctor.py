"""`undertow doctor`: what this machine offers, and why not more."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For programs instead of people.")] = False,
) -> None:
    """Say what this machine has: devices, links, software, and which strategies can run."""
    from ..report.doctor import examine, render
    from ..report.tables import show

    diagnosis = examine()
    if as_json:
        typer.echo(json.dumps(diagnosis.to_json(), indent=1, default=str))
    else:
        show(render(diagnosis))
