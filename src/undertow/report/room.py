"""Whether what a command asks for fits into this machine's memory: said before ranks are started, not when they die."""

from __future__ import annotations

from ..errors import InvalidArgument
from ..fabric.segment import available_memory, human
from .collective import ranks_in_words


def check_room(argument: str, was: object, ranks: int, nbytes: int) -> None:
    """Refuse what takes `nbytes` on each of the CPU ranks, if all together need more than there is."""
    available = available_memory()
    if ranks * nbytes > available:
        needed = f"for which {ranks_in_words(ranks)} need about {human(ranks * nbytes)}"
        raise InvalidArgument(argument=argument, was=f"{was}, {needed}", must=f"less: {human(available)} is available")
