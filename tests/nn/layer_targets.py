"""Rank functions for undertow.nn: layers against the same layers without ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import undertow as ut
from undertow.errors import UndertowError
from undertow.nn.sharded import Cut

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
STRATEGY = "chunked:peer"


def same(seed: int = 0) -> ut.Group:
    """The same random numbers on all ranks, new tensors where the group computes; on a GPU in fp32."""
    group = ut.init()
    torch.set_default_dtype(torch.float64)
    if group.device.type == "cuda":
        torch.set_default_device(group.device)
        torch.set_default_dtype(torch.float32)
        CLOSE.update(rtol=1e-4, atol=1e-4)
    torch.manual_seed(seed)
    return group


def linears(sequence_parallel: bool) -> bool:
    """Columns into rows, with bias, uneven widths: outputs and all gradients as of two ordinary layers."""
    group = same()
    first, second = torch.nn.Linear(6, 11), torch.nn.Linear(11, 7)
    column = ut.nn.ColumnParallelLinear.from_linear(first, sequence_parallel=sequence_parallel, strategy=STRATEGY)
    row = ut.nn.RowParallelLinear.from_linear(second, sequence_parallel=sequence_parallel, strategy=STRATEGY)
    x = torch.randn(5, 3, 6)
    whole = x.clone().requires_grad_()
    want = second(torch.tanh(first(whole)))
    weight = torch.randn_like(want)
    (want * weight).sum().backward()

    rows = [len(one) for one in x.tensor_split(group.size)]
    part = (x.tensor_split(group.size)[group.rank] if sequence_parallel else x).clone().requires_grad_()
    got = row(torch.tanh(column(part, rows) if sequence_parallel else column(part)))  # type: ignore[arg-type]
    mine = (lambda full: full.tensor_split(group.size)[group.rank]) if sequence_parallel else (lambda full: full)
    torch.testing.assert_close(got, mine(want.detach()), **CLOSE)
    (got * mine(weight)).sum().backward()
    torch.testing.assert_close(part.grad, mine(whole.grad), **CLOSE)
    for layer, linear in ((column, first), (row, second)):
        cut = layer.cuts["weight"]
        torch.testing.assert_close(layer.weight.grad, cut.take(linear.weight.grad, group.rank), **CLOSE)
    torch.testing.assert_close(column.bias.grad, column.cuts["bias"].take(first.bias.grad, group.rank), **CLOSE)
    torch.testing.assert_close(row.bias.grad, second.bias.grad, **CLOSE)
    return True


def several_weights() -> bool:
    """Queries, keys and values as one weight: heads stay whole, the result is three tensors."""
    group = same()
    sizes, unit = (24, 12, 12), (8, 4, 4)  # 3 groups of heads: one rank has two of them
    layer = ut.nn.ColumnParallelLinear(5, sizes, unit=unit, strategy=STRATEGY)
    plain = torch.nn.Linear(5, sum(sizes))
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(4, 5)
    got = layer(x)
    starts = (0, 24, 36)
    for part, (size, step, start) in enumerate(zip(sizes, unit, starts, strict=True)):
        heads = torch.split(plain(x)[:, start : start + size], step, 1)
        mine = [heads[index] for index in range(3) if (index < 2) == (group.rank == 0)]
        torch.testing.assert_close(got[part], torch.cat(mine, 1), **CLOSE)
    gathered = ut.nn.ColumnParallelLinear(5, sizes, unit=unit, gather_output=True, strategy=STRATEGY)
    gathered.load_state_dict(plain.state_dict())
    y = torch.cat(gathered(x), 1)
    torch.testing.assert_close(y, plain(x), **CLOSE)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (plain(x) * weight).sum().backward()
    want = gathered.cuts["weight"].take(plain.weight.grad, group.rank)
    torch.testing.assert_close(gathered.weight.grad, want, **CLOSE)
    return True


def attention(sequence_parallel: bool) -> bool:
    """Three groups of two heads of queries and one of keys and values, over ranks that they do not divide by."""
    group = same()
    hidden, heads, kv_heads, width, length = 10, 6, 3, 4, 5
    plain = torch.nn.Linear(hidden, (heads + 2 * kv_heads) * width), torch.nn.Linear(heads * width, hidden)
    options = {"bias": True, "out_bias": True, "sequence_parallel": sequence_parallel, "strategy": STRATEGY}
    block = ut.nn.AttentionProjections(hidden, heads, kv_heads, width, **options)  # type: ignore[arg-type]
    block.qkv.load_state_dict(plain[0].state_dict())
    block.out.load_state_dict(plain[1].state_dict())

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.permute(1, 2, 0, 3) for one in (q, k, v))  # [batch, heads, length, width]
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.permute(2, 0, 1, 3)

    x = torch.randn(length, 2, hidden)
    whole = x.clone().requires_grad_()
    sizes = [heads * width, kv_heads * width, kv_heads * width]
    parts = [one.unflatten(-1, (-1, width)) for one in torch.split(plain[0](whole), sizes, -1)]
    want = plain[1](attend(*parts).flatten(-2))
    weight = torch.randn_like(want)
    (want * weight).sum().backward()
    rows = [length - group.size + 1, *[1] * (group.size - 1)]  # not as they would be cut
    mine = (lambda full: torch.split(full, rows)[group.rank]) if sequence_parallel else (lambda full: full)
    part = mine(x).clone().requires_grad_()
    got = block(part, attend, rows if sequence_parallel else None)
    torch.testing.assert_close(got, mine(want.detach()), **CLOSE)
    (got * mine(weight)).sum().backward()
    torch.testing.assert_close(part.grad, mine(whole.grad), **CLOSE)
    for layer, linear in ((block.qkv, plain[0]), (block.out, plain[1])):
        cut = layer.cuts["weight"]
        torch.testing.assert_close(layer.weight.grad, cut.take(linear.weight.grad, group.rank), **CLOSE)
    return True


def mlp(sequence_parallel: bool, gated: bool) -> bool:
    group = same()
    block = ut.nn.TensorParallelMLP(6, 10, gated=gated, sequence_parallel=sequence_parallel, strategy=STRATEGY)
    whole = ut.nn.full_state_dict(block)
    x = torch.randn(6, 6)
    up, down = whole["up.weight"], whole["down.weight"]
    hidden = torch.nn.functional.silu(x @ up[:10].t())
    want = (hidden * (x @ up[10:].t()) if gated else hidden) @ down.t()
    got = block(x.tensor_split(group.size)[group.rank] if sequence_parallel else x)
    torch.testing.assert_close(got, want.tensor_split(group.size)[group.rank] if sequence_parallel else want, **CLOSE)
    return True


def experts() -> bool:
    """Against the plain loop over tokens and experts, gradients too; some experts get nothing."""
    group = same()
    layer = ut.nn.ExpertParallelMLP(6, 5, experts=6, top_k=2, strategy=STRATEGY)
    with torch.no_grad():
        layer.router[3] = -layer.router[0]
    state = ut.nn.full_state_dict(layer)
    everyones = [torch.randn(7 - 3 * rank, 6) for rank in range(group.size)]
    names = ("router", "gate_up", "down")
    leaves = {name: state[name].detach().clone().requires_grad_() for name in names}
    xs = [one.clone().requires_grad_() for one in everyones]
    losses, wants = [], []
    for x in xs:
        rows = []
        for token in x:
            best, chosen = torch.softmax(leaves["router"] @ token, 0).topk(2)
            best = best / best.sum()
            total = torch.zeros(6)
            for share, expert in zip(best, chosen.tolist(), strict=True):
                gate, up = (leaves["gate_up"][expert] @ token).chunk(2)
                total = total + share * (leaves["down"][expert] @ (torch.nn.functional.silu(gate) * up))
            rows.append(total)
        wants.append(torch.stack(rows))
        losses.append(torch.sin(wants[-1]).sum())
    sum(losses).backward()  # type: ignore[union-attr]
    mine = everyones[group.rank].clone().requires_grad_()
    y = layer(mine)
    near = {name: max(1e-6, error) for name, error in CLOSE.items()}  # the router's softmax is fp32
    torch.testing.assert_close(y, wants[group.rank].detach(), **near)
    torch.sin(y).sum().backward()
    loose = {**near, "rtol": 10 * near["rtol"]}
    torch.testing.assert_close(mine.grad, xs[group.rank].grad, **loose)
    for name in ("gate_up", "down"):
        want = layer.cuts[name].take(leaves[name].grad, group.rank)
        torch.testing.assert_close(getattr(layer, name).grad, want, **loose)
    assert layer.router.grad is not None
    router = sum(torch.tensor(one) for one in group.exchange(layer.router.grad.tolist(), "router"))
    torch.testing.assert_close(router, leaves["router"].grad, **loose)
    return True


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.norm = torch.nn.LayerNorm(6)
        self.inner_in = torch.nn.Linear(6, 12)
        self.inner_out = torch.nn.Linear(12, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner_out(torch.tanh(self.inner_in(self.norm(x))))


PLAN = {"*.inner_in": ut.nn.Column(unit="head_dim"), "*inner_out": ut.nn.Row(unit="head_dim")}


def _cloned(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """A hook of a state that puts others in the place of its tensors."""
    for name in state:
        state[name] = state[name].clone()


def checkpoints() -> bool:
    """Whole to shards and back, shard to shard, and copies that live on."""
    group = same()
    plain = torch.nn.Sequential(Block(), Block())
    whole = {name: one.clone() for name, one in plain.state_dict().items()}
    model = ut.nn.parallelize(copy.deepcopy(plain), PLAN, strategy=STRATEGY)
    assert model.state_dict().keys() == whole.keys()
    assert model[0].inner_in.weight.shape[0] == (8 if group.rank == 0 else 4)
    x = torch.randn(3, 6)
    torch.testing.assert_close(model(x), plain(x), **CLOSE)
    torch.testing.assert_close(copy.deepcopy(model)(x), plain(x), **CLOSE)

    other = {name: torch.randn_like(one) for name, one in whole.items()}
    model.load_state_dict(other)
    plain.load_state_dict(other)
    torch.testing.assert_close(model(x), plain(x), **CLOSE)
    again = ut.nn.full_state_dict(model)
    assert all(torch.equal(again[name], other[name]) for name in other)
    shards = {name: one.clone() for name, one in model.state_dict().items()}
    model.load_state_dict(whole)
    model.load_state_dict(shards)
    torch.testing.assert_close(model(x), plain(x), **CLOSE)

    again = ut.nn.full_state_dict(torch.nn.Sequential(checkpoint_wrapper(model[0]), model[1]))
    assert again.keys() == other.keys()
    assert all(torch.equal(again[name], other[name]) for name in other)
    twice = ut.nn.full_state_dict(torch.nn.ModuleDict({"one": model[0], "other": model[0]}))
    assert all(torch.equal(twice[f"{name}.inner_in.weight"], other["0.inner_in.weight"]) for name in ("one", "other"))

    model[0].register_state_dict_post_hook(_cloned)
    again = ut.nn.full_state_dict(model)
    assert all(torch.equal(again[name], other[name]) for name in other)

    mesh = init_device_mesh("cpu", (group.size,))
    placed = {
        name: distribute_tensor(one, mesh, [Shard(0)]) if "inner" in name and "weight" in name else one
        for name, one in whole.items()
    }
    model.load_state_dict(placed)
    plain.load_state_dict(whole)
    torch.testing.assert_close(model(x), plain(x), **CLOSE)
    return True


def dtensors() -> bool:
    """In and out as DTensors: the same numbers, and placements that follow."""
    group = same()
    mesh = init_device_mesh("cpu", (group.size,))
    first, second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)
    x = torch.randn(4, 6)
    want = second(first(x))
    for sequence_parallel, placement in ((False, Replicate()), (True, Shard(0))):
        options = {"sequence_parallel": sequence_parallel, "strategy": STRATEGY}
        column = ut.nn.ColumnParallelLinear.from_linear(first, **options)  # type: ignore[arg-type]
        row = ut.nn.RowParallelLinear.from_linear(second, **options)  # type: ignore[arg-type]
        given = distribute_tensor(x, mesh, [placement])
        between = column(given)
        assert isinstance(between, DTensor)
        assert between.placements == (Shard(1),)
        y = row(between)
        assert isinstance(y, DTensor)
        assert y.placements == (placement,)
        torch.testing.assert_close(y.full_tensor(), want, **CLOSE)
        several = ut.nn.ColumnParallelLinear(6, (4, 4), **options)  # type: ignore[arg-type]
        several.load_state_dict(first.state_dict())
        for part, wanted in zip(several(given), torch.split(first(x), 4, -1), strict=True):
            assert isinstance(part, DTensor)
            assert part.placements == (Shard(1),)
            torch.testing.assert_close(part.full_tensor(), wanted, **CLOSE)
    return True


def compiled() -> bool:
    """A block of layers is one graph, forward and backward."""
    group = same()
    block = ut.nn.TensorParallelMLP(6, 8, sequence_parallel=True, strategy=STRATEGY)
    graph = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 6) + group.rank
    found = []
    for function in (block, graph):
        given = x.clone().requires_grad_()
        y = function(given)
        y.square().sum().backward()
        found.append((y.detach(), given.grad, block.up.weight.grad.clone()))
        block.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    return True


def refusals() -> dict[str, str]:
    same()
    tied = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8, bias=False))
    tied[1].weight = tied[0].weight
    calls: dict[str, Callable[[], object]] = {
        "too narrow": lambda: ut.nn.ColumnParallelLinear(4, 1),
        "heads": lambda: ut.nn.parallelize(torch.nn.Sequential(Block()), {"*.inner_in": ut.nn.Column(unit=5)}),
        "one head": lambda: ut.nn.parallelize(torch.nn.Sequential(Block()), {"*.inner_out": ut.nn.Row(unit=12)}),
        "experts": lambda: ut.nn.ExpertParallelMLP(4, 4, experts=3),
        "nothing": lambda: ut.nn.parallelize(Block(), {"*.q_proj": ut.nn.Column()}),
        "no linear": lambda: ut.nn.parallelize(torch.nn.Sequential(Block()), {"*norm": ut.nn.Column()}),
        "tied": lambda: ut.nn.parallelize(tied, {"1": ut.nn.Column()}),
        "attribute": lambda: ut.nn.parallelize(torch.nn.Sequential(Block()), {"*_in": ut.nn.Column(unit="heads")}),
        "all heads": lambda: ut.nn.parallelize(
            torch.nn.Sequential(Block()), {"*.norm": ut.nn.Shared(unit="head_dim")}
        ),
        "fp8": lambda: ut.nn.RowParallelLinear(8, 8, dtype=torch.float8_e4m3fn),
        "placements": lambda: ut.nn.RowParallelLinear(4, 4)(
            distribute_tensor(torch.ones(2, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        ),
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        try:
            call()
        except UndertowError as error:
            found[name] = str(error)
    return found


def attention_refusals() -> list[str]:
    same()
    said = []
    for given in ((8, 3, 2), (9, 4, None), (8, 4, 1)):
        try:
            ut.nn.AttentionProjections(*given)
            said.append("nothing")
        except UndertowError as error:
            said.append(str(error))
    try:
        ut.nn.AttentionProjections(8, 4)(torch.ones(3, 8), lambda q, k, v: q.flatten(-2))
    except UndertowError as error:
        said.append(str(error))
    return said


def no_symmetric_memory() -> str:
    """Ranks that share no memory, as on two machines: the refusal names a lane that works, and auto finds it."""
    os.environ["UNDERTOW_NODE"] = f"node {os.environ['RANK']}"
    group = same()
    layer = ut.nn.RowParallelLinear(4, 4, strategy="signaled:peer")
    try:
        layer(torch.ones(2, 2))
        return "not refused"
    except UndertowError as error:
        said = str(error)
    layer.strategy = "serial:net"
    assert layer(torch.ones(2, 2)).shape == (2, 4)
    assert group.size == 2
    return said


def cuts_come_together(parts: Sequence[int], units: Sequence[int], ranks: int) -> bool:
    cut = Cut.of("sizes", 1, parts, units, ranks)
    whole = torch.arange(3 * sum(parts)).view(3, -1)
    return torch.equal(cut.join([cut.take(whole, rank) for rank in range(ranks)]), whole)
