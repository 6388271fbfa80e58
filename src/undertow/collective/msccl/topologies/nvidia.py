"""Where MSCCLang programs look for NVIDIA's machines."""

from . import dgx1, dgx_a100, nvlink_only

__all__ = ["dgx1", "dgx_a100", "nvlink_only"]
