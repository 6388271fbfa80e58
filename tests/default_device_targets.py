"""Rank functions of scripts that tell torch where new tensors go, and of which type: the library must not notice."""

from __future__ import annotations

import torch

import undertow as ut
from undertow import collective as co

HERE = {"device": "cpu"}
GRAINS, LANES = ("serial", "chunked", "signaled", "fused"), ("net", "peer", "dma")


def nothing_follows_torchs_defaults() -> bool:
    """New tensors hold nothing (`meta`) and are of 64 bits unless said otherwise, from before `init` until behind
    `shutdown`: whatever the library made without saying would be unusable, and seen."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    group = ut.init()
    _matmuls(group)
    _collectives(group)
    _embedding(group)
    _layers(group)
    tensor = torch.ones(9, **HERE)
    for share in ("auto", "auto", "auto", "dma"):
        ut.concurrent(lambda: torch.ones(2, **HERE), lambda: co.all_reduce(tensor), share=share)
    assert bool((tensor == group.size**4).all())
    ut.shutdown()
    return torch.empty(0).device.type == "meta"


def _matmuls(group: ut.Group) -> None:
    rows = [5, 4, 3][: group.size]
    x, w = torch.ones(sum(rows), 6, **HERE), torch.ones(6, 7, **HERE)
    summed, plain = torch.full((sum(rows), 7), 6.0 * group.size, **HERE), torch.full((sum(rows), 7), 6.0, **HERE)
    mine = rows[group.rank]
    for strategy in ("auto", *(f"{grain}:{lane}" for grain in GRAINS for lane in LANES)):
        given, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = ut.matmul_all_reduce(given, weight, strategy=strategy)
        assert torch.equal(y.detach(), summed)
        z = ut.matmul_reduce_scatter(given, weight, strategy=strategy)
        assert torch.equal(z.detach(), summed.tensor_split(group.size)[group.rank])
        part = given.tensor_split(group.size)[group.rank]
        assert torch.equal(ut.all_gather_matmul(part, weight, rows=rows, strategy=strategy).detach(), plain)
        assert ut.matmul_all_to_all(given, weight, rows, strategy=strategy).shape == (mine * group.size, 7)
        (y.sum() + z.sum()).backward()
        assert given.grad is not None and bool(given.grad.any())
        assert weight.grad is not None and bool(weight.grad.any())


def _collectives(group: ut.Group) -> None:
    assert bool((co.all_reduce(torch.ones(9, **HERE)) == group.size).all())
    assert co.all_gather(torch.ones(9, **HERE)).shape == (9 * group.size,)
    assert bool((co.reduce_scatter(torch.ones(6 * group.size, **HERE)) == group.size).all())


def _embedding(group: ut.Group) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        layer = ut.nn.ShardedEmbeddingBag([ut.nn.Table("a", 9, 4), ut.nn.Table("b", 5, 4)], dtype=dtype)
        values, lengths = torch.tensor([1, 2, 3, 4], **HERE), torch.tensor([1, 0, 2, 1], **HERE)
        y = layer(values, lengths=lengths)
        assert y.device.type == "cpu"
        y.sum().backward()


def _layers(group: ut.Group) -> None:
    model = torch.nn.Sequential(
        torch.nn.Embedding(8, 6, **HERE), torch.nn.Linear(6, 9, **HERE), torch.nn.Linear(9, 6, **HERE),
        torch.nn.Linear(6, 8, **HERE),
    )  # fmt: skip
    plan = {"0": ut.nn.Vocabulary(), "1": ut.nn.Column(), "2": ut.nn.Row(), "3": ut.nn.Column()}
    ut.nn.parallelize(model, plan)
    logits = model(torch.tensor([1, 2, 7], **HERE))
    ut.nn.cross_entropy(logits, torch.tensor([2, 7, 1], **HERE), 8).backward()
    assert all(one.grad is not None for one in model.parameters())
    assert all(one.device.type == "cpu" for one in ut.nn.full_state_dict(model).values())
    experts = ut.nn.ExpertParallelMLP(6, 5, experts=2 * group.size, top_k=2, **HERE)
    assert experts(torch.ones(3, 6, **HERE)).shape == (3, 6)
