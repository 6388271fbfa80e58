"""What a compiler does with models that torch's own styles have parallelized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fabric.registry import as_group

if TYPE_CHECKING:
    from .compiler_pass import OverlapPass
    from .sharded import AnyGroup


def overlap_pass(group: AnyGroup = None, *, strategy: str = "auto") -> OverlapPass:
    """A pass for torch.compile that joins the collectives of `group` with their matmuls (`OverlapPass`). Collective.

    torch.compile(model, options={"post_grad_custom_pre_pass": ut.nn.overlap_pass(mesh["tp"])})
    """
    from .compiler_pass import OverlapPass  # the compiler's modules take a second to import

    return OverlapPass(as_group(group), strategy)
