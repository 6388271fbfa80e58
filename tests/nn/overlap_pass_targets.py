"""Rank functions for the compiler's pass: graphs of matmuls and torch's functional collectives, before and after."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx.experimental.proxy_tensor import make_fx

import undertow as ut
from undertow.ops import library

STRATEGY = "chunked:peer"
Tensors = tuple[torch.Tensor, ...]
OURS = {
    library.all_gather_matmuls._opoverload: "gather",
    library.matmul_reduce_scatter._opoverload: "scatter",
    library.matmul_all_reduce._opoverload: "reduce",
}


_used: list[dist.ProcessGroup] = []  # by the collectives below


def _process_group(group: ut.Group) -> dist.ProcessGroup:
    """All ranks. Several that share a GPU have no other backend there."""
    if group.device.type == "cpu":
        return group.process_group
    import undertow.torch_backend  # registers it

    found = dist.new_group(backend=undertow.torch_backend.NAME)
    assert isinstance(found, dist.ProcessGroup)
    return found


def _gather(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return funcol.all_gather_tensor(x, dim, _used[0])


def _scatter(x: torch.Tensor, dim: int = 0, how: str = "sum") -> torch.Tensor:
    return funcol.reduce_scatter_tensor(x, how, dim, _used[0])


def _reduce(x: torch.Tensor, how: str = "sum") -> torch.Tensor:
    return funcol.all_reduce(x, how, _used[0])


def _dtype(group: ut.Group) -> torch.dtype:
    return torch.float64 if group.device.type == "cpu" else torch.float32


def _early(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Used before the matmul that could bring it, and by one whose weight is made of a result in between."""
    rows = _gather(x)
    seen = rows.t() @ rows
    made = torch.relu(rows.sum() + v)
    return seen, rows @ w.t(), rows @ made


