"""undertow.nn in real ranks: layers, plans for models, checkpoints, refusals."""

from __future__ import annotations

import layer_targets as targets
import pytest

import undertow as ut


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(2, False), (3, True)])
def test_linear_layers(ranks: int, sequence_parallel: bool) -> None:
    assert all(ut.launch(targets.linears, ranks, device="cpu", args=(sequence_parallel,)))


def test_several_weights_at_once() -> None:
    assert all(ut.launch(targets.several_weights, 2, device="cpu"))


@pytest.mark.parametrize(("sequence_parallel", "gated"), [(False, True), (True, False), (True, True)])
def test_feed_forward(sequence_parallel: bool, gated: bool) -> None:
    assert all(ut.launch(targets.mlp, 2, device="cpu", args=(sequence_parallel, gated)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_attention(ranks: int, sequence_parallel: bool) -> None:
    assert all(ut.launch(targets.attention, ranks, device="cpu", args=(sequence_parallel,)))


def test_what_attention_refuses() -> None:
    for said in ut.launch(targets.attention_refusals, 2, device="cpu"):
        assert said == [
            "kv_heads is 2, but must be one that 3 heads of queries share evenly.",
            "hidden_size is 9, but must be a multiple of 4 heads.",
            "kv_heads is 1, but must be at least 2, one for each rank; use fewer ranks.",
            "attend is one that gives [3, 4], but must be [3, 2, 2].",
        ]


@pytest.mark.parametrize("ranks", [2, 3])
def test_experts(ranks: int) -> None:
    assert all(ut.launch(targets.experts, ranks, device="cpu"))


def test_checkpoints() -> None:
    assert all(ut.launch(targets.checkpoints, 2, device="cpu"))


def test_dtensors() -> None:
    assert all(ut.launch(targets.dtensors, 2, device="cpu"))


def test_a_block_is_one_graph() -> None:
    assert all(ut.launch(targets.compiled, 2, device="cpu"))


def test_cuts() -> None:
    assert targets.cuts_come_together((24, 12, 12), (8, 4, 4), 2)
    assert targets.cuts_come_together((7,), (1,), 3)


def test_refusals() -> None:
    for found in ut.launch(targets.refusals, 2, device="cpu"):
        assert found == {
            "too narrow": (
                "out_features is 1, but must be at least 2, so that each of 2 ranks has a unit of 1; use fewer ranks."
            ),
            "heads": "out_features of 0.inner_in is 12, but must be a multiple of 5, its unit.",
            "one head": (
                "in_features of 0.inner_out is 12, but must be at least 24, so that each of 2 ranks has a unit of 12;"
                " use fewer ranks."
            ),
            "experts": (
                "experts is 3, but must be a multiple of 2, so that all ranks hold as many; use another number of"
                " ranks."
            ),
            "nothing": (
                "a pattern of plan is '*.q_proj', but must be one that matches a module; model.named_modules() lists"
                " them."
            ),
            "no linear": (
                "0.norm, matched by '*norm', is LayerNorm, but must be a torch.nn.Linear: a narrower pattern leaves it"
                " out."
            ),
            "tied": (
                "1.weight is shared by 0.weight, 1.weight, but must be a weight of its own, or one that all its holders"
                " cut by rows alike: name each in the plan (ut.nn.Vocabulary, ut.nn.Column), leave all out of it, or"
                " untie it."
            ),
            "attribute": (
                "attribute 'heads' around 0.inner_in is None, but must be a whole number: Block has none of that name,"
                " so give the unit as a number."
            ),
            "all heads": (
                "0.norm.weight is of 6 elements, but must be of 4: ranks hold whole heads, and no rank has what a norm"
                " over all of them needs."
            ),
            "fp8": (
                "dtype is of torch.float8_e4m3fn, but must be one of float64, float32, bfloat16, float16;"
                " fp8 is not supported yet, .to(torch.bfloat16) is the way for now."
            ),
            "placements": (
                "x.placements is (Shard(dim=0),), but must be (Shard(dim=1),), as this layer takes it;"
                " x.redistribute(placements=...) makes it so."
            ),
        }


def test_without_symmetric_memory() -> None:
    for said in ut.launch(targets.no_symmetric_memory, 2, device="cpu"):
        assert said.startswith("Strategy 'signaled:peer' is not available: ")
        assert "possible here: serial:net" in said
