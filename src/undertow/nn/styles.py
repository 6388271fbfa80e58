"""What may become of a module when a model is taken over ranks, and plans that say so of decoders.

A plan maps patterns (as of a shell: `*` is any text, dots too) of module names to one of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Unit = int | str | tuple[str, ...]
"""What stays together: a number, or attributes of the module around the layer, multiplied; "a + b" is a sum of two."""


Optional = bool | str | tuple[str, ...]
"""Whether a model may have none; or patterns of the plan of which one must match something then, in its place."""

Names = tuple[str, ...]
"""Of what stands beside a module: children of the same one."""


@dataclass(frozen=True)
class Column:
    """Cut by columns of the result. `gather_output`: every rank gets all of them.

    `sections`: the units of layers that are held as one, side by side (queries, keys and values): each is cut for
    itself. `like`: cut in as many units as the first of these that is there, where one is. `counts`: attributes around
    the layer that tell how many units there are, or a multiple of it, become this rank's; those of its `config` only as
    that module sees it. `beside`: none where no module of this name stands beside it. `all_named`: the plan must name
    all that has parameters beside it, too, as one for models that its author does not know must.
    """

    unit: Unit = 1
    gather_output: bool = False
    sequence_parallel: bool = False
    optional: Optional = False
    sections: tuple[Unit, ...] = ()
    like: Names = ()
    counts: tuple[str, ...] = ()
    beside: str | None = None
    all_named: bool = False


@dataclass(frozen=True)
class Row:
    """Cut by the inner dimension; the result is summed, or summed and scattered in the sequence-parallel form. `like`
    and `all_named`: as of a `Column`."""

    unit: Unit = 1
    sequence_parallel: bool = False
    optional: Optional = False
    like: Names = ()
    all_named: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """An embedding, cut by its rows; what it gives is summed, or summed and scattered in the sequence-parallel form. A
    last layer with the same weight is a `Column`."""

    unit: Unit = 1
    sequence_parallel: bool = False
    optional: Optional = False


@dataclass(frozen=True)
class Experts:
    """Experts held as two tensors, `gate_up_proj` and `down_proj`: each is cut by its inner dimension.

    `unit`: eight numbers that stay together keep rows of 16-bit weights on 16 bytes, as grouped matmuls want them.
    """

    unit: Unit = 8
    optional: Optional = False


@dataclass(frozen=True)
class Slice:
    """A parameter of a module around cut layers, not a layer: cut by its first dimension. `like`: as of a `Column`."""

    unit: Unit = 1
    optional: Optional = False
    like: Names = ()


@dataclass(frozen=True)
class Shared:
    """Left whole on every rank, where it sees only the rank's part: gradients of its parameters are summed over ranks.

    Norms of single heads, and, in the sequence-parallel form, norms of rows. What is summed is what calls of the module
    make of them, not what others do with its parameters. `unit`: how many elements each has, None: any. `gathered`: one
    that has as many as the layer of this name beside it has columns (of a `Row`: inputs), a norm over all heads, gets
    them of all ranks, and what it makes of them is cut again. `optional`: a model may have none.
    """

    unit: Unit | None = None
    optional: Optional = False
    gathered: str | None = None


@dataclass(frozen=True)
class Whole:
    """A layer or a parameter that is left as it is beside layers that are cut: it sees what all ranks have.

    `spread`: how many of the last columns of its result meet the rank's part with no layer between, as a key that all
    heads share does: their gradient is summed over ranks.
    """

    spread: Unit | None = None
    optional: Optional = False


Parted = Column | Row | Vocabulary | Experts
Style = Parted | Shared | Slice | Whole

_KEYS = ("k_proj", "kv_b_proj", "qkv_proj")

TRANSFORMER: Mapping[str, Style] = {
    "*.linear_attn.*": Whole(optional=True),
    "*.vision_tower.*": Whole(optional=True),
    "*.q_proj": Column(
        unit=("head_dim", "num_key_value_groups"), like=_KEYS, counts=("num_heads",), all_named=True,
        optional=("*.q_b_proj", "*.qkv_proj"),
    ),
    "*.k_proj": Column(
        unit="head_dim", counts=("num_key_value_heads",), all_named=True, optional=("*.kv_b_proj", "*.qkv_proj"),
    ),
    "*.v_proj": Column(unit="head_dim", like=_KEYS, optional=("*.kv_b_proj", "*.qkv_proj")),
    "*.qkv_proj": Column(
        sections=(("head_dim", "num_key_value_groups"), "head_dim", "head_dim"),
        counts=("num_key_value_heads", "config.num_attention_heads"), optional=True, beside="o_proj", all_named=True,
    ),
    "*.kv_b_proj": Column(unit="qk_nope_head_dim + v_head_dim", all_named=True, optional=True),
    "*.q_b_proj": Column(like=_KEYS, optional=True),
    "*.kv_a_proj_with_mqa": Whole(spread="qk_rope_head_dim", optional=True),
    "*.kv_a_layernorm": Whole(optional=True),
    "*.q_a_proj": Whole(optional=True),
    "*.q_a_layernorm": Whole(optional=True),
    "*.self_attn.indexer": Whole(optional=True),
    "*.o_proj": Row(unit=("head_dim", "num_key_value_groups"), like=_KEYS, all_named=True),
    "*.self_attn.gate_proj": Column(like=_KEYS, optional=True),
    "*.sinks": Slice(like=_KEYS, optional=True),
    "*.gate_proj": Column(optional=True),
    "*.up_proj": Column(all_named=True, optional=("*.experts", "*.gate_up_proj")),
    "*.gate_up_proj": Column(sections=(1, 1), all_named=True, optional=True, beside="down_proj"),
    "*.down_proj": Row(all_named=True, optional="*.experts"),
    "*.experts": Experts(optional="*.down_proj"),
    "*.mlp.act_fn": Shared(optional=True),
    "*.self_attn.q_norm": Shared(unit="head_dim", optional=True, gathered="q_proj"),
    "*.self_attn.k_norm": Shared(unit="head_dim", optional=True, gathered="k_proj"),
    "*.self_attn.query_layernorm": Shared(unit="head_dim", optional=True, gathered="q_proj"),
    "*.self_attn.key_layernorm": Shared(unit="head_dim", optional=True, gathered="k_proj"),
}  # fmt: skip
"""For decoders whose layers are named as in Llama (Qwen, Mistral, and with experts Mixtral and others; with queries,
keys and values as one in Phi-3; with latent keys in DeepSeek): query heads follow their keys."""

VOCABULARY: Mapping[str, Style] = {"*.embed_tokens": Vocabulary(), "lm_head": Column(gather_output=True)}
"""The first and the last layer of such a model, whether they share their weight or not: {**TRANSFORMER, **VOCABULARY}.
"""
