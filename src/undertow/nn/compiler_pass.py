"""A pass of torch's compiler: collectives joined with the matmuls that make, or take, what they move.

What torch.compile traces of a model that torch's own styles have parallelized (`parallelize_module`, DTensor) is a
graph of functional collectives and matmuls. In the forward pass as in the backward one

    all_gather -> mm with one weight or with several    becomes    all_gather_matmuls
    mm -> reduce_scatter of the sum                     becomes    matmul_reduce_scatter
    mm -> all_reduce of the sum                         becomes    matmul_all_reduce

whatever views stand between. Everything else is left as it is, and why is told (`OverlapPass.told`).

Operators gather and scatter rows rank by rank, as [R, P, Q]: P is what stands before the dimension that is gathered,
Q a rank's part of it and what stands behind, but for the last dimension. A tensor has them as [P, R, Q]. Where P is not
1 (several sequences, each in parts), a copy brings the result of a gather, or what is multiplied before a scatter, into
the other order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..errors import UndertowError
from ..fabric.logs import get_logger
from ..ops import library
from . import traced
from .sharded import check_strategy
from .traced import Alone

if TYPE_CHECKING:
    from ..fabric.group import Group

_aten = torch.ops.aten
_RESHAPE, _PERMUTE, _CAT = _aten.reshape.default, _aten.permute.default, _aten.cat.default


class OverlapPass(CustomGraphPass):
    """Of the collectives of one group. `told`: what became of each, in all graphs that were compiled."""

    def __init__(self, group: Group, strategy: str) -> None:
        check_strategy(strategy)
        self.told: list[str] = []
        self._name, self._size, self._strategy = group.name, group.size, strategy

    def uuid(self) -> str:
        """Compiled graphs are kept on disk by this, too."""
        said = repr((self._name, self._size, self._strategy)).encode()
        return hashlib.sha256(said + Path(__file__).read_bytes() + Path(traced.__file__).read_bytes()).hexdigest()

    def __call__(self, graph: Graph) -> None:
        ways = {traced.GATHER: self._gather, traced.SCATTER: self._scatter, traced.REDUCE: self._reduce}
        for node in list(graph.nodes):
            if node.target in ways and node.args[-1] == self._name and node in set(graph.nodes):  # not gone with others
                what = f"{node.name} of {list(traced.value(node.args[0]).shape)}"
                written = _Written(graph)
                try:
                    if node.target is not traced.GATHER and node.args[1] != "sum":
                        raise Alone(f"it is no sum but {node.args[1]}.")
                    found = ways[node.target](written, node)
                except (Alone, UndertowError) as reason:
                    written.take_back()
                    found = f"left as it is: {reason}"
                self.told.append(f"{what}: {found}")
                get_logger().info("%s", self.told[-1])
        graph.lint()

    def _gather(self, written: _Written, node: Node) -> str:
        graph, gathered = written.graph, traced.gathered(node, self._size)
        shape, whole = traced.value(gathered.whole).shape, gathered.whole
        order = _Order.of(shape, gathered.dim, self._size)
        if not whole.users:
            raise Alone("nobody uses what is gathered.")
        first = min(whole.users, key=list(graph.nodes).index)
        products = [one for one in traced.products_of(whole) if traced.bring_in_front(one, first, whole)]
        if not products:
            raise Alone("no matmul takes what is gathered.")
        traced.refuse_changes([gathered.shard], node, first)
        kept = len(products) < len(traced.uses(whole))
        with graph.inserting_before(first):
            rows = gathered.shard
            if len(shape) > 2:
                rows = written.call(_RESHAPE, rows, [-1, *traced.known(shape[-1:])])
            weights, biases = [one.w for one in products], [one.bias for one in products]
            how = kept, None, self._name, self._strategy
            made = written.call(library.all_gather_matmuls._opoverload, rows, weights, biases, *how)
            results = [order.natural(written, written.item(made, at)) for at in range(len(products) + kept)]
            if kept and len(shape) > 2:
                results[-1] = written.call(_RESHAPE, results[-1], traced.sizes_of(shape))
        for one, result in zip(products, results, strict=False):
            one.node.replace_all_uses_with(result)
        if kept:
            whole.replace_all_uses_with(results[-1])
        traced.erase([node, *gathered.nodes, *traced.views_of(whole), *(one.node for one in products)])
        matmuls = "1 matmul" if len(products) == 1 else f"{len(products)} matmuls"
        return f"one gather for {matmuls}{', rows kept' if kept else ''}."

    def _scatter(self, written: _Written, node: Node) -> str:
        found = traced.summed(node, self._size)
        shape = traced.value(found.end).shape
        order = _Order.of(found.shape, found.dim, self._size)
        with written.graph.inserting_before(found.end):
            x, w = _side_by_side(written, found.products, found.end)
            how = None, None, self._name, self._strategy, "", ""
            y = written.call(library.matmul_reduce_scatter._opoverload, order.by_rank(written, x), w, *how)
            result = y if len(shape) == 2 else written.call(_RESHAPE, y, traced.sizes_of(shape))
        return _put(found, result, "sent")

    def _reduce(self, written: _Written, node: Node) -> str:
        found = traced.summed(node, self._size)
        with written.graph.inserting_before(found.end):
            x, w = _side_by_side(written, found.products, found.end)
            how = None, self._name, self._strategy, "", ""
            result = written.call(library.matmul_all_reduce._opoverload, x, w, *how)
            if found.sizes is not None:
                result = written.call(_RESHAPE, result, found.sizes)
        return _put(found, result, "summed")


def _side_by_side(written: _Written, products: Sequence[traced.Product], end: Node) -> tuple[Node, Node]:
    """A sum of products as one: [x0 x1 ...] @ [w0; w1; ...]."""
    for one in products:
        traced.refuse_changes([one.x, one.w], one.node, end)
    if len(products) == 1:
        return products[0].x, products[0].w
    x = written.call(_CAT, [one.x for one in products], 1)
    return x, written.call(_CAT, [one.w for one in products], 0)


def _put(found: traced.Summed, result: Node, done: str) -> str:
    found.end.replace_all_uses_with(result)
    traced.erase([found.end, *found.nodes])
    several = f"{len(found.products)} products as one, " if len(found.products) > 1 else ""
    return f"{several}{done} beneath the matmul."


class _Written:
    """Nodes that were added to a graph, each with the shape that it makes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._nodes: list[Node] = []

    def call(self, target: Callable[..., Any], *arguments: Any) -> Node:
        """At the graph's place of insertion."""
        node = self.graph.call_function(target, arguments)
        self._nodes.append(node)
        node.meta["val"] = target(*map_arg(arguments, lambda one: one.meta["val"]))
        return node

    def item(self, node: Node, at: int) -> Node:
        return self.call(traced.ITEM, node, at)

    def take_back(self) -> None:
        for node in reversed(self._nodes):
            self.graph.erase_node(node)


