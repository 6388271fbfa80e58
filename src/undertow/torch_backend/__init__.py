"""`torch.distributed.init_process_group(backend="undertow")`: Undertow's collectives under code written for torch.

Importing this registers the backend; installed, the package does so by itself whenever torch is imported (its entry
point in the group `torch.backends`). Little is imported here for that reason: the rest comes with the first group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .process_group import UndertowProcessGroup

NAME = "undertow"


def register() -> None:
    """Make the backend known to torch.distributed. Again: nothing happens.

    torch is imported here, and not above: where this package comes first, torch's own import looks for this function.
    """
    import torch.distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: object) -> UndertowProcessGroup:
    from .process_group import UndertowProcessGroup

    return UndertowProcessGroup(options)


register()
