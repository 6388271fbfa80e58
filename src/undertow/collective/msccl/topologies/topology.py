"""Where MSCCLang programs look for the class of all topologies."""

from . import Topology

__all__ = ["Topology"]
