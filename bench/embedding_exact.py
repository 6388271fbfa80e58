"""embedding_all_to_all on a GPU against a plain loop, on small seeded jagged problems; for `gpu_embedding.py`."""

from __future__ import annotations

import random
from typing import Any

import torch

import undertow as ut
from undertow.ops import embedding_all_to_all as operator
from undertow.ops.bags import Shard

SERIAL, CHUNKED, FUSED, HOST, POSTED = "serial:peer", "chunked:peer", "fused:peer", "signaled:dma", "fused:dma"
PROBLEMS = (
    (torch.float32, torch.int64, (128,)),
    (torch.bfloat16, torch.int32, (64, 128)),
    (torch.float16, torch.int64, (3, 5)),
    (torch.float32, torch.int32, (600, 20)),
)


def jagged(group: ut.Group, seed: int) -> dict[str, Any]:
    """The arguments of all ranks for a small random problem: the same on every rank."""
    pick = random.Random(seed)
    dtype, index, dims = PROBLEMS[seed % len(PROBLEMS)]
    batches = [pick.choice([0, 1, 7, 33, 60]) for _ in range(group.size)]
    batches[0] = 5
    samples, generator = sum(batches), torch.Generator().manual_seed(seed)
    tables, values, offsets, weights = [], [], [], []
    for rank in range(group.size):
        count = pick.choice([0, 1, 2, 5]) if rank else 2
        held = [
            torch.randint(-2, 3, (pick.choice([1, 9, 300]), pick.choice(dims)), generator=generator).to(dtype)
            for _ in range(count)
        ]
        lengths = torch.randint(0, 12, (count * samples,), generator=generator)
        offsets.append(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(index))
        parts = [
            torch.randint(0, len(one), (int(lengths[k * samples : (k + 1) * samples].sum()),), generator=generator)
            for k, one in enumerate(held)
        ]
        values.append(torch.cat([*parts, torch.zeros(0, dtype=torch.int64)]).to(index))
        weights.append(torch.randint(-1, 2, (len(values[-1]),), generator=generator).float())
        tables.append(held)
    return {
        "tables": tables, "values": values, "offsets": offsets, "batches": batches,
        "weights": weights if seed % 2 else None, "pooling": "sum",
    }  # fmt: skip


def exact(group: ut.Group, seeds: range) -> int:
    """Every strategy against the plain loop; results are kept, so that places run out and are copied, too."""
    count, device = 0, group.device
    strategies = [f"{grain}:peer" for grain in ("serial", "chunked", "signaled", "fused")]
    strategies += ["serial:dma", "signaled:dma", "chunked:dma", "fused:dma", "fused:net"]
    for seed in seeds:
        given = jagged(group, seed)
        want = operator.reference(**given)[group.rank].to(device)
        mine = {name: given[name][group.rank].to(device) for name in ("values", "offsets")}
        weights = None if given["weights"] is None else given["weights"][group.rank].to(device)
        tables = [one.to(device) for one in given["tables"][group.rank]]
        kept = []
        for strategy in strategies if seed == 0 else (SERIAL, FUSED, HOST, POSTED):
            for _ in range(2):
                y = ut.embedding_all_to_all(
                    tables, mine["values"], mine["offsets"], weights=weights, batches=given["batches"],
                    group=group, strategy=strategy,
                )  # fmt: skip
                kept.append((strategy, y))
        torch.cuda.synchronize()
        group.check()
        for strategy, y in kept:
            assert torch.equal(y, want), f"{strategy} is wrong, seed {seed}, rank {group.rank}"
            count += 1
    return count + by_rows(group)


def by_rows(group: ut.Group) -> int:
    """One table cut by rows over all ranks, one cut by columns."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-2, 3, (40, 64), generator=generator)
    columns = torch.randint(-2, 3, (9, 32 * group.size), generator=generator)
    samples, rank, device = 21, group.rank, group.device
    values = torch.randint(0, 9, (2 * samples * 3,), generator=generator).to(device)
    values[: samples * 3] *= 4
    offsets = torch.arange(0, 2 * samples * 3 + 1, 3, device=device)
    part = rows.float().tensor_split(group.size)[rank].contiguous().to(device)
    first = sum(len(one) for one in rows.tensor_split(group.size)[:rank])
    held = [
        Shard(part, 0, first_row=first),
        Shard(columns[:, 32 * rank : 32 * rank + 32].float().contiguous().to(device), 1, first_column=32 * rank),
    ]
    whole = [rows.float().to(device), columns.float().to(device)]
    want = torch.cat([
        torch.nn.functional.embedding_bag(values[k * samples * 3 : (k + 1) * samples * 3].view(samples, 3), one,
                                          mode="sum") for k, one in enumerate(whole)
    ], 1).tensor_split(group.size)[rank]  # fmt: skip
    for strategy in (SERIAL, FUSED, HOST, POSTED):
        y = ut.embedding_all_to_all(held, values, offsets, group=group, strategy=strategy)
        torch.cuda.synchronize()
        assert torch.equal(y, want), f"rows and columns: {strategy} is wrong on rank {rank}"
    return 4
