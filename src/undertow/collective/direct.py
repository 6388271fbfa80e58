"""AllReduce by direct exchange over any lane: each rank reduces one shard and hands it to all others (two-shot).

    for every rank r:  total_r = sum over ranks s, in rank order, of s's shard r        (reduce-scatter)
    for every rank r:  result[shard r] = total_r                                        (all-gather)

Shards follow torch.tensor_split. Two hand-off slots per pair of ranks: one for each half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..fabric.base import Incoming, Outgoing
from ..fabric.net import NetLane
from ..plan.plan import split

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane

_REDUCE, _GATHER = 0, 1
_ALIGNMENT = 128
_ACCUMULATE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def all_reduce(fabric: Fabric, lane: Lane, tensor: torch.Tensor) -> None:
    """Sum contiguous `tensor` over the group, in place, in the order of the caller's stream."""
    if isinstance(lane, NetLane):
        lane.all_reduce(tensor)
        return
    group = fabric.group
    rank, size = group.rank, group.size
    flat = tensor.view(-1)
    shards = split(flat.numel(), size)
    longest = shards[0][1] - shards[0][0]
    if size == 1 or longest == 0:
        return
    space = fabric.workspace(lane.name, 2 * size * (longest * flat.element_size() + _ALIGNMENT))
    inbox = space.as_type(flat.dtype)
    # A slot guards one place, so places must not depend on this call's size: a rank that runs ahead into the next call
    # would write over what a slower one has not read yet. First half: partial shards by sender; second: sums by owner.
    place = space.nbytes // (2 * size) // _ALIGNMENT * _ALIGNMENT // flat.element_size()
    ahead = [(rank + step) % size for step in range(1, size)]
    behind = [(rank - step) % size for step in range(1, size)]
    mine = flat[slice(*shards[rank])]

    # Each rank names its peers in rotated order, so that no receiver is everybody's first.
    outgoing = [Outgoing(peer, flat[slice(*shards[peer])], inbox, rank * place, _REDUCE) for peer in ahead]
    incoming = [Incoming(peer, inbox, peer * place, mine.numel(), _REDUCE) for peer in behind]
    arrived = lane.exchange(filled(outgoing), incoming if mine.numel() else [])
    if mine.numel():
        parts = {rank: mine, **dict(zip(behind, arrived, strict=True))}
        ordered_sum(mine, [parts[one] for one in range(size)])
        for peer in behind:
            lane.free(peer, _REDUCE)

    owners = [peer for peer in behind if shards[peer][1] > shards[peer][0]]
    outgoing = [Outgoing(peer, mine, inbox, (size + rank) * place, _GATHER) for peer in ahead]
    incoming = [
        Incoming(peer, inbox, (size + peer) * place, shards[peer][1] - shards[peer][0], _GATHER) for peer in owners
    ]
    for peer, total in zip(owners, lane.exchange(filled(outgoing), incoming), strict=True):
        flat[slice(*shards[peer])].copy_(total)
        lane.free(peer, _GATHER)
    lane.flush()


def filled(messages: list[Outgoing]) -> list[Outgoing]:
    """Without the empty ones: a shard may hold nothing when there are fewer elements than ranks."""
    return [one for one in messages if one.source.numel()]


def ordered_sum(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """out = parts[0] + parts[1] + ..., in that order on every rank; 16-bit types in fp32. `out` may be a part."""
    total = parts[0].to(_ACCUMULATE.get(out.dtype, out.dtype), copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)
