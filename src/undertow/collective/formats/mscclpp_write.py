"""MSCCL++'s JSON plans, written: refused where the executor would have no room for the plan."""

from __future__ import annotations

import json
from typing import Any

from ...errors import NotExpressible
from .mscclpp import SUMS, Gpu, Operand, Operation, Plan, beyond_limits
from .mscclpp_export import FORMAT


def text_of(plan: Plan) -> str:
    """The file."""
    reason = beyond_limits(plan)
    if reason is not None:
        raise NotExpressible(name=plan.name, format=FORMAT, reason=reason)
    whole = {
        "name": plan.name,
        "collective": plan.collective,
        "protocol": plan.protocol,
        "inplace": plan.in_place,
        "use_double_scratch_buffer": plan.double_scratch,
        **plan.others,
        "gpus": [_gpu(rank, gpu) for rank, gpu in enumerate(plan.gpus)],
    }
    return json.dumps(whole, separators=(",", ":")) + "\n"


def _gpu(rank: int, gpu: Gpu) -> dict[str, Any]:
    remote = _Remote(gpu)
    blocks = [_block(number, block, remote) for number, block in enumerate(gpu.threadblocks)]
    return {
        "id": rank,
        "input_chunks": gpu.input_chunks,
        "output_chunks": gpu.output_chunks,
        "scratch_chunks": gpu.scratch_chunks,
        "threadblocks": blocks,
        "channels": [
            {"channel_type": kind, "connected_to": list(peers)} for kind, peers in sorted(gpu.channels.items())
        ],
        "remote_buffers": [
            {"rank": owner, "type": buffer, "access_channel_types": sorted(kinds)}
            for (owner, buffer), kinds in remote.buffers.items()
        ],
        "semaphores": [{"init_value": value} for value in gpu.semaphores],
    }


class _Remote:
    """The buffers of other ranks that a rank uses, in the order they are met in."""

    def __init__(self, gpu: Gpu) -> None:
        self.buffers: dict[tuple[int, str], set[str]] = {}
        for block in gpu.threadblocks:
            for one in _all(block):
                for operand in (*one.sources, *one.destinations):
                    if operand.rank is not None:
                        self.buffers.setdefault((operand.rank, operand.buffer), set()).add(one.channel_type)

    def number(self, operand: Operand) -> int:
        return list(self.buffers).index((operand.rank or 0, operand.buffer))


def _all(block: tuple[Operation, ...]) -> list[Operation]:
    return [inner for one in block for inner in (one, *_all(one.inner))]


def _block(number: int, block: tuple[Operation, ...], remote: _Remote) -> dict[str, Any]:
    """Inside a threadblock, channels and remote buffers have numbers of their own."""
    channels: dict[str, dict[int, int]] = {}
    buffers: dict[str, dict[int, int]] = {}
    for one in _all(block):
        for channel in one.channels:
            known = channels.setdefault(one.channel_type, {})
            known.setdefault(channel, len(known))
        for operand in (*one.sources, *one.destinations):
            if operand.rank is not None:
                known = buffers.setdefault(one.channel_type, {})
                known.setdefault(remote.number(operand), len(known))
    return {
        "id": number,
        "ops": [_operation(one, channels, buffers, remote) for one in block],
        "channels": [{"channel_type": kind, "channel_ids": list(known)} for kind, known in channels.items()],
        "remote_buffer_refs": [
            {"access_channel_type": kind, "remote_buffer_ids": list(known)} for kind, known in buffers.items()
        ],
    }


def _operation(
    one: Operation, channels: dict[str, dict[int, int]], buffers: dict[str, dict[int, int]], remote: _Remote
) -> dict[str, Any]:
    def operand(given: Operand) -> dict[str, Any]:
        place = {"index": given.index, "size": given.size}
        if given.rank is None:
            return {"type": given.buffer, **place}
        return {"buffer_id": buffers[one.channel_type][remote.number(given)], **place}

    made: dict[str, Any] = {"name": one.name}
    if one.sources:
        made["src_buff"] = [operand(given) for given in one.sources]
    if one.destinations:
        made["dst_buff"] = [operand(given) for given in one.destinations]
    if one.channels:
        made["channel_ids"] = [channels[one.channel_type][channel] for channel in one.channels]
    if one.channel_type:
        made["channel_type"] = one.channel_type
    if one.name in SUMS:
        made["reduce_op"] = "sum"
    if one.semaphores:
        made["semaphore_ids"] = list(one.semaphores)
    if one.barrier is not None:
        made["barrier_id"], made["num_threadblocks"] = one.barrier
    if one.share != (0, 1):
        made["tbg_info"] = {"tb_id": one.share[0], "tbg_size": one.share[1]}
    if one.name == "pipeline":
        made["iter_context"] = {"unit_size": one.unit[0], "num_chunks": one.unit[1]}
        made["ops"] = [_operation(inner, channels, buffers, remote) for inner in one.inner]
    return made
