"""Rank functions for experts that are cut: against the same module whole, without transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from layer_targets import CLOSE, same

import undertow as ut
from undertow.errors import UndertowError

EXPERTS, TOP, HIDDEN, INNER = 5, 2, 6, 24


class Mixture(torch.nn.Module):
    """Experts as models of transformers 5 hold them, as a plain loop over tokens."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, 2 * inner, HIDDEN))
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, inner))
        self.act_fn = torch.nn.SiLU()

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, likely: torch.Tensor) -> torch.Tensor:
        rows = []
        for token, row in enumerate(x):
            total = torch.zeros_like(row)
            for place, expert in enumerate(chosen[token].tolist()):
                gate, up = (self.gate_up_proj[expert] @ row).chunk(2)
                total = total + likely[token, place] * (self.down_proj[expert] @ (self.act_fn(gate) * up))
            rows.append(total)
        return torch.stack(rows)


class InTurn(Mixture):
    """The other way round, gates and ups in turn, with biases, as those of GPT-OSS."""

    is_transposed, is_concatenated, has_bias = True, False, True

    def __init__(self, inner: int = INNER) -> None:
        super().__init__(inner)
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * inner))
        self.gate_up_proj_bias = torch.nn.Parameter(torch.randn(EXPERTS, 2 * inner))
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, inner, HIDDEN))
        self.down_proj_bias = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, likely: torch.Tensor) -> torch.Tensor:
        both = torch.einsum("th,tkhi->tki", x, self.gate_up_proj[chosen]) + self.gate_up_proj_bias[chosen]
        inner = self.act_fn(both[..., ::2]) * both[..., 1::2]
        made = torch.einsum("tki,tkih->tkh", inner, self.down_proj[chosen]) + self.down_proj_bias[chosen]
        return torch.einsum("tkh,tk->th", made, likely)


class Ungated(Mixture):
    """Without gates, as those of Nemotron-H."""

    has_gate = False

    def __init__(self, inner: int = INNER) -> None:
        super().__init__(inner)
        del self.gate_up_proj
        self.up_proj = torch.nn.Parameter(torch.randn(EXPERTS, inner, HIDDEN))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, likely: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(torch.einsum("th,tkih->tki", x, self.up_proj[chosen]))
        made = torch.einsum("tki,tkhi->tkh", inner, self.down_proj[chosen])
        return torch.einsum("tkh,tk->th", made, likely)


class Block(torch.nn.Module):
    """A router, experts, and a second use of what the router says, as a loss that balances experts has."""

    def __init__(self, inner: int = INNER, kind: type[Mixture] = Mixture) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = kind(inner)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        likely = torch.softmax(self.gate(x), -1)
        best, chosen = likely.topk(TOP, -1)
        return x + self.experts(x, chosen, best / best.sum(-1, keepdim=True)), likely.square().sum()


PLAN = {"experts": ut.nn.Experts()}


def _blocks(strategy: str, kind: type[Mixture] = Mixture) -> tuple[Block, Block]:
    same()
    plain = Block(kind=kind)
    return plain, ut.nn.parallelize(copy.deepcopy(plain), PLAN, strategy=strategy)  # type: ignore[return-value]


def as_whole(strategy: str) -> bool:
    """Results and all gradients, the router's and the input's complete on every rank; with and without a graph. In all
    forms that transformers 5 tells of."""
    return all(_as_whole(strategy, kind) for kind in (Mixture, InTurn, Ungated))


def _as_whole(strategy: str, kind: type[Mixture]) -> bool:
    plain, model = _blocks(strategy, kind)
    whole = {name: one.clone() for name, one in plain.state_dict().items()}
    again = ut.nn.full_state_dict(model)
    assert list(again) == list(whole)
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    for rows in (1, 9):
        found = []
        x = torch.randn(rows, HIDDEN)
        for block in (plain, model):
            given = x.clone().requires_grad_()
            y, balance = block(given)
            (torch.sin(y).sum() + 0.1 * balance).backward()
            found.append((y.detach(), given.grad, block.gate.weight.grad.clone()))
            with torch.no_grad():
                torch.testing.assert_close(block(x)[0], y, **CLOSE)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(other, one, **CLOSE)
    layer: Any = model.experts
    for name, one in plain.experts.named_parameters():
        want = layer.cuts[name].take(one.grad, layer.rank) if name in layer.cuts else one.grad
        torch.testing.assert_close(getattr(layer, name).grad, want, **CLOSE)
    return True


