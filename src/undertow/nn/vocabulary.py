"""An embedding of which every rank holds the rows of its part of the vocabulary.

    reference:  y = weight[ids]                    backward: dweight[ids] += dy

| tensor | shape on rank r |
|---|---|
| weight_r | [V_r, H]: the rows from `first` on |
| ids | [S, ...], the same on all ranks |
| y | [S, ..., H], the same on all ranks; sequence parallel: [S_r, ..., H] |

Each rank looks up what it has, and zeros in the place of the rest, so the sum over ranks is the row itself, to the bit.
The gradient of a row stays where the row is; nothing moves in the backward pass. There is next to no computation that
the sum could be hidden beneath, so it is `serial`, over the lane that was asked for.

In the sequence-parallel form the sum is scattered by the first dimension, and the gradient dy_r gathered: each rank
needs those of all rows. Both are Undertow's own collectives.

A last layer that has the same weight (tied) is cut alike, by columns of its result: `parallelize` keeps the two one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import settings
from ..collective.operators import all_gather, reduce_scatter
from ..errors import InvalidArgument
from ..fabric.registry import named
from ..ops.operands import check_dtype
from ..ops.rows_all_reduce import Tensors, rows_all_reduce
from ..plan.plan import as_written, split
from .held import carry_hooks
from .sharded import Cut, Sharded

if TYPE_CHECKING:
    from .sharded import AnyGroup

_INDEX_TYPES = (torch.int32, torch.int64)


class VocabularyParallelEmbedding(Sharded):
    """y = weight[ids], the weight [V, H] cut by rows. `unit`: rows that stay together."""

    weight: torch.nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: AnyGroup = None,
        sequence_parallel: bool = False,
        unit: int = 1,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dtype("dtype", dtype or torch.get_default_dtype())
        whole = torch.nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._cut_from(whole, group, unit, strategy, sequence_parallel)

    @classmethod
    def from_embedding(
        cls, embedding: torch.nn.Embedding, *, group: AnyGroup = None, unit: int = 1, strategy: str = "auto",
        sequence_parallel: bool = False,
    ) -> VocabularyParallelEmbedding:  # fmt: skip
        """This rank's part of an embedding that every rank holds."""
        made = cls.__new__(cls)
        made._cut_from(embedding, group, unit, strategy, sequence_parallel)
        return made

    def _cut_from(
        self, whole: torch.nn.Embedding, group: AnyGroup, unit: int, strategy: str, sequence_parallel: bool
    ) -> None:
        lane = "" if strategy == "auto" else as_written(strategy)[1]
        super().__init__(group, f"serial:{lane}" if lane else "auto")
        cut = cut_of(whole, unit, self.ranks)
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.sequence_parallel = sequence_parallel
        self.padding_idx = whole.padding_idx  # of the whole; torch has made it one that counts from the front
        self.first = cut.bounds(0, self.rank)[0]
        self._model: tuple[torch.nn.Embedding, ...] = ()
        if type(whole) is not torch.nn.Embedding:
            self._keep(whole)
        self.add_sharded("weight", whole.weight, cut, whole.weight.requires_grad)

    def _keep(self, whole: torch.nn.Embedding) -> None:
        """One that makes something of the rows it finds, such as a multiple: for its forward, as `cut_of` takes it."""
        for name, one in whole.named_buffers(recurse=False):
            self.register_buffer(name, one, persistent=name not in whole._non_persistent_buffers_set)
        self._model = (_bare(whole),)  # in a tuple: no module of this one, whose parameters would count

    def forward(self, ids: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """ids [S, ...], of 32 or 64 bits, the same on all ranks -> [S, ..., H], or [S_r, ..., H].

        `rows[r]`: S_r, if not as torch.tensor_split cuts S (sequence parallel only).
        """
        if ids.dtype not in _INDEX_TYPES:
            raise InvalidArgument(argument="ids", was=f"of {ids.dtype}", must="of torch.int32 or torch.int64")
        if ids.device != self.weight.device:
            must = f"on {self.weight.device}, as the weight is"
            raise InvalidArgument(argument="ids", was=f"on {ids.device}", must=must)
        if not torch.compiler.is_compiling() and (ids.device.type == "cpu" or settings.CHECK.is_on()):
            self._check(ids)
        if self.sequence_parallel:
            if ids.dim() == 0:
                raise InvalidArgument(argument="ids", was="of shape []", must="[S, ...], whose rows ranks share out")
            shares = [stop - start for start, stop in split(ids.shape[0], self.ranks)] if rows is None else list(rows)
            if len(shares) != self.ranks or sum(shares) != ids.shape[0]:
                must = f"{self.ranks} counts that add up to {ids.shape[0]}, the first dimension of ids"
                raise InvalidArgument(argument="rows", was=str(shares), must=must)
            counts = [one * math.prod(ids.shape[1:]) for one in shares]
            mine: torch.Tensor = _scatter(self._look_up((ids.reshape(-1),), (self.weight,)), counts, self.group_name)
            return mine.reshape(shares[self.rank], *ids.shape[1:], self.embedding_dim)
        y = rows_all_reduce(
            self._look_up, (ids.reshape(-1),), (self.weight,), self.embedding_dim, dtype=self.weight.dtype,
            group=self.group_name, strategy=self.strategy,
        )  # fmt: skip
        return y.reshape(*ids.shape, self.embedding_dim)

    def _check(self, ids: torch.Tensor) -> None:
        """What needs a look at the numbers. The same on all ranks, so all refuse or none."""
        wrong = torch.nonzero(((ids < 0) | (ids >= self.num_embeddings)).reshape(-1))
        if len(wrong):
            was, must = int(ids.reshape(-1)[wrong[0]]), f"between 0 and {self.num_embeddings - 1}"
            raise InvalidArgument(argument=f"ids.view(-1)[{int(wrong[0])}]", was=was, must=must)

    def _look_up(self, rows: Tensors, weights: Tensors) -> torch.Tensor:
        """Rows of this rank; zeros for those of others."""
        (ids,), (weight,) = rows, weights
        held = weight.shape[0]
        here = ids - self.first
        mine = (here >= 0) & (here < held)
        # Where nobody looks at the numbers, one that no rank has is beyond every shard: the lookup fails on all ranks
        # alike, as that of a whole table would.
        known = (ids >= 0) & (ids < self.num_embeddings)
        at = torch.where(mine, here, torch.where(known, 0, held))
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        if padding is not None and not 0 <= padding < held:
            padding = None
        found = torch.nn.functional.embedding(at, weight, padding)
        if self._model:
            found = _made_of(self._model[0], found, dict(self.named_buffers(recurse=False)))
        return found.masked_fill(~mine[:, None], 0)

    def extra_repr(self) -> str:
        held = f"{self.num_embeddings} of which {self.weight.shape[0]}"
        return f"{held}, {self.embedding_dim}, rank {self.rank}/{self.ranks}"


@torch.library.custom_op("undertow::sum_of_own_rows", mutates_args=())
def _scatter(y: torch.Tensor, rows: Sequence[int], group: str) -> torch.Tensor:
    """This rank's rows of the sum of every rank's y [M, H]."""
    return reduce_scatter(y.contiguous(), rows=rows, group=named(group))


@torch.library.custom_op("undertow::rows_of_all", mutates_args=())
def _gather(y: torch.Tensor, rows: Sequence[int], group: str) -> torch.Tensor:
    """Every rank's rows, one after the other."""
    return all_gather(y.contiguous(), rows=rows, group=named(group))


def _setup(ctx: Any, inputs: tuple[torch.Tensor, list[int], str], output: torch.Tensor) -> None:
    _, ctx.rows, ctx.group = inputs


_scatter.register_fake(lambda y, rows, group: y.new_empty(rows[named(group).rank], y.shape[1]))
_scatter.register_autograd(lambda ctx, dy: (_gather(dy, ctx.rows, ctx.group), None, None), setup_context=_setup)
_gather.register_fake(lambda y, rows, group: y.new_empty(sum(rows), y.shape[1]))


def _bare(embedding: torch.nn.Embedding) -> torch.nn.Embedding:
    """For its forward alone: its rows are given, not looked up where they are; hooks are called where it stood."""
    found = copy.copy(embedding)
    found._parameters = {"weight": torch.nn.Parameter(torch.empty(0, device="meta"))}
    found.padding_idx = None
    carry_hooks(torch.nn.Module(), found)
    return found


def _made_of(embedding: torch.nn.Embedding, rows: torch.Tensor, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the forward of one that adds to a lookup makes of rows [M, H]: they are its whole weight, all looked up."""
    every = torch.arange(len(rows), device=rows.device)
    made: torch.Tensor = torch.func.functional_call(embedding, {"weight": rows, **buffers}, (every,))
    return made


def _refuse_more_than_rows(embedding: torch.nn.Embedding) -> None:
    """One of another kind must make each row of its result from the row that it finds, wherever that stands."""
    if type(embedding) is torch.nn.Embedding:
        return
    others = [name for name, _ in embedding.named_parameters() if name != "weight"]
    wrong = f"with {', '.join(others)}" if others else ""
    if not others:
        buffers = dict(embedding.named_buffers(recurse=False))
        device = next((one.device for one in buffers.values() if one.dim()), torch.device("cpu"))
        inside = _bare(embedding)
        rows = torch.linspace(-1, 1, 4 * embedding.embedding_dim, device=device).view(4, -1)
        try:
            made = _made_of(inside, rows, buffers)
            apart = torch.cat([_made_of(inside, row[None], buffers) for row in rows])
            if made.shape != rows.shape or not torch.equal(made, apart):
                wrong = "whose rows depend on more than what is looked up"
        except Exception as error:  # whatever its forward wants
            wrong = f"whose forward fails on ids alone ({type(error).__name__})"
    if wrong:
        must = "a lookup, or what a forward makes of each row alone; a narrower pattern leaves it whole"
        raise InvalidArgument(argument="the embedding", was=f"{type(embedding).__name__} {wrong}", must=must)


def cut_of(embedding: torch.nn.Embedding, unit: int, ranks: int) -> Cut:
    """What this layer would not do as the whole one does is refused."""
    for name, usual in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
        if getattr(embedding, name) != usual:
            raise InvalidArgument(argument=name, was=repr(getattr(embedding, name)), must=f"{usual}, to be cut by rows")
    check_dtype("weight", embedding.weight.dtype)
    _refuse_more_than_rows(embedding)
    return Cut.of("num_embeddings", 0, (embedding.num_embeddings,), (unit,), ranks)
