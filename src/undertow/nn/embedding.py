"""Embedding tables over ranks, for models in the style of torchrec's EmbeddingBagCollection.

    reference:  for each table t, in order: embedding_bag(values of t, weight of t, mode=pooling), side by side

Every rank calls it with its own samples of all features and gets [its samples, sum of dims]. Tables are placed by cost
(`plan/placement.py`): whole, or cut by rows or columns where one would weigh more than a rank's share.

A checkpoint is that of the ordinary module: `load_state_dict` takes whole tables, and cuts them, or pieces as they are;
`undertow.nn.full_state_dict` gives whole ones. Their names are `embedding_bags.<table>.weight`, as torchrec's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..collective.operators import broadcast
from ..errors import InvalidArgument
from ..fabric.registry import as_group, named
from ..ops.bags import POOLINGS, Shard
from ..ops.embedding_all_to_all import embedding_all_to_all
from ..ops.embedding_gradients import RowOptimizer
from ..ops.embedding_inputs import agree, distribute
from ..ops.operands import check_dtype
from ..plan.bags import Layout, Piece
from ..plan.placement import Table, place

if TYPE_CHECKING:
    from .sharded import AnyGroup

_BLOCK = 1 << 14  # rows whose first numbers are made together


class ShardedEmbeddingBag(torch.nn.Module):
    """`tables` held by the ranks of a group. Parameters: `pieces`, those of this rank.

    `placement`: pieces by rank, instead of those by cost. `optimizer`: rows are stepped in the backward pass, and
    `pieces` want no other optimizer. `divide_gradients`: by the number of ranks, as TorchRec does and as a loss that is
    each rank's own mean needs beside data-parallel layers whose gradients are averaged.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        pooling: str = "sum",
        *,
        placement: Sequence[Sequence[Piece]] | None = None,
        sparse: bool = False,
        divide_gradients: bool = True,
        optimizer: RowOptimizer | None = None,
        group: AnyGroup = None,
        strategy: str = "auto",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        on = as_group(group)
        check_dtype("dtype", dtype)
        if not tables:
            raise InvalidArgument(argument="tables", was="empty", must="at least one")
        if pooling not in POOLINGS:
            raise InvalidArgument(argument="pooling", was=repr(pooling), must=f"one of {', '.join(POOLINGS)}")
        self.tables, self.pooling, self.strategy = tuple(tables), pooling, strategy
        self.sparse, self.divide_gradients, self.optimizer = sparse, divide_gradients, optimizer
        self.group_name, self.rank = on.name, on.rank
        held = place(tables, on.size, dtype.itemsize) if placement is None else tuple(map(tuple, placement))
        self.layout = Layout(held, str(dtype).removeprefix("torch."))
        self._check()
        self.pieces = torch.nn.ParameterList(
            torch.nn.Parameter(self._first(piece, dtype, on.device), requires_grad=optimizer is None)
            for piece in held[on.rank]
        )
        self.register_load_state_dict_pre_hook(self._cut_tables)  # type: ignore[no-untyped-call]

    def _check(self) -> None:
        found = [(rows, dim) for rows, dim in zip(self.layout.rows, self.layout.dims, strict=True)]
        wanted = [(one.rows, one.dim) for one in self.tables]
        if found != wanted:
            raise InvalidArgument(argument="placement", was=f"of tables {found}", must=f"of {wanted}, as tables says")

    def _first(self, piece: Piece, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uniform within 1/sqrt(rows), as DLRM begins; the same numbers whatever the placement.

        Block by block of rows, each seeded by itself: no rank makes more than a block of what it does not hold.
        """
        table = self.tables[piece.table]
        found = torch.empty(piece.rows, piece.dim, dtype=dtype, device=device)
        last = piece.first_row + piece.rows
        columns = slice(piece.first_column, piece.first_column + piece.dim)
        for block in range(piece.first_row // _BLOCK, -(-last // _BLOCK)):
            first = block * _BLOCK
            seed = hash((torch.initial_seed(), piece.table, block)) % (1 << 62)  # integers: everywhere the same
            rows = torch.empty(min(_BLOCK, table.rows - first), table.dim, dtype=torch.float32, device="cpu")
            rows.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed)).mul_(table.rows**-0.5)
            begin, end = max(first, piece.first_row), min(first + len(rows), last)
            found[begin - piece.first_row : end - piece.first_row] = rows[begin - first : end - first, columns]
        return found

    def forward(
        self,
        values: Any,
        offsets: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        batches: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """This rank's samples of all features, feature-major -> [samples, sum of dims]; `by_table` splits it.

        Or one KeyedJaggedTensor of torchrec, with a feature for each table, by name, in any order. `batches`: samples
        of each rank, to be checked; ranks tell each other in any case. `weights` on all ranks or none, of one dtype; no
        gradients come back to them.
        """
        if hasattr(values, "keys") and hasattr(values, "lengths"):
            values = self._in_order(values)
            weights, lengths, values = values.weights_or_none(), values.lengths(), values.values()
        if (offsets is None) == (lengths is None):
            was = "given beside lengths" if offsets is not None else "missing, as lengths is"
            raise InvalidArgument(argument="offsets", was=was, must="given, or lengths instead of it")
        if lengths is None:
            assert offsets is not None
            lengths = offsets[1:] - offsets[:-1]
        group = named(self.group_name)
        sizes, index = agree(group, lengths, values, weights, len(self.tables), batches)
        values, lengths, weights = distribute(group.fabric, lengths, values, weights, self.layout, sizes, index)
        shards = [
            Shard(weight, piece.table, piece.first_row, piece.first_column)
            for weight, piece in zip(self.pieces, self.layout.held[self.rank], strict=True)
        ]
        return embedding_all_to_all(
            shards, values, lengths=lengths, weights=weights, pooling=self.pooling, batches=sizes, layout=self.layout,
            sparse=self.sparse, divide_gradients=self.divide_gradients, optimizer=self.optimizer, group=group,
            strategy=self.strategy,
        )  # fmt: skip

    def _in_order(self, keyed: Any) -> Any:
        """A KeyedJaggedTensor with the tables' features only, in their order."""
        keys, names = list(keyed.keys()), [one.name for one in self.tables]
        if keys == names:
            return keyed
        if not set(names) <= set(keys) or not hasattr(keyed, "permute"):
            raise InvalidArgument(argument="keys", was=str(keys), must=f"{names}, as the tables")
        return keyed.permute([keys.index(name) for name in names])

    def by_table(self, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns of each table, by name."""
        parts = torch.split(y, list(self.layout.dims), 1)
        return {table.name: part for table, part in zip(self.tables, parts, strict=True)}

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def whole_table(self, number: int) -> torch.Tensor:
        """One of the tables on every rank, put together from its pieces. Collective."""
        group, table = named(self.group_name), self.tables[number]
        dtype = getattr(torch, self.layout.dtype)
        found = torch.empty(table.rows, table.dim, dtype=dtype, device=group.device)
        for rank, pieces in enumerate(self.layout.held):
            for at, piece in enumerate(pieces):
                if piece.table != number:
                    continue
                part = torch.empty(piece.rows, piece.dim, dtype=dtype, device=group.device)
                if rank == self.rank:
                    part.copy_(self.pieces[at].detach())
                broadcast(part, root=rank, group=group)
                _cut(found, piece).copy_(part)
        return found

    @property
    def table_keys(self) -> list[str]:
        """Names of the whole tables in a checkpoint, behind that of this module."""
        return [f"embedding_bags.{one.name}.weight" for one in self.tables]

    def parts(self) -> Iterator[tuple[int, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
        """Of each piece: of which table it is, the piece, and what finds it in the table."""
        for number, piece in enumerate(self.layout.held[self.rank]):
            yield piece.table, self.pieces[number], partial(_cut, piece=piece)

    def _cut_tables(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Before torch loads: this rank's pieces in the place of whole tables. Pieces as they are stay."""
        wholes = {table: state.pop(prefix + key) for table, key in enumerate(self.table_keys) if prefix + key in state}
        for number, piece in enumerate(self.layout.held[self.rank]):
            if piece.table in wholes:
                whole, table = wholes[piece.table], self.tables[piece.table]
                if tuple(whole.shape) != (table.rows, table.dim):
                    was, must = f"of shape {list(whole.shape)}", f"[{table.rows}, {table.dim}]"
                    raise InvalidArgument(argument=self.table_keys[piece.table], was=was, must=must)
                state[f"{prefix}pieces.{number}"] = _cut(whole, piece)


def bags_of(model: torch.nn.Module) -> Iterator[tuple[str, ShardedEmbeddingBag]]:
    """Those of a model, with what their names in its state begin with."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ShardedEmbeddingBag):
            yield as_saved(f"{name}." if name else ""), module


def as_saved(name: str) -> str:
    """A name as it is in a state: torch's wrapper for activation checkpointing leaves its own part of it out there."""
    return name.replace("_checkpoint_wrapped_module.", "")


def _cut(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    rows = slice(piece.first_row, piece.first_row + piece.rows)
    return whole[rows, piece.first_column : piece.first_column + piece.dim]
