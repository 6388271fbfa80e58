"""Rank functions for many architectures in one launch: plain and over ranks, everything compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from architectures import COMPUTED_HEAD_DIM, EXPERTS, NOTHING_AT_RANDOM, SIZES
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import undertow as ut
from undertow.errors import UndertowError
from undertow.nn.styles import Style

# Gradients are compared with themselves, or with this share of the largest: that of a bias of keys, which adds the same
# to all that a softmax compares, is zero but for rounding.
LEAST = 1e-3


def built(name: str, options: Mapping[str, Any]) -> Any:
    """With weights that make much of all there is: heads that differ, biases, norms, sinks."""
    kind = name.partition(",")[0]
    given = {**SIZES, **EXPERTS, **NOTHING_AT_RANDOM, **options}
    if kind in COMPUTED_HEAD_DIM:
        del given["head_dim"]
    if kind == "falcon":
        given["num_kv_heads"] = options.get("num_kv_heads", 6)
        del given["num_key_value_heads"]
    kinds = AutoModelForCausalLM
    if "vision_config" in options:
        given, kinds = dict(options), AutoModelForImageTextToText
    torch.manual_seed(0)
    model = kinds.from_config(AutoConfig.for_model(kind, **given))
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for own, one in model.named_parameters():
            if one.dim() >= 2 and "conv" not in own:
                wide = 4 if "embed" in own else one.shape[-1]
                one.copy_(torch.randn(one.shape, generator=chance) / math.sqrt(wide))
            else:
                one.add_(0.3 * torch.randn(one.shape, generator=chance))
    return model


Found = dict[str, str | dict[str, float]]


def surveyed(which: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Style]]]) -> Found:
    """Of each name what was refused, or relative errors."""
    ut.init()
    torch.set_num_threads(1)
    return {name: _surveyed(built(name, options), plan) for name, options, plan in which}


def _surveyed(plain: Any, plan: Mapping[str, Style]) -> str | dict[str, float]:
    model = copy.deepcopy(plain)
    try:
        ut.nn.parallelize(model, plan, strategy="chunked:peer")
    except UndertowError as error:
        assert not any(isinstance(one, ut.nn.Sharded) for one in model.modules())
        return str(error)
    found = {"cut": _apart(plain, model)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(plain.state_dict())
    found["loaded"] = _apart(plain, model)
    prompt = torch.randint(3, SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(1))
    options = {
        "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(prompt),
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    with torch.no_grad():
        found["logits"] = _error(*(one.eval()(prompt).logits for one in (plain, model)))
        said = [one.generate(prompt, **options) for one in (plain, model)]
    found["tokens"] = 0.0 if torch.equal(said[0].sequences, said[1].sequences) else math.inf
    found["generated"] = _error(*(torch.stack(one.logits) for one in said))
    return found | _gradients(plain, model)


def _apart(plain: Any, model: Any) -> float:
    """A checkpoint, put together: what the ordinary model has, bit for bit, or not."""
    want, got = plain.state_dict(), ut.nn.full_state_dict(model)
    return 0.0 if list(got) == list(want) and all(torch.equal(got[name], want[name]) for name in want) else math.inf


def _gradients(plain: Any, model: Any) -> dict[str, float]:
    """All of them, those of what ranks hold whole as this rank has them."""
    text = torch.randint(3, SIZES["vocab_size"], (3, 11), generator=torch.Generator().manual_seed(3))
    for one in (plain, model):
        torch.manual_seed(7)  # routers that draw
        logits = one.train()(text, use_cache=False).logits
        (logits.float() * torch.randn(logits.shape, generator=torch.Generator().manual_seed(4))).sum().backward()
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.requires_grad_(False).copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    names = {name for name, _ in plain.named_parameters()}
    want, got = plain.state_dict(), ut.nn.full_state_dict(model)
    most = max(float(want[name].abs().max()) for name in names)
    return {f"gradient of {name}": _error(want[name], got[name], LEAST * most) for name in names}


def _error(want: torch.Tensor, got: torch.Tensor, least: float = 0.0) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=least))
