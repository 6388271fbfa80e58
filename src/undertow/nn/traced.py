"""What stands around a collective in a graph of torch's compiler: who waits, which matmuls, what is between them.

Tensors of more than two dimensions are multiplied as matrices: views stand between a matmul and its neighbours. What is
gathered or scattered by another dimension than the first is cut by it and put together by the first, or the other way
round (`_rejoined`), since the functional collectives know the first one only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

_aten = torch.ops.aten
ITEM: Callable[..., Any] = operator.getitem
_collectives = torch.ops._c10d_functional
GATHER, SCATTER = _collectives.all_gather_into_tensor.default, _collectives.reduce_scatter_tensor.default
REDUCE, _WAIT = _collectives.all_reduce.default, _collectives.wait_tensor.default
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_CUTS = (_aten.split.Tensor, _aten.split_with_sizes.default, _aten.split.sizes)
_OF_FACTORS = (
    *_VIEWS, _aten.t.default, _aten.permute.default, _aten.transpose.int, _aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)  # fmt: skip
"""What a weight passes between a parameter and its matmul; it may as well happen earlier."""


class Alone(Exception):
    """Why a collective is left as it is."""


class Product(NamedTuple):
    """`node` is x @ w + bias."""

    node: Node
    x: Node
    w: Node
    bias: Node | None

    @property
    def factors(self) -> tuple[Node, ...]:
        """All but x."""
        return (self.w,) if self.bias is None else (self.w, self.bias)


class Summed(NamedTuple):
    """What one collective sums over ranks, or several of which only the sum is wanted: matmuls' results, added up.

    `end` is that sum. `nodes`: all that make it, matmuls included. `sizes`: of the sum before it leaves, where it is no
    matrix. `whole`: that sum's shape, and the dimension by which it is scattered.
    """

    end: Node
    products: list[Product]
    nodes: list[Node]
    sizes: Any
    shape: tuple[Any, ...]
    dim: int


class Gathered(NamedTuple):
    """`whole`: the gather of `shard` by dimension `dim`. `nodes`: from who waits to there."""

    shard: Node
    whole: Node
    dim: int
    nodes: list[Node]


class _Rejoined(NamedTuple):
    """A tensor that was cut into equal pieces by dimension `cut`, which `node` puts together again, in order, by `dim`.

    `nodes`: on the way. Nobody else uses the pieces.
    """

    source: Node
    cut: int
    dim: int
    pieces: int
    nodes: list[Node]


def value(node: Any) -> torch.Tensor:
    """What a tracer knows of a tensor."""
    found = node.meta["val"]
    assert isinstance(found, torch.Tensor)
    return found


def known(shape: Iterable[Any]) -> list[int]:
    found = list(shape)
    if not all(isinstance(one, int) for one in found):
        raise Alone(f"sizes {found} are not known when it is compiled.")
    return found


def sizes_of(shape: Iterable[Any]) -> list[int]:
    """To give a tensor this shape: one size may be left to what there is."""
    found = [one if isinstance(one, int) else -1 for one in shape]
    return found if found.count(-1) < 2 and (-1 not in found or 0 not in found) else known(shape)


def text(shape: Iterable[Any]) -> tuple[str, ...]:
    """To compare by. Nobody may ask whether sizes are equal that are only known when it runs: the answer would be held
    against every later call."""
    return tuple(map(str, shape))


def waiting(node: Node) -> Node:
    """Who waits for a collective."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not _WAIT:
        raise Alone("nobody waits for it, or several do.")
    return users[0]


# -- collectives -------------------------------------------------------------------------------------------------------


def gathered(node: Node, ranks: int) -> Gathered:
    """Of an all_gather."""
    wait, shard = waiting(node), node.args[0]
    assert isinstance(shard, Node)
    pieces = [piece for user in wait.users for piece in (user.users if user.target in _CUTS else (user,))]
    for cat in dict.fromkeys(user for piece in pieces for user in piece.users):
        found = _rejoined(cat)
        whole = found is not None and (found.source, found.cut, found.pieces) == (wait, 0, ranks)
        if found is not None and whole and wait.users.keys() <= set(found.nodes):
            return Gathered(shard, cat, found.dim, [wait, *found.nodes, cat])
    return Gathered(shard, wait, 0, [wait])


