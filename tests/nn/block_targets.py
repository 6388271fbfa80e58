"""Rank functions for plans that name all that stands beside cut layers: attention in several forms, without
transformers."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from layer_targets import CLOSE, STRATEGY, same

import undertow as ut
from undertow.errors import UndertowError
from undertow.nn.styles import Style

HIDDEN, HEAD_DIM, KEYS, GROUPS, SHARED = 6, 4, 3, 2, 2  # three heads of keys over two ranks: two, and one


class Attention(torch.nn.Module):
    """Queries, keys and values held as one; a norm over all heads of queries; a number for each head; a part of the
    keys that all heads share. No softmax: it would add nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups, self.keys, self.shared = HEAD_DIM, GROUPS, KEYS, SHARED
        self.config = SimpleNamespace(heads=KEYS * GROUPS)
        self.qkv = torch.nn.Linear(HIDDEN, (GROUPS + 2) * KEYS * HEAD_DIM)
        self.norm = torch.nn.LayerNorm(KEYS * GROUPS * HEAD_DIM)
        self.scales = torch.nn.Parameter(torch.randn(KEYS * GROUPS))
        self.mqa = torch.nn.Linear(HIDDEN, HIDDEN + SHARED)
        self.o_proj = torch.nn.Linear(KEYS * GROUPS * HEAD_DIM, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latent, shared = self.mqa(x).split([HIDDEN, SHARED], -1)
        sizes = [self.config.heads * HEAD_DIM, self.keys * HEAD_DIM, self.keys * HEAD_DIM]
        q, k, v = self.qkv(latent).split(sizes, -1)
        q = self.norm(q).unflatten(-1, (self.config.heads, HEAD_DIM))
        k, v = (one.unflatten(-1, (self.keys, HEAD_DIM)).repeat_interleave(GROUPS, -2) for one in (k, v))
        k = k + torch.cat((shared, shared), -1)[..., None, :]
        likely = torch.tanh((q * k).sum(-1) / math.sqrt(HEAD_DIM)) * self.scales
        return self.o_proj((likely[..., None] * v).flatten(-2))  # type: ignore[no-any-return]


PLAN: Mapping[str, Style] = {
    "*.qkv": ut.nn.Column(
        sections=(("head_dim", "num_key_value_groups"), "head_dim", "head_dim"), counts=("keys", "config.heads"),
        all_named=True, beside="o_proj",
    ),
    "*.norm": ut.nn.Shared(unit="head_dim", gathered="o_proj"),
    "*.scales": ut.nn.Slice(like=("qkv",)),
    "*.mqa": ut.nn.Whole(spread="shared"),
    "*.o_proj": ut.nn.Row(like=("qkv",)),
}  # fmt: skip


def as_whole() -> bool:
    """Results, gradients and their norm, checkpoints; also in copies, and as one graph."""
    group = same()
    plain = torch.nn.Sequential(Attention())
    for one in plain.parameters():
        torch.nn.init.normal_(one)
    cut: Any = ut.nn.parallelize(copy.deepcopy(plain), PLAN, strategy=STRATEGY)
    ut.nn.parallelize(
        cut, {"*.mqa": ut.nn.Whole(spread="shared")}
    )  # once more: as often as it is said, it is done once
    mine = (4, 2)[group.rank]
    assert cut[0].scales.shape == (mine,)
    assert (cut[0].config.heads, cut[0].keys) == (mine, mine // GROUPS)
    assert plain[0].config.heads == KEYS * GROUPS
    assert isinstance(cut[0].config, SimpleNamespace)
    cut[0].config._undertow_config.implementation = "another"  # that of the model, which has it changed by and by
    assert cut[0].config.implementation == "another"
    x = torch.randn(2, 5, HIDDEN)
    compiled = torch.compile(copy.deepcopy(cut), fullgraph=True, backend="aot_eager")
    for model in (cut, pickle.loads(pickle.dumps(cut)), compiled):
        found = []
        for one in (plain, model):
            one.zero_grad()
            given = x.clone().requires_grad_()
            y = one(given)
            y.square().mean().backward()
            found.append((y, given.grad))
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want, **CLOSE)
        model = getattr(model, "_orig_mod", model)
        want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        torch.testing.assert_close(ut.nn.clip_grad_norm_(model, 1e9), want, **CLOSE)
        with torch.no_grad():
            moved = copy.deepcopy(model)
            for parameter, one in zip(moved.parameters(), model.parameters(), strict=True):
                parameter.copy_(one.grad)  # type: ignore[arg-type]
        gradients = ut.nn.full_state_dict(moved)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, **CLOSE, msg=name)
    given = {name: torch.randn_like(one) for name, one in plain.state_dict().items()}
    cut.load_state_dict(given)
    again = ut.nn.full_state_dict(cut)
    assert list(again) == list(given)
    cut.load_state_dict({name: one.clone() for name, one in cut.state_dict().items()})  # shards
    plain.load_state_dict(given)
    torch.testing.assert_close(cut(x), plain(x), **CLOSE)
    return all(torch.equal(again[name], given[name]) for name in given)


