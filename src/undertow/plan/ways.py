"""Which of several forms a fused plan for a GPU has, in words: plans of all of them have one name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import fused

if TYPE_CHECKING:
    from .plan import Plan


def way(operator: str, plan: Plan) -> str:
    """How rows are brought or sums made, for people; "" where there is only one way, or the plan leaves it open."""
    apart, every = plan.share.communication_ctas, plan.share.multiprocessors
    if plan.grain != "fused" or every is None:
        return ""
    if plan.lane != "peer":
        return f"bands posted in {len(plan.parcels)} parcels for each rank"
    if operator == "matmul_reduce_scatter" and plan.order == "rotated":
        return "sums go from rank to rank"
    if operator == "matmul_reduce_scatter":
        return f"sums made by {apart} of {every} CTAs" if apart else f"sums made by {every} CTAs behind all products"
    if apart is None:
        return ""
    return _rows(plan, apart, every) if operator == "all_gather_matmul" else ""


def _rows(plan: Plan, bringing: int, every: int) -> str:
    how, step = "pulled" if plan.pull else "pushed", ", in step" if plan.in_step else ""
    if fused.at_once(plan):
        cut = f", K of the last tiles in {plan.split} parts" if plan.split else ""
        return f"rows {how}, brought by all {every} CTAs before they multiply{cut}{step}"
    if plan.order == "rotated":
        return f"rows {how}, brought by {bringing} of {every} CTAs while the others multiply own ones{step}"
    return f"rows {how} by {min(bringing, every)} of {every} CTAs before they multiply"
