"""Rank functions beside TorchRec's own sharded EmbeddingBagCollection. torchrec is imported in ranks only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import undertow as ut
from undertow.errors import UndertowError
from undertow.nn import ShardedEmbeddingBag, Table
from undertow.plan.bags import Piece

TABLES = [Table("ads", 20, 8, 3), Table("users", 37, 16, 1), Table("words", 9, 4, 6), Table("shops", 6, 12, 1)]
NAMES = [one.name for one in TABLES]
ROWS = 6
# Of two ranks: a table cut by rows, one by columns, two whole.
CUT = [
    [Piece(0, 20, 8), Piece(1, 19, 16), Piece(3, 6, 4)],
    [Piece(1, 18, 16, first_row=19), Piece(2, 9, 4), Piece(3, 6, 8, first_column=4)],
]


def wholes() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(-4, 5, (one.rows, one.dim), generator=generator).float() for one in TABLES]


def jagged(rank: int, weighted: bool) -> Any:
    """This rank's samples, empty bags among them; bags of 1, 2 and 4 rows, whose means are exact."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 + rank)
    lengths = torch.tensor([0, 1, 2, 4])[torch.randint(0, 4, (len(TABLES), ROWS), generator=generator)]
    flat = torch.cat(
        [torch.randint(0, one.rows, (int(lengths[at].sum()),), generator=generator) for at, one in enumerate(TABLES)]
    )
    weights = torch.randint(-2, 3, (len(flat),), generator=generator).float() if weighted else None
    return KeyedJaggedTensor(keys=NAMES, values=flat, lengths=lengths.view(-1), weights=weights)


def collection(pooling: str, weighted: bool, device: str = "cpu") -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

    kind = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}[pooling]
    configs = [
        EmbeddingBagConfig(
            name=one.name, embedding_dim=one.dim, num_embeddings=one.rows, feature_names=[one.name], pooling=kind
        )
        for one in TABLES
    ]
    return EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device(device))


def sharded_collection(pooling: str, weighted: bool) -> Any:
    """Theirs over both ranks: table-wise, row-wise and column-wise; rows are stepped by plain SGD of rate 1.

    Of means, no table is row-wise: TorchRec 1.8 then divides by the length plus a little, and the means of tables that
    are not row-wise twice, so that its sharded result is not that of its unsharded module.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.shard import shard
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv

    fused = EmbeddingComputeKernel.FUSED.value
    ways = {
        "ads": table_wise(rank=1, compute_kernel=fused),
        "users": row_wise(compute_kernel=fused) if pooling == "sum" else table_wise(rank=0, compute_kernel=fused),
        "words": table_wise(rank=0, compute_kernel=fused),
        "shops": column_wise(ranks=[0, 1, 0], compute_kernel=fused),
    }
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0})
    module = collection(pooling, weighted, "meta")
    plan = construct_module_sharding_plan(
        module, per_param_sharding=ways, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    made = shard(module, plan, env, device=torch.device("cpu"), sharder=sharder)
    for number, part, where in shards(made):
        part.copy_(wholes()[number][where])
    return made


def shards(module: Any) -> list[tuple[int, torch.Tensor, tuple[slice, slice]]]:
    """Table, memory and place of what this rank holds of theirs."""
    found = []
    state = module.state_dict()
    for number, name in enumerate(NAMES):
        for one in state[f"embedding_bags.{name}.weight"].local_shards():
            (row, column), (rows, dim) = one.metadata.shard_offsets, one.metadata.shard_sizes
            found.append((number, one.tensor.detach(), (slice(row, row + rows), slice(column, column + dim))))
    return found


def gathered(parts: list[tuple[int, torch.Tensor, tuple[slice, slice]]]) -> list[torch.Tensor]:
    """Whole tables of what all ranks hold in parts, no place twice."""
    found = [torch.zeros(one.rows, one.dim) for one in TABLES]
    for number, part, where in parts:
        found[number][where] += part
    for one in found:
        dist.all_reduce(one)
    return found


def compared(pooling: str, weighted: bool, cut: bool, strategy: str) -> list[str]:
    """Where results or gradients differ: nowhere."""
    group = ut.init()
    given = jagged(group.rank, weighted)
    theirs = sharded_collection(pooling, weighted)
    ours = ShardedEmbeddingBag(TABLES, pooling, placement=CUT if cut else None, strategy=strategy)
    state = {f"embedding_bags.{name}.weight": one for name, one in zip(NAMES, wholes(), strict=True)}
    ours.load_state_dict(state)
    by_name = theirs(given).wait()
    wanted = torch.cat([by_name[name] for name in NAMES], 1)  # theirs come in the order of the ways of sharding
    y = ours(given)
    wrong = [] if torch.equal(y, wanted) else ["results"]
    plain = collection(pooling, weighted)
    plain.load_state_dict(state)
    if not torch.equal(y, plain(given).values()):
        wrong.append("the unsharded result")
    if not all(torch.equal(by_name[name], part) for name, part in ours.by_table(y).items()):
        wrong.append("names")
    slope = torch.randint(-3, 4, y.shape, generator=torch.Generator().manual_seed(7 + group.rank)).float()
    y.backward(slope)
    wanted.backward(slope)
    stepped = gathered(shards(theirs))
    held = ours.layout.held[group.rank]
    mine = gathered([
        (piece.table, weight.grad if weight.grad is not None else torch.zeros_like(weight), place_of(piece))
        for weight, piece in zip(ours.pieces, held, strict=True)
    ])  # fmt: skip
    for name, first, last, slope_of_it in zip(NAMES, wholes(), stepped, mine, strict=True):
        if not torch.equal(first - last, slope_of_it) or not slope_of_it.any():
            wrong.append(f"gradients of {name}")
    return wrong


def place_of(piece: Piece) -> tuple[slice, slice]:
    rows = slice(piece.first_row, piece.first_row + piece.rows)
    return rows, slice(piece.first_column, piece.first_column + piece.dim)


def other_keys() -> tuple[bool, str]:
    """Features in another order, with one that no table has: as if they were in order. Without one: what is said."""
    from torchrec import KeyedJaggedTensor

    group = ut.init()
    layer = ShardedEmbeddingBag(TABLES)
    given = jagged(group.rank, True)
    order = [3, 1, 0, 2]
    moved = given.permute(order)
    others = torch.zeros(ROWS, dtype=torch.int64)
    others[0] = 2
    more = KeyedJaggedTensor(
        keys=[*moved.keys(), "nobody"],
        values=torch.cat([moved.values(), torch.tensor([10_000, 3])]),
        lengths=torch.cat([moved.lengths(), others]),
        weights=torch.cat([moved.weights(), torch.ones(2)]),
    )
    same = torch.equal(layer(more), layer(given))
    try:
        layer(given.permute(order[:3]))
    except UndertowError as error:
        return same, str(error)
    return same, ""
