"""Attributes of a model's own modules that count heads, and tell of this rank's from now on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .sharded import Cut

if TYPE_CHECKING:
    import torch

    from ..fabric.group import Group

_CONFIG = "config."


class OwnConfig:
    """A configuration that one module sees with numbers of its own. All else is read where it is, as it is by then."""

    def __init__(self, config: Any, own: dict[str, int] | None = None) -> None:
        self._undertow_config, self._undertow_own = config, own or {}

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for who asks what it is
        return type(self._undertow_config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_undertow")):
            raise AttributeError(name)
        return self._undertow_own[name] if name in self._undertow_own else getattr(self._undertow_config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_undertow"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._undertow_config, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnConfig, (self._undertow_config, self._undertow_own)


def count_own(around: torch.nn.Module, attribute: str, units: int, on: Group) -> None:
    """Of `units` heads, or groups of them. One that is not there, or no multiple of them, counts something else."""
    in_config = attribute.startswith(_CONFIG)
    holder: Any = getattr(around, _CONFIG[:-1], None) if in_config else around
    attribute = attribute.removeprefix(_CONFIG)
    value: object = getattr(holder, attribute, None)
    if not isinstance(value, int) or value < 1 or value % units:
        return
    own = Cut.of(attribute, 0, (value,), (value // units,), on.size).sizes(on.rank)[0]
    if not in_config:
        setattr(around, attribute, own)
        return
    seen = holder if type(holder) is OwnConfig else OwnConfig(holder)
    seen._undertow_own[attribute] = own
    setattr(around, _CONFIG[:-1], seen)
