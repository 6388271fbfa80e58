"""Rank functions for the tests of ShardedEmbeddingBag."""

from __future__ import annotations

from typing import Any

import torch

import undertow as ut
from undertow.errors import UndertowError
from undertow.nn import RowOptimizer, ShardedEmbeddingBag, Table, full_state_dict
from undertow.plan.bags import Piece

TABLES = [Table("ads", 40, 8, 3), Table("users", 400, 16, 1), Table("words", 9, 4, 6), Table("shops", 5, 12, 1)]


def features(rank: int, rows: int, weighted: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 5, (len(TABLES), rows), generator=generator)
    values = [torch.randint(0, one.rows, (int(lengths[k].sum()),), generator=generator) for k, one in enumerate(TABLES)]
    flat = torch.cat(values)
    weights = torch.randint(-1, 3, (len(flat),), generator=generator).double() if weighted else None
    return {"values": flat, "lengths": lengths.view(-1), "weights": weights}


def plain(tables: list[torch.Tensor], given: dict[str, Any], pooling: str) -> torch.Tensor:
    rows = given["lengths"].numel() // len(tables)
    per, first, found = given["lengths"].view(len(tables), rows), 0, []
    for number, table in enumerate(tables):
        last = first + int(per[number].sum())
        offsets = torch.nn.functional.pad(per[number].cumsum(0), (1, 0))
        weights = None if given["weights"] is None else given["weights"][first:last]
        found.append(torch.nn.functional.embedding_bag(
            given["values"][first:last], table, offsets, mode=pooling, include_last_offset=True,
            per_sample_weights=weights))  # fmt: skip
        first = last
    return torch.cat(found, 1)


def wholes(seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-4, 5, (one.rows, one.dim), generator=generator).double() for one in TABLES]


def loaded(layer: ShardedEmbeddingBag, tables: list[torch.Tensor]) -> ShardedEmbeddingBag:
    state = {f"embedding_bags.{one.name}.weight": table for one, table in zip(TABLES, tables, strict=True)}
    layer.load_state_dict(state)
    return layer


def forward_and_back(weighted: bool) -> bool:
    """Uneven batches; results and gradients are those of ordinary tables that every rank would hold."""
    group = ut.init()
    tables = wholes()
    layer = loaded(ShardedEmbeddingBag(TABLES, dtype=torch.float64, divide_gradients=False), tables)
    rows = [4, 7, 2, 5][: group.size]
    given = features(group.rank, rows[group.rank], weighted)
    y = layer(**given)
    assert torch.equal(y, plain(tables, given, "sum"))
    assert [one.shape[1] for one in layer.by_table(y).values()] == [8, 16, 4, 12]
    y.backward((1 + torch.arange(y.numel()) % 3).view(y.shape).double())
    leaves = [one.clone().requires_grad_() for one in tables]
    for rank in range(group.size):
        there = plain(leaves, features(rank, rows[rank], weighted), "sum")
        there.backward((1 + torch.arange(there.numel()) % 3).view(there.shape).double())
    for piece, parameter in zip(layer.layout.held[group.rank], layer.pieces, strict=True):
        whole = leaves[piece.table].grad
        assert whole is not None
        part = whole[piece.first_row : piece.first_row + piece.rows]
        assert torch.equal(parameter.grad, part[:, piece.first_column : piece.first_column + piece.dim])
    return True


class Keyed:
    """What a KeyedJaggedTensor of torchrec offers, as far as it is asked for."""

    def __init__(self, given: dict[str, Any], names: list[str]) -> None:
        self._given, self._names = given, names

    def keys(self) -> list[str]:
        return self._names

    def values(self) -> torch.Tensor:
        return self._given["values"]  # type: ignore[no-any-return]

    def lengths(self) -> torch.Tensor:
        return self._given["lengths"]  # type: ignore[no-any-return]

    def weights_or_none(self) -> torch.Tensor | None:
        return self._given["weights"]  # type: ignore[no-any-return]


def keyed() -> str:
    """As one object with names; other names are refused."""
    group = ut.init()
    layer, given = loaded(ShardedEmbeddingBag(TABLES, dtype=torch.float64), wholes()), features(group.rank, 3)
    names = [one.name for one in TABLES]
    assert torch.equal(layer(Keyed(given, names)), plain(wholes(), given, "sum"))
    try:
        layer(Keyed(given, names[::-1]))
    except UndertowError as error:
        return str(error)
    return "nothing"


