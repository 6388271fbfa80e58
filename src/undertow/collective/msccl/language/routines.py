"""Where MSCCLang programs look for shared steps."""

from ..routines import allgather_ring_inplace, allreduce_ring_inplace

__all__ = ["allgather_ring_inplace", "allreduce_ring_inplace"]