class _Order(NamedTuple):
    """Rows [P, R, Q], of which a rank has [P, Q]. Where P is 1 nothing is in another order, and Q need not be known."""

    before: int
    ranks: int
    of_a_rank: int

    @staticmethod
    def of(whole: Iterable[Any], dim: int, ranks: int) -> _Order:
        """Of a tensor of this shape that is gathered or scattered by `dim`."""
        shape = list(whole)
        if dim == len(shape) - 1:
            raise Alone("its last dimension moves, no rows.")
        before = math.prod(traced.known(shape[:dim]))
        return _Order(before, ranks, 0 if before == 1 else math.prod(traced.known(shape[dim:-1])) // ranks)

    def natural(self, written: _Written, rows: Node) -> Node:
        """[R, P, Q] -> [P, R, Q], each with its last dimension."""
        return self._turned(written, rows, (self.ranks, self.before))

    def by_rank(self, written: _Written, rows: Node) -> Node:
        """[P, R, Q] -> [R, P, Q], each with its last dimension."""
        return self._turned(written, rows, (self.before, self.ranks))

    def _turned(self, written: _Written, rows: Node, first: Sequence[int]) -> Node:
        if self.before == 1:
            return rows
        height, width = traced.known(traced.value(rows).shape)
        apart = written.call(_RESHAPE, rows, [*first, self.of_a_rank, width])
        return written.call(_RESHAPE, written.call(_PERMUTE, apart, [1, 0, 2, 3]), [height, width])