def checkpoints() -> bool:
    """Inside a model, there and back, and into another placement."""
    group = ut.init()
    model = torch.nn.ModuleDict({"bags": ShardedEmbeddingBag(TABLES, "mean"), "top": torch.nn.Linear(40, 1)})
    whole = full_state_dict(model)
    assert sorted(whole) == sorted([*(f"bags.embedding_bags.{one.name}.weight" for one in TABLES), "top.bias",
                                    "top.weight"])  # fmt: skip
    other = [[] for _ in range(group.size)]
    for number, one in enumerate(TABLES):
        other[number % group.size].append(Piece(number, one.rows, one.dim))
    torch.manual_seed(99)
    again = torch.nn.ModuleDict({
        "bags": ShardedEmbeddingBag(TABLES, "mean", placement=other), "top": torch.nn.Linear(40, 1),
    })  # fmt: skip
    assert not torch.equal(full_state_dict(again)["bags.embedding_bags.ads.weight"],
                           whole["bags.embedding_bags.ads.weight"])  # fmt: skip
    again.load_state_dict(whole)
    back = full_state_dict(again)
    assert all(torch.equal(back[key], whole[key]) for key in whole)
    given = features(group.rank, 6)
    want = plain([whole[f"bags.embedding_bags.{one.name}.weight"] for one in TABLES], given, "mean")
    for each in (model, again):
        assert torch.allclose(each["bags"](**given), want, rtol=1e-5)
    local = again.state_dict()
    again.load_state_dict(local)  # pieces as they are
    return True


def stepped() -> bool:
    """Rows are stepped in the backward pass as a plain SGD on whole tables would."""
    group = ut.init()
    tables = wholes()
    layer = loaded(
        ShardedEmbeddingBag(
            TABLES, dtype=torch.float64, optimizer=RowOptimizer("sgd", lr=0.25), divide_gradients=False
        ),
        tables,
    )  # fmt: skip
    layer(**features(group.rank, 5)).sum().backward()
    leaves = [one.clone().requires_grad_() for one in tables]
    sum(plain(leaves, features(rank, 5), "sum").sum() for rank in range(group.size)).backward()  # type: ignore[union-attr]
    after = {key: layer.whole_table(number) for number, key in enumerate(layer.table_keys)}
    for one, leaf in zip(TABLES, leaves, strict=True):
        assert leaf.grad is not None
        assert torch.equal(after[f"embedding_bags.{one.name}.weight"], leaf.detach() - 0.25 * leaf.grad)
    return True


def refused() -> dict[str, str]:
    ut.init()
    layer = ShardedEmbeddingBag(TABLES)
    given = features(0, 3)
    calls: dict[str, Any] = {
        "both": lambda: layer(given["values"], torch.tensor([0]), given["lengths"]),
        "features": lambda: layer(given["values"], lengths=given["lengths"][:5]),
        "sum": lambda: layer(given["values"][:-1], lengths=given["lengths"]),
        "names": lambda: ShardedEmbeddingBag([Table("a", 1, 4), Table("a", 2, 4)]),
        "rows": lambda: ShardedEmbeddingBag([Table("a", 0, 4)]),
        "placement": lambda: ShardedEmbeddingBag([Table("a", 4, 4)], placement=[[Piece(0, 3, 4)], []]),
        "shape": lambda: layer.load_state_dict({"embedding_bags.ads.weight": torch.zeros(2, 2)}, strict=False),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except UndertowError as error:
            said[name] = str(error)
    return said


def uneven_inputs() -> dict[str, Any]:
    """What differs between ranks: index types do no harm, the rest all ranks hear of; the layer works on."""
    group, said = ut.init(), {}
    layer, given = loaded(ShardedEmbeddingBag(TABLES, dtype=torch.float64), wholes()), features(group.rank, 3)
    mixed = {**given, "values": given["values"].to(torch.int32 if group.rank else torch.int64)}
    assert torch.equal(layer(**mixed), plain(wholes(), given, "sum"))
    weights = torch.ones(len(given["values"]), dtype=torch.float64)
    changes: dict[str, dict[str, Any]] = {
        "weights of one": {"weights": weights if group.rank else None},
        "their types": {"weights": weights.float() if group.rank else weights},
        "their gradients": {"weights": weights.clone().requires_grad_(group.rank == 1)},
        "values of one": {"values": given["values"].float() if group.rank else given["values"]},
    }
    for name, change in changes.items():
        try:
            layer(**{**given, **change})
            said[name] = "nothing"
        except UndertowError as error:
            said[name] = str(error)
    assert torch.equal(layer(**given), plain(wholes(), given, "sum"))
    return said


def first_numbers() -> bool:
    """The same whatever the placement; of a table that others hold hardly anything is made."""
    group = ut.init()
    table = Table("huge", 70_000, 8)
    torch.manual_seed(3)
    whole = ShardedEmbeddingBag([table], placement=[[Piece(0, 70_000, 8)], []])
    cut = 40_000
    torch.manual_seed(3)
    rows = ShardedEmbeddingBag([table], placement=[[Piece(0, cut, 8)], [Piece(0, 70_000 - cut, 8, cut)]])
    torch.manual_seed(3)
    columns = ShardedEmbeddingBag([table], placement=[[Piece(0, 70_000, 3)], [Piece(0, 70_000, 5, 0, 3)]])
    found = [one.whole_table(0) for one in (whole, rows, columns)]
    assert all(torch.equal(found[0], one) for one in found[1:])
    assert 0.9 < float(found[0].abs().max()) * 70_000**0.5 <= 1
    assert len(found[0].unique()) > found[0].numel() // 2
    made: list[int] = []
    empty = torch.empty
    try:
        torch.empty = lambda *shape, **more: (made.append(int(shape[0])), empty(*shape, **more))[1]
        whole._first(Piece(0, 10, 8, 60_000), torch.float32, group.device)
    finally:
        torch.empty = empty
    return max(made) < 20_000