def checkpoints() -> bool:
    """Whole to shards and back; names as before; copies live on; frozen stays frozen."""
    plain, model = _blocks("chunked:peer")
    whole = {name: one.clone() for name, one in plain.state_dict().items()}
    assert model.state_dict().keys() == whole.keys()
    sizes = [16, 8] if ut.as_group(None).size == 2 else [8, 8, 8]  # three units of eight
    assert model.experts.down_proj.shape == (EXPERTS, HIDDEN, sizes[ut.as_group(None).rank])
    again = ut.nn.full_state_dict(model)
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    other = {name: torch.randn_like(one) for name, one in whole.items()}
    model.load_state_dict(other)
    plain.load_state_dict(other)
    again = ut.nn.full_state_dict(model)
    assert all(torch.equal(again[name], other[name]) for name in whole)
    shards = {name: one.clone() for name, one in model.state_dict().items()}
    model.load_state_dict(whole)
    model.load_state_dict(shards)
    x = torch.randn(4, HIDDEN)
    for one in (model, copy.deepcopy(model)):
        torch.testing.assert_close(one(x)[0], plain(x)[0], **CLOSE)
    frozen = Block().requires_grad_(False)
    ut.nn.parallelize(frozen, PLAN)
    assert not any(one.requires_grad for one in frozen.parameters())
    return True


class Dense(Mixture):
    """The same numbers, as operations that depend on no data: every expert of every token."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, likely: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("th,eih->tei", x, self.gate_up_proj).chunk(2, -1)
        made = torch.einsum("tei,ehi->teh", self.act_fn(gate) * up, self.down_proj)
        return torch.einsum("teh,te->th", made, torch.zeros_like(made[..., 0]).scatter(1, chosen, likely))


def compiled() -> bool:
    """One graph, forward and backward, where the model's own forward is one."""
    plain, _ = _blocks("auto")
    dense = Dense()
    dense.load_state_dict(plain.experts.state_dict())
    model = copy.deepcopy(plain)
    model.experts = dense  # type: ignore[assignment]
    ut.nn.parallelize(model, PLAN)
    x, found = torch.randn(9, HIDDEN), []
    for block in (plain, torch.compile(model, fullgraph=True, backend="aot_eager")):
        given = x.clone().requires_grad_()
        y, balance = block(given)
        (torch.sin(y).sum() + 0.1 * balance).backward()
        found.append((y.detach(), given.grad, block.gate.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, **CLOSE)
    return True


class Turned(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER))
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))


class Biased(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj_bias = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN))


class Normed(Mixture):
    has_post_expert_norm = True


def refusals() -> dict[str, str]:
    ut.init()

    def cut(experts: torch.nn.Module, **style: int) -> object:
        return ut.nn.parallelize(torch.nn.ModuleDict({"mlp": experts}), {"mlp": ut.nn.Experts(**style)})

    tied = Block()
    tied.other = tied.experts.gate_up_proj
    either = {"*.gate": ut.nn.Column(optional="*.experts"), "*.experts": ut.nn.Experts(optional="*.gate")}
    calls: dict[str, Callable[[], object]] = {
        "unit": lambda: cut(Mixture(20)),
        "too few": lambda: cut(Mixture(24), unit=24),
        "turned": lambda: cut(Turned()),
        "biased": lambda: cut(Biased()),
        "normed": lambda: cut(Normed()),
        "no experts": lambda: cut(torch.nn.SiLU()),
        "tied": lambda: ut.nn.parallelize(tied, PLAN),
        "neither": lambda: ut.nn.parallelize(torch.nn.ModuleDict({"up": torch.nn.Linear(4, 4)}), either),
        "a list": lambda: ut.nn.parallelize(
            torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.ModuleList([Mixture()])})}), either
        ),
        "shape": lambda: cut(Mixture()).get_submodule("mlp")(torch.ones(1, 2, 6), torch.ones(2, 2), torch.ones(2, 2)),  # type: ignore[attr-defined]
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except UndertowError as error:
            found[name] = str(error)
    return found


def whole_or_not_at_all() -> list[object]:
    """What is refused leaves the model as it was; norms are summed once, however often a plan is carried out; the
    model's own forward knows whether it trains."""
    group = ut.init()
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
            self.experts = Mixture(20)  # of which eight make no units

    model = Model()
    plan = {"norm": ut.nn.Shared(), "first": ut.nn.Column(), "experts": ut.nn.Experts()}
    said: list[object] = []
    try:
        ut.nn.parallelize(model, plan)
    except UndertowError as error:
        said.append(str(error))
    said.append(type(model.first).__name__)
    try:
        ut.nn.parallelize(model, {"first": ut.nn.Column(), "norm": ut.nn.Shared()}, strategy="quickly")
    except UndertowError as error:
        said.append(str(error).partition(",")[0])
    said.append(type(model.first).__name__)
    ut.nn.parallelize(model, {"norm": ut.nn.Shared(), "first": ut.nn.Column()})
    ut.nn.parallelize(model, {"norm": ut.nn.Shared()})
    model.norm(torch.ones(1, 8)).sum().backward()
    assert model.norm.bias.grad is not None
    said.append(bool((model.norm.bias.grad == group.size).all()))
    block = ut.nn.parallelize(Block(), PLAN)
    block.eval()
    block(torch.ones(2, HIDDEN))
    said.append(block.experts._model[0].training)
    seen: list[int] = []
    block = Block()
    block.experts.register_forward_pre_hook(lambda *_: seen.append(1))
    ut.nn.parallelize(block, PLAN)
    block(torch.ones(2, HIDDEN))
    said.append(len(seen))
    return said
