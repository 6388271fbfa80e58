"""Decoders of transformers 5 with tiny configurations: for each, what `parallelize` is to make of it.

`RIGHT`: by TRANSFORMER and VOCABULARY. `BY_OTHERS`: by a plan of one's own. `REFUSED`: in a sentence that has this.
Heads of keys are three, so that two ranks have two of them, and one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import undertow as ut
from undertow.nn.styles import Style

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40,
}  # fmt: skip
NOTHING_AT_RANDOM: dict[str, Any] = dict.fromkeys(
    (
        "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout",
        "residual_dropout", "embedding_dropout", "router_jitter_noise", "input_jitter_noise",
    ),
    0.0,
)  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
INDEXED = {
    **LATENT, "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
IN_TURN = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4,
    "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "global_head_dim": 16,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "shared_intermediate_size": 40}

VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2, "num_attention_heads": 4,
    "num_heads": 4, "head_dim": 8, "embed_dim": 32, "out_hidden_size": 48, "patch_size": 4, "image_size": 16,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "projection_dim": 32,
}  # fmt: skip
OF_THREE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}


def _seeing(text: dict[str, Any], **vision: Any) -> dict[str, Any]:
    """A model that sees, of which text alone is asked."""
    return {
        "text_config": {**SIZES, **EXPERTS, **NOTHING_AT_RANDOM, **text}, "vision_config": {**VISION, **vision},
        "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
        "image_token_index": 90, "mm_tokens_per_image": 4,
    }  # fmt: skip


RIGHT: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_num_shared_experts": 1},
    "axk1": LATENT,
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {},
    "cwm": {},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v3, queries as they are": {**LATENT, "q_lora_rank": None},
    "deepseek_v32": INDEXED,
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "falcon_h1": {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8},
    "flex_olmo": {},
    "flint": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 4},
    "gemma3n_text": {
        **IN_TURN, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": IN_TURN,
    "gemma4_text, keys for several layers": {
        **IN_TURN, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "attention_k_eq_v": True,
        "num_global_key_value_heads": 3,
    },
    "gemma4_text, experts": {**IN_TURN, "enable_moe_block": True, "top_k_experts": 2},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe, norms": {"use_qk_norm": True},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": INDEXED,
    "gpt_oss": {"sliding_window": 4},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "granite_swa": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {**MAMBA, "layer_types": ["attention", "mamba"]},
    "granitemoeshared": {"shared_intermediate_size": 40},
    "helium": {},
    "hrm_text": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hyperclovax": {},
    "internlm3": {},
    "jais2": {},
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "use_mamba_kernels": False, "mamba_d_state": 8,
    },
    "kolibri1": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "minicpm3": {**LATENT, "head_dim": 16},
    "minimax": {},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmo_hybrid": {},
    "olmoe": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_moe": {},
    "qwen3_next": LINEAR,
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "stablelm": {},
    "vaultgemma": {},
    "youtu": LATENT,
    "gemma3": _seeing({}),
    "llava": _seeing({"model_type": "llama"}, model_type="clip_vision_model"),
    "mistral3": _seeing({"model_type": "mistral"}, model_type="pixtral"),
    "qwen2_5_vl": _seeing(OF_THREE),
    "qwen3_vl": _seeing(OF_THREE),
    "qwen3_vl_moe": _seeing(OF_THREE),
}  # fmt: skip


def _without(*patterns: str) -> dict[str, Style]:
    return {name: style for name, style in ut.nn.TRANSFORMER.items() if name not in patterns}


_PLAIN = _without("*.up_proj", "*.down_proj", "*.experts")  # what stands between attention blocks has other names
_FUSED: dict[str, Style] = {"*.dense_h_to_4h": ut.nn.Column(), "*.dense_4h_to_h": ut.nn.Row()}
_FC: dict[str, Style] = {"*.fc1": ut.nn.Column(), "*.fc2": ut.nn.Row()}

BY_OTHERS: dict[str, tuple[dict[str, Any], Mapping[str, Style]]] = {
    "beam": ({}, {**ut.nn.TRANSFORMER, "*.gate_bias": ut.nn.Slice(like=("k_proj",))}),
    "bitnet": (
        {},
        {
            **ut.nn.TRANSFORMER, "*.attn_sub_norm": ut.nn.Shared(gathered="o_proj"),
            "*.ffn_sub_norm": ut.nn.Shared(gathered="down_proj"),
        },
    ),
    "falcon": (
        {"new_decoder_architecture": True, "num_kv_heads": 3},
        {
            "*.query_key_value": ut.nn.Column(unit=32, counts=("num_heads", "num_kv_heads")),
            "*.self_attention.dense": ut.nn.Row(unit=16), **_FUSED,
        },
    ),
    "gpt_neox": ({}, {"*.query_key_value": ut.nn.Column(unit=24), "*.attention.dense": ut.nn.Row(unit=8), **_FUSED}),
    "laguna": ({}, {**ut.nn.TRANSFORMER, "*.g_proj": ut.nn.Column(like=("k_proj",))}),
    "lfm2": (
        {},
        {
            **{name: style for name, style in _PLAIN.items() if name != "*.o_proj"},
            "*.self_attn.out_proj": ut.nn.Row(like=("k_proj",)),
            "*.self_attn.?_layernorm": ut.nn.Shared(unit="head_dim"),
            "*.w1": ut.nn.Column(), "*.w3": ut.nn.Column(), "*.w2": ut.nn.Row(),
        },
    ),
    "llama4_text": (
        {"num_hidden_layers": 4, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2},
        _without("*.experts"),
    ),
    "nanochat": ({}, {**_PLAIN, **_FC}),
    "nemotron_h": (
        {
            "layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 6, "mamba_head_dim": 16,
            "ssm_state_size": 8, "n_groups": 1, "moe_shared_expert_intermediate_size": 40,
        },
        {
            **ut.nn.TRANSFORMER, "*.embeddings": ut.nn.Vocabulary(), "lm_head": ut.nn.Column(gather_output=True),
        },
    ),
    "opt": (
        {"ffn_dim": 96, "word_embed_proj_dim": 48},
        {
            "*.q_proj": ut.nn.Column(unit="head_dim", counts=("num_heads",)), "*.k_proj": ut.nn.Column(unit="head_dim"),
            "*.v_proj": ut.nn.Column(unit="head_dim"), "*.out_proj": ut.nn.Row(unit="head_dim"), **_FC,
        },
    ),
    "phi": (
        {},
        {
            **{name: style for name, style in _PLAIN.items() if name != "*.o_proj"},
            "*.self_attn.dense": ut.nn.Row(like=("k_proj",)), **_FC,
        },
    ),
    "starcoder2": ({}, {**_PLAIN, "*.c_fc": ut.nn.Column(), "*.c_proj": ut.nn.Row()}),
}  # fmt: skip

_UNNAMED = "is left out of a plan that cuts model.layers.0.self_attn."
_NAMES = "must be one that matches a module"
_FORM = "but must be one with gate_up_proj [E, 2 I, H] and down_proj [E, H, I]"

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beam": ({}, f"gate_bias {_UNNAMED}"),
    "biogpt": ({}, _NAMES),
    "bitnet": ({}, f"attn_sub_norm {_UNNAMED}"),
    "bloom": ({}, _NAMES),
    "cohere, norms": ({"use_qk_norm": True}, "no rank has what a norm over all of them needs"),
    "deepseek_v4": ({}, _NAMES),
    "diffllama": ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}, f"lambda_q1 {_UNNAMED}"),
    "doge": ({}, f"A {_UNNAMED}"),
    "falcon": ({}, _NAMES),
    "gpt2": ({}, _NAMES),
    "gpt_bigcode": ({}, _NAMES),
    "gpt_neox": ({}, _NAMES),
    "gptj": ({"rotary_dim": 4}, _NAMES),
    "inkling_text": ({}, f"r_proj {_UNNAMED}"),
    "kimi_linear": (
        {
            **LATENT, "linear_attn_config": {
                "kda_layers": [1], "full_attn_layers": [2], "num_heads": 6, "head_dim": 8, "short_conv_kernel_size": 4,
            },
        },
        f"conv1d {_UNNAMED}",
    ),
    "laguna": ({}, f"g_proj {_UNNAMED}"),
    "lfm2": ({}, _NAMES),
    "llama4_text": ({"num_hidden_layers": 4, "interleave_moe_layer_step": 2}, _FORM),
    "mamba2": ({"num_heads": 6, "head_dim": 16, "n_groups": 1, "state_size": 8}, _NAMES),
    "mpt": ({"n_heads": 6}, _NAMES),
    "nanochat": ({}, _NAMES),
    "opt": ({"ffn_dim": 96, "word_embed_proj_dim": 48}, _NAMES),
    "phi": ({}, _NAMES),
    "stablelm, norms": ({"qk_layernorm": True}, f"q_layernorm {_UNNAMED}"),
    "starcoder2": ({}, _NAMES),
    "zamba2": (
        {
            "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 6,
            "num_mem_blocks": 1, "n_mamba_heads": 6, "mamba_headdim": 16, "mamba_ngroups": 1, "mamba_d_state": 8,
        },
        "gate_up_proj_adapter_list is left out of a plan",
    ),
}  # fmt: skip
COMPUTED_HEAD_DIM = (
    "biogpt", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "phi", "stablelm",
    "starcoder2",
)  # fmt: skip
