"""Which lane the collectives of a thread take, and how many CTAs, where somebody above has said so.

A collective beside a computation is an ordinary call inside an ordinary callable. Its place is said around it, for the
thread that makes the call: everything it does there is meant, and nothing that other threads do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """`lane` None: the collective's own choice; `ctas` None: as many as its table says (on a CPU: no meaning)."""

    lane: str | None = None
    ctas: int | None = None


class _Here(threading.local):
    """What was said around a thread's work. A default of the class costs a tenth of an attribute that is not there."""

    placement: Placement | None = None


here = _Here()


def current() -> Placement | None:
    """What was said around this thread's work; None where nobody said anything."""
    return here.placement


@contextlib.contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Collectives inside run there."""
    before = current()
    here.placement = placement
    try:
        yield
    finally:
        here.placement = before
