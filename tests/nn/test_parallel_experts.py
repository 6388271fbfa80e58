"""ut.nn.Experts in real ranks: a model's own experts, cut, against themselves whole."""

from __future__ import annotations

import expert_targets as targets
import pytest

import undertow as ut

MUST = (
    "but must be one with gate_up_proj [E, 2 I, H] and down_proj [E, H, I], or in another form that it tells of as"
    " those of transformers 5 do, and nothing else; leave others out of the plan, and every rank keeps them whole."
)


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(2, "auto"), (2, "signaled:dma"), (3, "chunked:peer"), (3, "serial:net")]
)
def test_as_whole(ranks: int, strategy: str) -> None:
    assert all(ut.launch(targets.as_whole, ranks, device="cpu", args=(strategy,)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_checkpoints(ranks: int) -> None:
    assert all(ut.launch(targets.checkpoints, ranks, device="cpu"))


def test_one_graph() -> None:
    assert all(ut.launch(targets.compiled, 2, device="cpu"))


def test_a_plan_is_carried_out_whole_or_not_at_all() -> None:
    for said in ut.launch(targets.whole_or_not_at_all, 2, device="cpu"):
        refused = "the inner size of experts is 20, but must be a multiple of 8, its unit."
        assert said == [refused, "Linear", "strategy is 'quickly'", "Linear", True, False, 1]


def test_refusals() -> None:
    nothing = (
        "a pattern of plan is '*.gate', but must be one that matches a module, or '*.experts' must match one;"
        " model.named_modules() lists them."
    )
    for found in ut.launch(targets.refusals, 2, device="cpu"):
        assert found == {
            "unit": "the inner size of mlp is 20, but must be a multiple of 8, its unit.",
            "too few": (
                "the inner size of mlp is 24, but must be at least 48, so that each of 2 ranks has a unit of 24; use"
                " fewer ranks."
            ),
            "turned": f"the module of mlp is Turned with gate_up_proj [5, 6, 48], down_proj [5, 24, 6], {MUST}",
            "biased": (
                "the module of mlp is Biased with gate_up_proj [5, 48, 6], down_proj [5, 6, 24], down_proj_bias"
                f" [5, 6], {MUST}"
            ),
            "normed": f"the module of mlp is Normed with a norm of each expert's result, {MUST}",
            "no experts": f"the module of mlp is SiLU with no tensors, {MUST}",
            "tied": (
                "experts.gate_up_proj is shared by other, experts.gate_up_proj, but must be a weight of its own: leave"
                " the layer out of the plan, or untie it."
            ),
            "neither": nothing,
            "a list": nothing,
            "shape": ("hidden_states is of shape [1, 2, 6] with top_k_index [2, 2], but must be [T, H] with [T, k]."),
        }
