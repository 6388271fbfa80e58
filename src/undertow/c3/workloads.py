"""What the characterisation runs: computations of four kinds, and collectives whose results are known exactly.

| computation | bound by | `memory`: part of the memory's bandwidth that it wants, for the model |
|---|---|---|
| gemm | arithmetic | 0.1 |
| attention | arithmetic, softmax between | 0.1 |
| thin gemm | memory: few rows, so that weights are read once for little work | 0.9 |
| stream | memory: a copy | 1.0 |

A collective's tensor is bf16 on a GPU and fp32 on a CPU: small integers, (i mod 5) + rank, whose sums every type holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from .. import collective as collectives
from ..errors import InvalidArgument
from ..fabric import share
from ..fabric.base import poison
from ..ops.produce import product_of
from ..ops.product import Product
from ..plan.plan import Share
from ..plan.problem import Problem
from ..plan.search import frames

if TYPE_CHECKING:
    from ..fabric.group import Group

Work = Callable[[], object]
COMPUTATIONS = {"gemm": 0.1, "thin gemm": 0.9, "attention": 0.1, "stream": 1.0}
COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
_PATTERN = 5


@dataclass(frozen=True, slots=True)
class Computation:
    """A kind of computing, ready to run; `memory` as in the module's table, `ctas` of its kernels (a guess)."""

    name: str
    memory: float
    ctas: int
    run: Work


def computation(name: str, group: Group, scale: float = 1.0) -> Computation:
    """One that takes about half a millisecond on a rank's part of a GPU (a CPU: milliseconds), times `scale`."""
    device, multiprocessors = group.device, group.fabric.multiprocessors
    if name not in COMPUTATIONS:
        raise InvalidArgument(argument="compute", was=repr(name), must=f"one of {', '.join(COMPUTATIONS)}")
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    part = multiprocessors / 132 if on_gpu else 1.0

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    if name == "gemm":
        rows = _blocks(16384 * part * scale, 256) if on_gpu else _blocks(512 * scale, 64)
        width = 4096 if on_gpu else 512
        x, w, y = ones(rows, width), ones(width, width), ones(rows, width)
        bounded = _bounded_gemm(group, x, w, y) if on_gpu else None

        def gemm() -> None:
            if bounded is not None and share.bound() is not None:
                bounded()
            else:
                torch.mm(x, w, out=y)

        return Computation(name, COMPUTATIONS[name], rows // 128 * (width // 256), gemm)
    if name == "thin gemm":
        width, rows = (8192, 32) if on_gpu else (1024, 4)
        count = max(1, round(24 * part * scale)) if on_gpu else max(1, round(8 * scale))
        thin, many = ones(rows, width), [ones(width, width) for _ in range(count)]
        outs = [ones(rows, width) for _ in range(count)]

        def thin_gemms() -> None:
            for weight, out in zip(many, outs, strict=True):
                torch.mm(thin, weight, out=out)

        return Computation(name, COMPUTATIONS[name], width // 64, thin_gemms)
    if name == "attention":
        heads = max(1, round(64 * part * scale)) if on_gpu else max(1, round(4 * scale))
        length, extent = (4096, 128) if on_gpu else (256, 64)
        q = ones(1, heads, length, extent)
        k, v = q.clone(), q.clone()
        attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        return Computation(name, COMPUTATIONS[name], heads * length // 128, attend)
    size = _blocks((1 << 30) * part * scale, 1 << 20) if on_gpu else _blocks((8 << 20) * scale, 1 << 16)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    copy = torch.zeros_like(source)
    if not on_gpu:
        return Computation(name, COMPUTATIONS[name], 1, lambda: copy.copy_(source))
    from ..kernels import move

    # A persistent grid, as a user's own kernel may have: it asks how much of the device it may fill.
    run = lambda: move.copy(copy, source, share.bound() or multiprocessors)  # noqa: E731
    return Computation(name, COMPUTATIONS[name], multiprocessors, run)


def _bounded_gemm(group: Group, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Work:
    """Undertow's own persistent matmul, on exactly as many SMs as `share.bound` says."""
    problem = Problem.of(
        "matmul_all_reduce", x.shape[0], w.shape[1], x.shape[1], dtype="bfloat16", ranks=group.size, device="cuda",
        multiprocessors=group.fabric.multiprocessors,
    )  # fmt: skip
    plan = replace(frames(problem, "net")[0], layout="natural")
    products: dict[int, Product] = {}

    def run() -> None:
        count = share.bound()
        assert count is not None
        if count not in products:
            bounded = replace(plan, share=Share(multiprocessors=count))
            products[count] = product_of(group.fabric, problem, bounded, x, w, y.view(-1), None)
        products[count].prepare()
        products[count].start()

    return run


def repeated(work: Work, times: int) -> Work:
    """The same several times, one after the other."""

    def run() -> None:
        for _ in range(times):
            work()

    return run


def _blocks(amount: float, block: int) -> int:
    return max(1, round(amount / block)) * block


class Exchange:
    """One collective on `nbytes` of a rank's longest tensor: of all_gather its result, of the others its input."""

    def __init__(self, name: str, nbytes: int, group: Group) -> None:
        if name not in COLLECTIVES:
            raise InvalidArgument(argument="collective", was=repr(name), must=f"one of {', '.join(COLLECTIVES)}")
        self.name, self.group = name, group
        dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
        size = group.size
        self._count = max(1, nbytes // dtype.itemsize // size)  # elements of a rank's part
        self.nbytes = self._count * size * dtype.itemsize
        short, long = self._count, self._count * size
        given, result = {"all_gather": (short, long), "reduce_scatter": (long, short)}.get(name, (long, long))
        self.source = torch.empty(given, dtype=dtype, device=group.device)
        self.out = torch.empty(result, dtype=dtype, device=group.device)
        self.fill()

    @property
    def moved(self) -> float:
        """Bytes that each rank sends, as in `plan.predict`."""
        size = self.group.size
        return (2 if self.name == "all_reduce" else 1) * (size - 1) / size * self.nbytes

    def __call__(self) -> torch.Tensor:
        call: Callable[..., torch.Tensor] = getattr(collectives, self.name)
        return call(self.source, out=self.out, group=self.group)

    def fill(self) -> None:
        """This rank's input; the output is poisoned."""
        self.source.copy_(self._input(self.group.rank, 0, self.source.numel()))
        poison(self.out)

    def wrong(self) -> int:
        """How many elements are not what they must be. Waits for the device."""
        return int((self.out != self._expected()).sum())

    def _input(self, rank: int, start: int, count: int) -> torch.Tensor:
        places = torch.arange(start, start + count, device=self.group.device, dtype=torch.int32)
        return places.remainder_(_PATTERN).add_(rank).to(self.source.dtype)

    def _expected(self) -> torch.Tensor:
        size, rank, count = self.group.size, self.group.rank, self._count
        if self.name == "all_gather":
            return torch.cat([self._input(one, 0, count) for one in range(size)])
        if self.name == "all_to_all":
            return torch.cat([self._input(one, rank * count, count) for one in range(size)])
        start, length = (rank * count, count) if self.name == "reduce_scatter" else (0, size * count)
        total = self._input(0, start, length)
        for one in range(1, size):
            total += self._input(one, start, length)
        return total
