"""Which form a fused plan has, in words."""

from __future__ import annotations

from test_fused_plan import problem

from undertow.plan.defaults import default_plan, fused_plan
from undertow.plan.search import fused_plans
from undertow.plan.ways import way


def test_how_rows_are_brought_and_sums_are_made_is_told() -> None:
    many, few = (problem("all_gather_matmul", m=m, n=2560, together=True) for m in (8192, 512))
    said = {way(many.operator, plan) for plan in (*fused_plans(many), *fused_plans(few))}
    assert {
        "rows pulled, brought by 1 of 33 CTAs while the others multiply own ones",
        "rows pulled, brought by all 32 CTAs before they multiply",
        "rows pulled, brought by all 32 CTAs before they multiply, K of the last tiles in 4 parts",
        "rows pulled by 8 of 32 CTAs before they multiply",
        "rows pushed by 32 of 32 CTAs before they multiply",
    } <= said
    scatters = problem("matmul_reduce_scatter", m=8192, n=8192)
    said = {way(scatters.operator, plan) for plan in fused_plans(scatters)}
    assert said == {"sums made by 1 of 33 CTAs", "sums go from rank to rank"}
    assert way("matmul_all_reduce", fused_plan(problem("matmul_all_reduce"), "peer")) == ""
    assert way(many.operator, default_plan(many, "serial", "peer")) == ""
    on_cpu = problem("all_gather_matmul", device="cpu")
    assert way(many.operator, fused_plan(on_cpu, "peer")) == ""
    crowded = [
        problem(one, m=2048, ranks=8, shards=(256,) * 8, together=True) for one in (scatters.operator, many.operator)
    ]
    assert [way(one.operator, fused_plan(one, "peer")) for one in crowded] == [
        "sums made by 33 CTAs behind all products",
        "rows pulled, brought by all 32 CTAs before they multiply, in step",
    ]