def _in_between(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """One product alone, and the sum of all, twice."""
    one, two = _scatter(x @ w), _scatter(x @ v)
    both = one + two
    return both + both, _scatter(x @ w + (x @ v) + (x + x) @ w)


def _apart(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Sums of which another needs a part."""
    one, two, product = _reduce(x @ w), _reduce(x @ v), x @ w
    return one + two, two, _reduce(product) + product


def _reversed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Pieces put together the other way round."""
    first, second = _gather(x).chunk(2)
    return torch.cat([second, first], 1).flatten(0, 1) @ w


def _changed_weight(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """A weight that is changed before the place where the pass would read it: later, and earlier."""
    rows, given = x.clone(), w.clone()
    total = rows @ given
    given.add_(1)
    summed = _reduce(total)
    gathered = _gather(rows)
    seen = torch.relu(gathered)
    given.add_(1)
    return summed, seen, gathered @ given.t().t()


def _changed_shard(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    given = x.clone()
    rows = _gather(given)
    given.zero_()
    return rows @ w


Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], dict[str, int]]
CASES: dict[str, Case] = {
    "rows": (lambda x, w: _gather(x) @ w, ((3, 4), (4, 5)), {"gather": 1}),
    "rows, a bias": (lambda x, w, b: torch.addmm(b, _gather(x), w), ((3, 4), (4, 5), (5,)), {"gather": 1}),
    "a bias of one column": (lambda x, w, b: torch.addmm(b, _gather(x), w), ((3, 4), (4, 5), (6, 1)), {}),
    "sequences": (lambda x, w: _gather(x, 1) @ w, ((3, 2, 4), (4, 5)), {"gather": 1}),
    "one sequence": (lambda x, w: _gather(x, 1) @ w, ((1, 2, 4), (4, 5)), {"gather": 1}),
    "four dimensions": (lambda x, w: _gather(x, 2) @ w, ((3, 2, 2, 4), (4, 5)), {"gather": 1}),
    "several": (
        lambda x, w, v: [(r := _gather(x, 1)) @ w, r @ v.t(), torch.relu(r)],
        ((3, 2, 4), (4, 5), (7, 4)),
        {"gather": 1},
    ),
    "used early": (_early, ((3, 4), (5, 4), (4, 2)), {"gather": 1}),
    "by itself": (lambda x: (r := _gather(x)) @ r.t(), ((3, 4),), {}),
    "as a weight": (lambda x, w: w @ _gather(x), ((2, 3), (5, 4)), {}),
    "by columns": (lambda x, w: _gather(x, 1) @ w, ((3, 4), (8, 5)), {}),
    "other way round": (_reversed, ((3, 2, 4), (4, 5)), {}),
    "nothing waits": (lambda x: _gather(x) * 2, ((3, 4),), {}),
    "scattered": (lambda x, w: _scatter(x @ w), ((6, 4), (4, 5)), {"scatter": 1}),
    "sequences scattered": (lambda x, w: _scatter(x @ w, 1), ((3, 4, 4), (4, 5)), {"scatter": 1}),
    "four dimensions scattered": (lambda x, w: _scatter(x @ w, 2), ((3, 2, 4, 4), (4, 5)), {"scatter": 1}),
    "columns scattered": (lambda x, w: _scatter(x @ w, 1), ((3, 4), (4, 6)), {}),
    "columns of several scattered": (lambda x, w: _scatter(x @ w, 2), ((3, 2, 4), (4, 6)), {}),
    "turned": (lambda x, w: _scatter((x @ w).t()), ((3, 4), (4, 6)), {}),
    "torn": (lambda x, w: _scatter((x @ w).view(6, 3)), ((3, 4), (4, 6)), {}),
    "sums in one": (_in_between, ((6, 4), (4, 5), (4, 5)), {"scatter": 2}),
    "sums apart": (_apart, ((6, 4), (4, 5), (4, 5)), {"reduce": 2}),
    "three sums": (
        lambda x, w, v: _reduce(x @ w) + (_reduce(x @ v) + _reduce(x @ w)),
        ((2, 3, 4), (4, 5), (4, 5)),
        {"reduce": 1},
    ),
    "one sum, twice": (lambda x, w: (s := _reduce(x @ w)) + s, ((6, 4), (4, 5)), {"reduce": 1}),
    "a product, twice": (lambda x, w: _reduce((s := x @ w) + s), ((6, 4), (4, 5)), {}),
    "broadcast": (lambda x, w, v: _reduce(x @ w) + _reduce(v @ w), ((6, 4), (4, 5), (1, 4)), {"reduce": 2}),
    "scaled": (lambda x, w: torch.add(_reduce(x @ w), _reduce(2 * x @ w), alpha=3), ((6, 4), (4, 5)), {"reduce": 2}),
    "a bias on each": (lambda x, w, b: _reduce(torch.addmm(b, x, w)), ((6, 4), (4, 5), (5,)), {}),
    "the largest": (lambda x, w: _reduce(x @ w, "max"), ((6, 4), (4, 5)), {}),
    "a mean": (lambda x, w: _scatter(x @ w, 0, "avg"), ((6, 4), (4, 5)), {}),
    "kept": (lambda x, w: [s := x @ w, _reduce(s)], ((6, 4), (4, 5)), {}),
    "both ways": (
        lambda x, w, v: _scatter(torch.relu(_gather(x, 1) @ w) @ v, 1),
        ((2, 3, 4), (4, 5), (5, 4)),
        {"gather": 1, "scatter": 1},
    ),
    "a weight that changes": (_changed_weight, ((6, 4), (4, 5)), {}),
    "a shard that changes": (_changed_shard, ((6, 4), (4, 5)), {}),
    "nobody wants it": (lambda x: [x + 1, _gather(x)][0], ((3, 4),), {}),
    "whole numbers": (lambda x, w: _reduce(x.long() @ w.long()), ((6, 4), (4, 5)), {}),
    "nothing of it": (lambda x, w: _gather(x) @ w, ((0, 4), (4, 5)), {"gather": 1}),
}


def graphs(mode: str) -> dict[str, dict[str, int]]:
    """Each with the pass and without gives the same, to the bit; what has become of its collectives."""
    group = ut.init()
    warnings.simplefilter("ignore", FutureWarning)  # names that newer versions of torch have besides
    found = {}
    _used[:] = [_process_group(group)]
    for name, (function, shapes, _) in CASES.items():
        if name == "whole numbers" and group.device.type == "cuda":  # torch multiplies none there
            continue
        chance = torch.Generator().manual_seed(7 + group.rank)
        given = [torch.randint(-3, 4, one, generator=chance).to(group.device, _dtype(group)) for one in shapes]
        graph = make_fx(lambda *given, function=function: function(*given), tracing_mode=mode)(*given)
        want = graph(*given)
        step = ut.nn.overlap_pass(_used[0], strategy=STRATEGY)
        before = sum("c10d" in str(node.target) for node in graph.graph.nodes)
        step(graph.graph)
        graph.recompile()
        for node in graph.graph.nodes:
            assert node.op != "call_function" or "val" in node.meta, f"{name}: {node}"
        got = graph(*given)
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
        ours = [OURS[node.target] for node in graph.graph.nodes if node.target in OURS]
        assert ours or before == sum("c10d" in str(node.target) for node in graph.graph.nodes), name
        assert bool(step.told), name
        found[name] = {one: ours.count(one) for one in dict.fromkeys(ours)}
    assert ut.nn.overlap_pass(strategy=STRATEGY).uuid() != ut.nn.overlap_pass().uuid()
    return found


class Attention(torch.nn.Module):
    """Heads of two numbers; what attends is left out."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(8, width, bias=bias) for width in (8, 4, 4))
        self.o = torch.nn.Linear(8, 8, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(q * torch.cat([k, v], -1).sigmoid())  # type: ignore[no-any-return]


class FeedForward(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(8, 12, bias=bias) for _ in range(2))
        self.down = torch.nn.Linear(12, 8, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Layer(torch.nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.first, self.second = torch.nn.RMSNorm(8), torch.nn.RMSNorm(8)
        self.attention, self.feed_forward = Attention(bias), FeedForward(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))  # type: ignore[no-any-return]


def _styles(sequence: bool) -> dict[str, Any]:
    """As guides to torch's tensor parallel have it: gathered once before projections that belong together."""
    if not sequence:
        return {
            **{f"attention.{one}": ColwiseParallel() for one in "qkv"}, "attention.o": RowwiseParallel(),
            **{f"feed_forward.{one}": ColwiseParallel() for one in ("gate", "up")},
            "feed_forward.down": RowwiseParallel(),
        }  # fmt: skip
    plan = _styles(False)
    for name in ("attention", "feed_forward"):
        plan[name] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for name in ("attention.o", "feed_forward.down"):
        plan[name] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),))
    return {"": whole, "first": SequenceParallel(), "second": SequenceParallel(), **plan}