def summed(node: Node, ranks: int) -> Summed:
    """Of a reduce_scatter or an all_reduce, and of others whose results are added to its own: one will do for all."""
    found = _summed_by(node, ranks)
    while len(found.end.users) == 1:
        (add,) = found.end.users
        terms = _terms(add)
        if terms is None:
            break
        try:
            others = _all_summed(terms[1] if terms[0] is found.end else terms[0], node, ranks)
        except Alone:
            break
        if any((text(one.shape), one.dim) != (text(found.shape), found.dim) for one in others):
            break
        every = [found, *others]
        products = [product for one in every for product in one.products]
        found = found._replace(
            end=add, products=products, nodes=[step for one in every for step in (one.end, *one.nodes)]
        )
    if len({value(one.x).dtype for one in found.products}) > 1:
        raise Alone("matmuls of several types are added up.")
    return found


def _all_summed(term: Node, like: Node, ranks: int) -> list[Summed]:
    """Every collective as `like` in a term, which is the result of one, or of several, added up, and wanted once."""
    if len(term.users) != 1:
        raise Alone("others use it, too.")
    if term.target is _WAIT:
        node = term.args[0]
        if not isinstance(node, Node) or (node.target, node.args[1:]) != (like.target, like.args[1:]):
            raise Alone("it is another collective.")
        return [_summed_by(node, ranks)]
    terms = _terms(term)
    if terms is None:
        raise Alone("it is no sum.")
    found = [one for each in terms for one in _all_summed(each, like, ranks)]
    return [found[0]._replace(nodes=[*found[0].nodes, term]), *found[1:]]


def _summed_by(node: Node, ranks: int) -> Summed:
    wait, given = waiting(node), node.args[0]
    assert isinstance(given, Node)
    source, dim, between, takers = given, 0, [node], {node}
    cut = _rejoined(given) if node.target is SCATTER and len(given.users) == 1 else None
    if cut is not None and (cut.dim, cut.pieces) == (0, ranks):
        source, dim, between, takers = cut.source, cut.cut, [node, given, *cut.nodes], set(cut.nodes)
    if not source.users.keys() <= takers:
        raise Alone("others use what it sums, too.")
    products, nodes, sizes = _products_in(source)
    return Summed(wait, products, [*between, *nodes], sizes, tuple(value(source).shape), dim)


def _rejoined(node: Any) -> _Rejoined | None:
    if not isinstance(node, Node) or node.target is not _aten.cat.default:
        return None
    pieces: list[Any] = list(node.args[0])  # type: ignore[arg-type]
    cuts = [_cut(one) for one in pieces]
    if not cuts or cuts[0] is None:
        return None
    source, dim, _, by = cuts[0]
    size, rank = value(pieces[0]).shape[dim], value(source).dim()
    sizes = {text([value(one).shape[dim]]) for one in pieces}
    if not isinstance(size, int) or len(sizes) > 1 or any(len(one.users) > 1 for one in pieces):
        return None
    if cuts != [(source, dim, number * size, by) for number in range(len(pieces))]:
        return None
    if text([size * len(pieces)]) != text([value(source).shape[dim]]) or (
        by is not None and len(by.users) != len(pieces)
    ):
        return None
    joined = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(joined, int)
    between = [*([] if by is None else [by]), *pieces]
    return _Rejoined(source, dim % rank, joined % rank, len(pieces), between)


def _cut(piece: Any) -> tuple[Node, int, Any, Node | None] | None:
    """Of a piece of a tensor: the tensor, by which dimension it was cut, where the piece begins, who cut several."""
    if not isinstance(piece, Node):
        return None
    if piece.target is ITEM and isinstance(piece.args[0], Node) and piece.args[0].target in _CUTS:
        by, at = piece.args[0], piece.args[1]
        assert isinstance(at, int)
        source, sizes = by.args[:2]
        dim = by.args[2] if len(by.args) > 2 else by.kwargs.get("dim", 0)
        each = sizes if isinstance(sizes, (list, tuple)) else [sizes] * (at + 1)
        if not all(isinstance(one, int) for one in each):
            return None  # a size that is only known when it runs
        return source, dim, sum(each[:at]), by  # type: ignore[return-value]
    if piece.target is _aten.slice.Tensor:
        given: list[Any] = [*piece.args, *(None, 0, 0, None, 1)[len(piece.args) :]]
        source, dim, begin, _, step = given
        return (source, dim, begin or 0, None) if step == 1 else None
    return None


# -- matmuls -----------------------------------------------------------------------------------------------------------


