"""Where MSCCLang programs look for topologies of several nodes."""

from . import distributed_fully_connected, distributed_hub_and_spoke

__all__ = ["distributed_fully_connected", "distributed_hub_and_spoke"]
