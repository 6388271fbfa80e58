"""Rank functions with Hugging Face models: the same call on several architectures, generation, and training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import undertow as ut
from undertow.nn import weights_file

SIZES = {"hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 2, "vocab_size": 97}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}  # 3 over 2 ranks: heads do not divide
EXPERTS = {  # inner sizes of nine and five units, which two ranks hold unevenly
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 72},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
}
STRATEGY = "chunked:peer"
PLAN = {**ut.nn.TRANSFORMER, **ut.nn.VOCABULARY}
TIED = ("qwen3", "mixtral")  # one weight for the first and the last layer


def _model(architecture: str, dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, **HEADS, **EXPERTS.get(architecture, {}), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes["tie_word_embeddings"] = architecture in TIED
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes), **options).to(dtype)
    with torch.no_grad():  # biases and norms begin as constants, which would hide a mistake
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def same_as_one_rank(architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """Logits of a prefill, and tokens of a greedy generation with a cache, of the plain model and of its shards."""
    ut.init()
    plain = _model(architecture, dtype).eval()
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == (architecture in TIED)
    model = ut.nn.parallelize(copy.deepcopy(plain), PLAN, strategy=STRATEGY)
    prompt = torch.randint(3, SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(prompt)}
    with torch.no_grad():
        want, got = plain(prompt).logits, model(prompt).logits
        tokens = [one.generate(prompt, **options).tolist() for one in (plain, model)]
    held = sum(parameter.numel() for parameter in model.parameters())
    return {
        "error": float((got - want).abs().max() / want.abs().max()),
        "same tokens": tokens[0] == tokens[1],
        "share": held / sum(parameter.numel() for parameter in plain.parameters()),
        "layers": sum(isinstance(one, ut.nn.Sharded) for one in model.modules()),
    }


def _losses(model: Any, steps: int) -> list[float]:
    """Next-token prediction of a noisy periodic text, which two layers can learn."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chance = torch.Generator().manual_seed(2)
    found = []
    for _ in range(steps):
        start = torch.randint(0, 7, (4, 1), generator=chance)
        text = 3 + (start + torch.arange(16)) % 7 * 11
        optimizer.zero_grad()
        loss = model(text, labels=text).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def trained(architecture: str, steps: int, strategy: str) -> tuple[list[float], list[float], float]:
    """Losses of the plain model and of its shards, and the largest error of a weight afterwards."""
    ut.init()
    plain = _model(architecture, torch.float32)
    model = ut.nn.parallelize(copy.deepcopy(plain), PLAN, strategy=strategy)
    want, got = _losses(plain, steps), _losses(model, steps)
    whole, end = plain.state_dict(), ut.nn.full_state_dict(model)
    return want, got, float(torch.stack([(end[name] - whole[name]).abs().max() for name in whole]).max())


def gradients(architecture: str, dtype: torch.dtype, implementation: str) -> dict[str, float]:
    """Relative error of the gradient of every parameter, put together, with the loss that balances experts.

    The router's and all others that are whole on every rank must be the same on all, too: "apart" is by how much not.
    """
    group = ut.init()
    plain = _model(architecture, dtype, experts_implementation=implementation)
    model = ut.nn.parallelize(copy.deepcopy(plain), PLAN, strategy=STRATEGY)
    text = torch.randint(3, SIZES["vocab_size"], (3, 11), generator=torch.Generator().manual_seed(3))
    for one in (plain, model):
        one(text, labels=text, output_router_logits=True).loss.backward()
    held = {name: one.grad.clone() for name, one in model.named_parameters()}
    whole = {name for name, one in plain.named_parameters() if one.shape == held[name].shape}
    with torch.no_grad():
        for one in (plain, model):
            for parameter in one.parameters():
                parameter.copy_(parameter.grad)
    want, got = plain.state_dict(), ut.nn.full_state_dict(model)
    found = {name: float((got[name] - want[name]).abs().max() / want[name].abs().max()) for name in want}
    sums = [float(held[name].double().abs().sum()) for name in sorted(whole)]
    everyones = group.exchange(sums, "gradients of what is whole")
    found["apart"] = float((torch.tensor(everyones).double() / torch.tensor(sums).double() - 1).abs().max())
    return found


def files(architecture: str, folder: str) -> dict[str, Any]:
    """Files that transformers writes, experts one by one, into a model that had no memory; files that it reads; and
    such as it writes."""
    group = ut.init()
    plain = _model(architecture, torch.bfloat16).eval()
    theirs, ours, alike = (Path(folder) / name for name in ("theirs", "ours", "alike"))
    if group.rank == 0:
        plain.save_pretrained(theirs, max_shard_size="40KB")
    group.barrier()
    with ut.nn.without_weights():
        model = AutoModelForCausalLM.from_config(plain.config, dtype=torch.bfloat16).eval()
    ut.nn.parallelize(model, PLAN, strategy=STRATEGY)
    ut.nn.load_checkpoint(model, theirs)
    ut.nn.save_checkpoint(model, ours, file_bytes=40_000)
    ut.nn.save_checkpoint(model, alike, file_bytes=40_000, like=theirs)
    if group.rank == 0:
        plain.config.save_pretrained(ours)
    group.barrier()
    again = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.bfloat16).eval()
    prompt = torch.randint(3, SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = again(prompt).logits, model(prompt).logits
    weights, written, wanted = again.state_dict(), weights_file.Weights(alike), weights_file.Weights(theirs)
    return {
        "files": min(len(list(one.glob("*.safetensors"))) for one in (theirs, ours, alike)),
        "alike": written.names == wanted.names and all(torch.equal(written[one], wanted[one]) for one in wanted.names),
        "error": float((got - want).abs().max() / want.abs().max()),
        "read again": all(torch.equal(weights[name], one) for name, one in plain.state_dict().items()),
    }
