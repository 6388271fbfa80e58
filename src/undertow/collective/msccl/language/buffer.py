"""Where MSCCLang programs look for buffers."""

from ..chunks import Buffer

__all__ = ["Buffer"]