class Scaled(torch.nn.Embedding):
    """As Gemma's; and, told to, one whose rows are no rows of its weight."""

    def __init__(self, by_place: bool = False) -> None:
        super().__init__(7, 4, padding_idx=5)
        self.by_place = by_place
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = super().forward(ids) * self.scale
        return y + torch.arange(len(ids))[:, None] if self.by_place else y


def scaled_embedding(sequence_parallel: bool) -> bool:
    group = same()
    plain = torch.nn.Sequential(Scaled())
    seen: list[int] = []
    plain[0].register_forward_hook(lambda *_: seen.append(1))
    model = ut.nn.parallelize(copy.deepcopy(plain), {"0": ut.nn.Vocabulary(sequence_parallel=sequence_parallel)})
    ids = torch.tensor([6, 0, 5, 3, 3])
    want = plain(ids)
    (want * want.detach()).sum().backward()
    got = model(ids)
    assert len(seen) == 2, "once for each model"
    whole = want.detach()
    (got * (whole.tensor_split(group.size)[group.rank] if sequence_parallel else whole)).sum().backward()
    torch.testing.assert_close(got, whole.tensor_split(group.size)[group.rank] if sequence_parallel else whole)
    layer: Any = model[0]  # type: ignore[index]
    torch.testing.assert_close(layer.weight.grad, layer.cuts["weight"].take(plain[0].weight.grad, group.rank))
    return list(model.state_dict()) == ["0.weight"]


def refusals() -> list[str]:
    same()
    whole = dict(PLAN)
    plans: list[Mapping[str, Style]] = [
        {name: style for name, style in whole.items() if name != left} for left in ("*.norm", "*.scales")
    ]
    plans += [
        {**whole, "*.o_proj": ut.nn.Row(unit="head_dim")},
        {**whole, "*.o_proj": ut.nn.Row(like=("o_proj", "scales")), "*.scales": ut.nn.Slice(like=("o_proj",))},
        {**whole, "*.qkv": ut.nn.Column(sections=("head_dim", 5))},
        {**whole, "*.norm": ut.nn.Shared(unit="head_dim", gathered="mqa")},
        {**whole, "*.scales": ut.nn.Slice(unit=4)},
        {"*": ut.nn.Whole(), **whole},
        {**whole, "*.mqa": ut.nn.Whole(spread="shared + other")},
        {"*.o_proj": ut.nn.Row(all_named=True)},
        {**whole, "*.o_proj": ut.nn.Row(unit=0)},
    ]
    said = []
    for plan in plans:
        model = torch.nn.Sequential(Attention())
        try:
            ut.nn.parallelize(model, plan)
        except UndertowError as error:
            said.append(str(error))
        assert not any(isinstance(one, ut.nn.Sharded) for one in model.modules())
    try:
        ut.nn.parallelize(torch.nn.Sequential(Scaled(by_place=True)), {"0": ut.nn.Vocabulary()})
    except UndertowError as error:
        said.append(str(error))
    return said
