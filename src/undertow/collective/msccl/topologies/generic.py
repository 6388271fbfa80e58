"""Where MSCCLang programs look for topologies that are no machine's in particular."""

from . import fully_connected, hub_and_spoke, line, ring, star

__all__ = ["fully_connected", "hub_and_spoke", "line", "ring", "star"]
