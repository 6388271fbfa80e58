"""What ranks tell each other before a call, and with it that an argument is wrong: all of them raise, none waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from ..fabric.group import Group


def tell(on: Group, mine: Any, trouble: InvalidArgument | None, purpose: str) -> list[Any]:
    """Every rank's `mine`, by rank. Collective. Where a rank has trouble it raises that, the others name the rank."""
    facts = None if trouble is None else {name: str(one) for name, one in trouble.facts.items()}
    told = on.exchange([mine, facts], purpose)
    if trouble is not None:
        raise trouble
    for rank, (_, wrong) in enumerate(told):
        if wrong is not None:
            raise InvalidArgument(argument=f"{wrong['argument']} of rank {rank}", was=wrong["was"], must=wrong["must"])
    return [one for one, _ in told]
