"""Plans that name all that stands beside cut layers, in real ranks."""

from __future__ import annotations

import block_targets as targets

import undertow as ut


def _all() -> list[str]:
    assert targets.as_whole()
    assert all(targets.scaled_embedding(sequence_parallel) for sequence_parallel in (False, True))
    return targets.refusals()


def test_what_stands_beside_cut_layers() -> None:
    """One launch for all: what is right, and what is refused."""
    styles = {
        "module": (
            "ut.nn.Shared for one that sees heads of this rank, ut.nn.Whole for one that sees what all ranks have,"
            " ut.nn.Column or Row for one that is cut with them"
        ),
        "parameter": "ut.nn.Slice for one with a part for each head, ut.nn.Whole for one that meets none of them",
    }
    beside = "is left out of a plan that cuts 0.qkv beside it, but must be named in it, too"
    leave = "narrower patterns, or another part of the model, leave it whole"
    for said in ut.launch(_all, 2, device="cpu"):
        assert said == [
            f"0.norm {beside} ({styles['module']}); {leave}.",
            f"0.scales {beside} ({styles['parameter']}); {leave}.",
            "0.o_proj is of 6 units, but must be of 3, as 0.qkv is, so that ranks hold what belongs together: set its"
            " `unit`.",
            "plan is one in which 0.scales is like itself, but must be one whose `like` leads to a layer with a unit.",
            "out_features of 0.qkv is 48, but must be a multiple of 9, the units of its sections.",
            "0.norm.weight is of 24 elements, but must be of 4: ranks hold whole heads, and no rank has what a norm"
            " over all of them needs.",
            "shape[0] of 0.scales is 6, but must be a multiple of 4, its unit.",
            "a pattern of plan is '*.qkv', but must be one that matches a module; model.named_modules() lists them.",
            "attribute 'other' around 0.mqa is None, but must be a whole number: Attention has none of that name, so"
            " give the unit as a number.",
            f"0.scales {beside.replace('qkv', 'o_proj')} ({styles['parameter']}); {leave}.",
            "in_features of 0.o_proj is 24, but must be a multiple of 0, its unit.",
            "the embedding of 0 is Scaled whose rows depend on more than what is looked up, but must be a lookup, or"
            " what a forward makes of each row alone; a narrower pattern leaves it whole.",
        ]
