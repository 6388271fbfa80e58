"""Where MSCCLang programs look for NVIDIA's machines."""

from . import dgx1

__all__ = ["dgx1"]