def _compiler(step: Any, backend: str) -> dict[str, Any]:
    """torch's own compiler, or its tracer with this one pass behind."""
    if backend == "inductor":
        return {"options": {"post_grad_custom_pre_pass": step}}
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def compile_graph(graph: Any, _: object) -> Any:
        step(graph.graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    compilers = {"fw_compiler": compile_graph, "bw_compiler": compile_graph}
    return {"backend": aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)}


def layers(backend: str) -> dict[str, tuple[float, list[str]]]:
    """A layer forward and backward, with torch's collectives and with the pass: how far apart, and what is told."""
    group = ut.init()
    mesh = DeviceMesh.from_group(_process_group(group), group.device.type, mesh_dim_names=("tp",))
    found = {}
    for name, sequence, batch, bias in (
        ("sequence parallel", True, (2, 3), False),
        ("tensor parallel", False, (2, 6), False),
        ("biases", True, (1, 3), True),
    ):
        torch.manual_seed(1)
        layer = parallelize_module(Layer(bias).to(group.device, _dtype(group)), mesh["tp"], _styles(sequence))
        step = ut.nn.overlap_pass(mesh["tp"], strategy=STRATEGY)
        torch._dynamo.reset()
        compiled = torch.compile(layer, **_compiler(step, backend))
        chance = torch.Generator().manual_seed(group.rank if sequence else 0)
        x = torch.randn(*batch, 8, generator=chance).to(group.device, _dtype(group))
        results = []
        for function in (layer, compiled):
            given = x.clone().requires_grad_()
            layer.zero_grad()
            y = _local(function(given))
            (y * torch.linspace(1, 2, y.numel(), device=y.device).view(y.shape)).sum().backward()
            results.append([y.detach(), given.grad, *(_whole(one.grad) for one in layer.parameters())])
        apart = max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))
        found[name] = apart, step.told
    return found


def _local(one: torch.Tensor) -> torch.Tensor:
    return one.to_local() if isinstance(one, DTensor) else one


def _whole(one: Any) -> torch.Tensor:
    return one.full_tensor().clone() if isinstance(one, DTensor) else one.clone()  # type: ignore[no-any-return]
