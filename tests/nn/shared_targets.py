"""Rank functions for what ranks hold whole: gradients that are summed, and the norm of all gradients."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Sequence
from typing import Any

import torch
from layer_targets import CLOSE, STRATEGY, same
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import undertow as ut


class Normed(torch.nn.Module):
    """Columns, a norm of the rank's own heads of them, rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(4, 12), torch.nn.LayerNorm(4), torch.nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = self.norm(self.first(x).unflatten(-1, (-1, 4)))
        return self.last(heads.flatten(-2))  # type: ignore[no-any-return]


NORMED = {"*first": ut.nn.Column(unit=4), "*norm": ut.nn.Shared(unit=4), "*last": ut.nn.Row(unit=4)}


def _compare(plain: torch.nn.Module, model: torch.nn.Module) -> None:
    """Gradients of all parameters, put together."""
    gradients = {}
    for one in (plain, model):
        with torch.no_grad():
            for parameter in one.parameters():
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
        gradients[one] = one.state_dict() if one is plain else ut.nn.full_state_dict(one)
    for name, want in gradients[plain].items():
        torch.testing.assert_close(gradients[model][name], want, **CLOSE)


def shared_gradients(hows: Sequence[str]) -> bool:
    """Of norms that are whole on each rank: under FSDP2, in a copy, recomputed, in graphs, all frozen, with another's
    forward, and where the plan names them twice."""
    return all(_shared_gradients(how) for how in hows)


def _shared_gradients(how: str) -> bool:
    group = same()
    plain = torch.nn.Sequential(*(Normed() for _ in range(12 if how == "layer by layer" else 2)))
    mesh = init_device_mesh("cpu", (2, group.size // 2), mesh_dim_names=("tensor", "data"))
    model: Any = ut.nn.parallelize(copy.deepcopy(plain), NORMED, group=mesh["tensor"], strategy=STRATEGY)
    x = torch.randn(4, 4)
    mine = x
    if how == "FSDP2":
        for block in model:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        mine = x.tensor_split(mesh["data"].size())[mesh["data"].get_local_rank()]
    elif how == "copy":
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    elif how == "recomputed":
        model[0] = checkpoint_wrapper(model[0])
    elif how == "graph":
        model = torch.compile(model, fullgraph=True, backend="aot_eager")
    elif how == "patched":  # as kernels of others are put in
        for block in model:
            block.norm.forward = types.MethodType(torch.nn.LayerNorm.forward, block.norm)
    elif how == "named twice":
        ut.nn.parallelize(model, {"*norm": ut.nn.Shared(), "0": ut.nn.Shared()}, group=mesh["tensor"])
    elif how == "layer by layer":
        for block in model:
            block.compile(fullgraph=True, backend="aot_eager")
    elif how == "frozen":
        frozen = ut.nn.parallelize(copy.deepcopy(plain).requires_grad_(False), NORMED, group=mesh["tensor"])
        torch.testing.assert_close(frozen(x), plain(x), **CLOSE)
        assert not any(one.requires_grad for one in frozen.parameters())
    for _ in range(2):
        for one, given in ((plain, x), (model, mine)):
            one.zero_grad()
            one(given).square().mean().backward()
    assert not any(isinstance(one, torch.Tensor) for block in model.modules() for one in vars(block).values())
    assert all(one.is_leaf for one in model.parameters())
    _compare(plain, getattr(model, "_orig_mod", model))
    return how != "layer by layer" or torch._dynamo.utils.counters["stats"]["unique_graphs"] < 8


class Odd(torch.nn.Module):
    """Parameters that are used without a call of who holds them, that a hook computes others of, and in a call inside
    a call."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.listed = torch.nn.ParameterList([torch.randn(4)])
        self.normed = torch.nn.utils.weight_norm(torch.nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        y: torch.Tensor = self.normed(self.attention(x, x, x, need_weights=False)[0]) * self.listed[0]
        return self(y, False) * self.listed[0] if again else y  # type: ignore[no-any-return]


def odd_shared() -> bool:
    """As each rank computes the same of them, gradients are those of one rank times ranks; with plain tensors, too."""
    group = same()
    made = []
    for _ in range(2):  # weight_norm cannot be copied
        torch.manual_seed(3)
        made.append(torch.nn.Sequential(Odd()))
    plain, model = made[0], ut.nn.parallelize(made[1], {"0": ut.nn.Shared()})
    x = torch.randn(2, 3, 4)
    for one in (plain, model):
        one(x).square().sum().backward()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, group.size * want.grad, **CLOSE, msg=name)
    leaves = {name: torch.ones_like(one, requires_grad=True) for name, one in model.named_parameters()}
    torch.func.functional_call(model, leaves, (x,)).sum().backward()
    shares = group.exchange([float(one.grad.sum()) for one in leaves.values()], "gradients of leaves")  # type: ignore[union-attr]
    assert all(one == shares[0] for one in shares)
    assert all(isinstance(one, torch.nn.Parameter) for one in model.parameters())
    return not any(
        name.startswith("_undertow_o") or name == "_undertow_calls" for one in model.modules() for name in vars(one)
    )


def clipped() -> list[float]:
    """Norms and gradients as of the whole model; the norms after."""
    same()
    plain = torch.nn.Sequential(torch.nn.Embedding(9, 4), Normed(), torch.nn.Linear(4, 9, bias=False))
    plain[2].weight = plain[0].weight
    plan = {**NORMED, "0": ut.nn.Vocabulary(), "2": ut.nn.Column(gather_output=True)}
    text, after = torch.randint(0, 9, (7,)), []
    for norm_type, most in ((2.0, 0.1), (1.0, 0.3), (float("inf"), 0.02), (2.0, 1e6)):
        one, model = copy.deepcopy(plain), ut.nn.parallelize(copy.deepcopy(plain), plan, strategy=STRATEGY)
        for each in (one, model):
            (30 * each(text)).square().mean().backward()
        want = torch.nn.utils.clip_grad_norm_(one.parameters(), most, norm_type)
        got = ut.nn.clip_grad_norm_(model, most, norm_type)
        torch.testing.assert_close(got, want, **CLOSE)
        _compare(one, model)
        after.append(float(ut.nn.clip_grad_norm_(model, most, norm_type)))
    dtype = plain[0].weight.dtype
    for rows, sparse in ((5, False), (5, True), (1, False), (1, True)):  # of one row some ranks have nothing
        bags = ut.nn.ShardedEmbeddingBag([ut.nn.Table("a", rows, 4)], dtype=dtype, sparse=sparse)
        bags(torch.tensor([0, rows - 1]), lengths=torch.tensor([2])).sum().backward()
        want = (8 if rows > 1 else 16) ** 0.5  # two rows of ones, the mean over ranks, or one of twos
        assert abs(float(ut.nn.clip_grad_norm_(bags, 1.0)) - want) < 1e-6
        assert abs(float(ut.nn.clip_grad_norm_(bags, 1.0)) - 1) < 1e-5
    return after
