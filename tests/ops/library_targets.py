"""Rank functions for the operators as torch knows them: tracing, checks, checkpointing, autocast, other dimensions."""

from __future__ import annotations

from collections.abc import Callable

import gradient_targets as gradients
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import undertow as ut
from undertow.errors import UndertowError
from undertow.ops import library

STRATEGY = "chunked:peer"
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACING = ("test_aot_dispatch_static", "test_aot_dispatch_dynamic")


def checked(whole: bool) -> list[str]:
    """torch's own checks of a custom operator: schema, shapes, gradient registration, and, as it takes long, tracing
    of both passes only for some unless the whole is asked for.
    """
    group = ut.init()

    def make(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.float64, requires_grad=True)

    x, w, bias = make(6, 4), make(4, 5), make(1, 5).detach().view(5).requires_grad_()
    dz = torch.randn(6, 5, dtype=torch.float64)
    rows, splits, both = [6] * group.size, [3] * 4, [True, True]
    plain_x, plain_w = x.detach(), w.detach()
    name = group.name
    # The gathered product of 2 ranks has 12 rows, and so has its gradient.
    cases = {
        library.matmul_all_reduce: (x, w, bias, name, STRATEGY, "", ""),
        library.replicated_matmul: (x, w, bias, name, STRATEGY),
        library.matmul_reduce_scatter: (x, w, bias, None, name, STRATEGY, "", ""),
        library.all_gather_matmul: (x, w, bias, rows, name, STRATEGY, ""),
        library.all_gather_matmul_whole: (x, w, bias, rows, name, STRATEGY, ""),
        library.matmul_all_to_all: (x, w, bias, splits, name, STRATEGY, ""),
        library.all_to_all_matmul: (x, w, bias, splits, name, STRATEGY),
        library.replicated_matmul_backward: (dz, plain_x, plain_w, both, name, STRATEGY),
        library.matmul_reduce_scatter_backward: (dz[:3], plain_x, plain_w, None, [*both, True], name, STRATEGY),
        library.all_gather_matmul_backward: (dz.repeat(2, 1), plain_x, plain_w, rows, both, name, STRATEGY),
        library.all_gather_matmul_whole_backward: (
            dz.repeat(2, 1),
            plain_x.repeat(2, 1),
            plain_x,
            plain_w,
            rows,
            both,
            name,
            STRATEGY,
        ),
        library.matmul_all_to_all_backward: (dz, plain_x, plain_w, splits, [*both, True], name, STRATEGY),
        library.all_to_all_matmul_backward: (dz, plain_x, plain_w, splits, both, name, STRATEGY),
    }
    for operator, arguments in cases.items():
        traced = whole or operator in (library.matmul_reduce_scatter, library.all_gather_matmul)
        checks = (*QUICK, *(TRACING if traced else ()))
        torch.library.opcheck(operator, arguments, test_utils=checks)
    return [operator._name for operator in cases]


def compiled(backend: str, names: list[str]) -> list[str]:
    """Each operator inside one graph, forward and backward, exact against the same without a compiler."""
    group = ut.init()
    shapes = (8, 6, 4)
    done = []
    for name in names:
        case = gradients.OPERATORS[name](group.size, *shapes, torch.Generator().manual_seed(1), torch.float64)
        parts = [gradients._mine(one, group.rank).detach().clone() for one in case.leaves]

        def model(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, case: gradients.Case = case) -> torch.Tensor:
            y = case.call(2 * x, w, bias=bias.view(-1), activation="relu", group=group, strategy=STRATEGY)
            return 3 * y + 1

        found = []
        torch._dynamo.reset()
        for function in (model, torch.compile(model, fullgraph=True, backend=backend)):
            own = [one.clone().requires_grad_() for one in parts]
            y = function(*own)
            y.sum().backward()
            found.append([y.detach(), *(one.grad for one in own)])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), name
        done.append(name)
        if name != "all_gather_matmul":  # one is enough: they share the way
            continue
        with torch.no_grad():
            assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(*parts), found[0][0]), name
    return done


def compiled_on_all_ranks() -> bool:
    """The group may be left out, or be a ProcessGroup: it is found when the graph is made."""
    group = ut.init()
    x, w = torch.ones(4, 3), torch.ones(3, 2)
    for given in (None, group.process_group, group):
        function = torch.compile(lambda x, w: ut.matmul_all_reduce(x, w, group=given), fullgraph=True, backend="eager")  # noqa: B023
        assert torch.equal(function(x, w), torch.full((4, 2), 3.0 * group.size))
        torch._dynamo.reset()
    return True