def views_of(whole: Node) -> list[Node]:
    """Views of a tensor, and of these, that leave its last dimension as it is."""
    found = [one for one in whole.users if one.target in _VIEWS and _width(one) == _width(whole)]
    return [*found, *(view for one in found for view in views_of(one))]


def uses(whole: Node) -> list[Node]:
    """Who uses a tensor, or such a view of it."""
    views = views_of(whole)
    return [user for one in (whole, *views) for user in one.users if user not in views]


def products_of(whole: Node) -> Iterator[Product]:
    """The matmuls whose first factor a tensor is."""
    for x in (whole, *views_of(whole)):
        for user in x.users if value(x).dim() == 2 else ():
            product = _product(user)
            if product is not None and product.x is x and x not in product.factors:
                yield product


def _products_in(source: Node) -> tuple[list[Product], list[Node], Any]:
    """The matmuls that are added up, the nodes that make the sum of them, and its sizes where it is no matrix."""
    product = _product(source)
    if product is not None and product.bias is None:
        return [product], [source], None
    if product is not None:
        raise Alone("each rank adds a bias to its part of the sum.")
    inner: Sequence[Node] = _terms(source) or (source.all_input_nodes[:1] if source.target in _VIEWS else ())
    if not inner:
        raise Alone("no matmul makes what it sums.")
    if any(len(one.users) > 1 for one in inner):
        raise Alone("others use a part of what it sums, too.")
    if any(_width(one) != _width(source) for one in inner):
        raise Alone("rows of the product are torn apart.")
    found = [_products_in(one) for one in inner]
    sizes = source.args[1] if len(inner) == 1 else found[0][2]
    return [one for each in found for one in each[0]], [source, *(one for each in found for one in each[1])], sizes


def _terms(node: Node) -> tuple[Node, Node] | None:
    """Of a sum of two tensors of its shape and type."""
    if node.target is not _aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    if not isinstance(first, Node) or not isinstance(second, Node) or first is second:
        return None
    what = text(value(node).shape), value(node).dtype
    same = all((text(value(one).shape), value(one).dtype) == what for one in (first, second))
    return (first, second) if same else None


def _width(node: Node) -> tuple[str, ...]:
    return text(value(node).shape[-1:])


def _product(node: Any) -> Product | None:
    if not isinstance(node, Node) or node.kwargs:
        return None
    if node.target is _aten.mm.default:
        x, w = node.args
        return Product(node, x, w, None)  # type: ignore[arg-type]
    if node.target is _aten.addmm.default and value(node.args[0]).dim() == 1:
        bias, x, w = node.args
        return Product(node, x, w, bias)  # type: ignore[arg-type]
    return None


# -- order -------------------------------------------------------------------------------------------------------------


def bring_in_front(product: Product, first: Node, whole: Node) -> bool:
    """Have all factors but x before `first` in the graph, the first to use `whole`; whether that is possible."""
    place = {node: at for at, node in enumerate(first.graph.nodes)}

    def may(node: Node) -> bool:
        if node is whole:
            return False
        return place[node] < place[first] or (node.target in _OF_FACTORS and all(map(may, node.all_input_nodes)))

    def move(node: Node) -> None:
        if place[node] >= place[first]:
            for one in node.all_input_nodes:
                move(one)
            first.prepend(node)

    if not all(map(may, product.factors)) or _changed(product.factors, first, product.node):
        return False
    for one in product.factors:
        move(one)
    return True


def refuse_changes(nodes: Iterable[Node], earlier: Node, later: Node) -> None:
    """What is read `later` than it was must be what it was."""
    if _changed(nodes, earlier, later):
        raise Alone("what it takes is changed in place before it would be read.")


def _changed(nodes: Iterable[Node], earlier: Node, later: Node) -> bool:
    """Whether one of them, or what it is made of by views and copies, is changed in place between two others."""
    place = {node: at for at, node in enumerate(later.graph.nodes)}
    left = list(nodes)
    while left:
        node = left.pop()
        if any(place[earlier] <= place[user] < place[later] for user in node.users if _changes(user)):
            return True
        left += node.all_input_nodes if node.target in _OF_FACTORS else []
    return False


def _changes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def erase(nodes: Iterable[Node]) -> None:
    """Those of them that nobody uses, and then those that only these have used."""
    left = list(dict.fromkeys(nodes))
    while unused := [one for one in left if not one.users]:
        for one in unused:
            one.graph.erase_node(one)
            left.remove(one)