def checkpointed() -> bool:
    """Activation checkpointing runs the forward pass twice and changes nothing."""
    group = ut.init()
    torch.manual_seed(group.rank)
    w_column, w_row = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        hidden = ut.all_gather_matmul(x, w_column, activation="silu", strategy=STRATEGY)
        return ut.matmul_reduce_scatter(hidden, w_row, strategy=STRATEGY)

    found = []
    for reentrant in (None, False, True):
        y = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        found.append(torch.autograd.grad(y.sum(), (x, w_column, w_row)) if not reentrant else _backward(y, x, w_row))
    for one in found[1:]:
        assert torch.equal(one[0], found[0][0])
        assert torch.equal(one[-1], found[0][2])
    return True


def _backward(y: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """The reentrant form knows only backward()."""
    y.sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def under_autocast() -> list[str]:
    """Matmuls in bf16, gradients in the weight's own fp32; with gradients, without, and traced."""
    group = ut.init()
    x = torch.randn(6, 4).requires_grad_()
    w = torch.randn(4, 5).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = ut.matmul_all_reduce(x, w, strategy=STRATEGY)
        want = ut.matmul_all_reduce(x.detach().bfloat16(), w.detach().bfloat16(), strategy=STRATEGY)
        with torch.no_grad():
            assert torch.equal(ut.matmul_all_reduce(x, w, strategy=STRATEGY), want)
    assert torch.equal(y, want)
    y.float().sum().backward()
    assert group.size == 2
    return [str(one.dtype) for one in (y, x.grad, w.grad) if one is not None]


def other_dimension(wrap: str) -> float:
    """4 ranks as 2 x 2: sharded weights on one dimension, DDP or FSDP2 on the other. The largest error of a weight.

    Compared with the same steps on all of the data by one process, without any sharding.
    """
    ut.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    column, data = mesh["tensor"].get_local_rank(), mesh["data"].get_local_rank()
    group = ut.as_group(mesh["tensor"])
    torch.manual_seed(0)
    first, second = torch.randn(8, 12, dtype=torch.float64), torch.randn(12, 8, dtype=torch.float64)
    batches = torch.randn(2, 6, 8, dtype=torch.float64)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Parameter(first.tensor_split(2, 1)[column].clone())
            self.second = torch.nn.Parameter(second.tensor_split(2, 0)[column].clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(ut.all_gather_matmul(x, self.first, group=group, strategy=STRATEGY))
            return ut.matmul_reduce_scatter(hidden, self.second, group=group, strategy=STRATEGY)

    block = Block()
    module: Callable[..., torch.Tensor]
    if wrap == "DDP":
        module = DistributedDataParallel(block, process_group=mesh["data"].get_group())
    else:
        module = fully_shard(block, mesh=mesh["data"])
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    whole = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    for _ in range(3):
        optimizer.zero_grad()
        module(batches[data].tensor_split(2)[column]).square().sum().backward()
        optimizer.step()
        loss = (torch.tanh(batches @ whole[0]) @ whole[1]).square().sum() / 2  # the data dimension takes the mean
        gradients_of = torch.autograd.grad(loss, whole)
        whole = [(one - 0.01 * step).detach().requires_grad_() for one, step in zip(whole, gradients_of, strict=True)]
    wants = [whole[0].tensor_split(2, 1)[column], whole[1].tensor_split(2, 0)[column]]
    got = [getattr(one, "full_tensor", lambda one=one: one)() for one in (block.first, block.second)]
    return max(float((one - want).abs().max()) for one, want in zip(got, wants, strict=True))


def refusals() -> dict[str, str]:
    """What neither autograd nor a tracer can follow, and what is not there yet."""
    ut.init()
    x, w = torch.ones(6, 4, requires_grad=True), torch.ones(4, 5)
    norm = torch.nn.RMSNorm(5)
    low = torch.ones(6, 4).to(torch.float8_e4m3fn)
    calls: dict[str, Callable[[], object]] = {
        "out": lambda: ut.matmul_all_reduce(x, w, out=torch.empty(6, 5)),
        "norm": lambda: ut.matmul_all_reduce(x, w, norm=norm),
        "activation": lambda: ut.matmul_all_reduce(x, w, activation="tanh"),
        "rows": lambda: ut.matmul_reduce_scatter(x.detach(), w, rows=[1, 2]),
        "grain": lambda: ut.all_to_all_matmul(x.detach(), w, strategy="signaled"),
        "fp8": lambda: ut.matmul_all_reduce(low, low.t()),
        "splits": lambda: torch.compile(lambda: ut.matmul_all_to_all(x, w, [3, 3]), fullgraph=True, backend="eager")(),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except UndertowError as error:
            found[name] = str(error)
        except Exception as error:  # a tracer wraps what it meets
            found[name] = str(error)
    return found
