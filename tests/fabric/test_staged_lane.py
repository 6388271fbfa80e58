"""The staged lane without a GPU: its operations on a driver that runs streams in random orders.

All ranks live in this process. What each enqueues is run in an order that only the streams restrict: a flag that is
missing shows as wrong bytes, one too many as a deadlock.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import pytest
import torch
from fake_node import CHUNK, FakeSignals, Node

from undertow.collective.carry import Carrier
from undertow.fabric.base import Incoming, Outgoing
from undertow.fabric.signals import Step


def _tensor(values: int, first: int) -> torch.Tensor:
    return torch.arange(first, first + values, dtype=torch.int32)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("elements", [1, 100, CHUNK // 4, CHUNK, 5 * CHUNK])
def test_parcels_are_reduced_and_shared(ranks: int, elements: int, modules: Any) -> None:
    """As matmul_all_reduce does: pieces leave, are summed by their owners, and the sums come to everybody."""
    lanes, module, world = modules
    node = Node(ranks, lanes, module, world)
    parcels = 5
    buffers = [
        torch.stack([_tensor(ranks * elements, 1000 * rank + parcel) for parcel in range(parcels)])
        for rank in range(ranks)
    ]
    want = torch.stack([one.clone() for one in buffers]).sum(0).to(torch.int32)
    for rank in range(ranks):
        module.current_stream = lambda device: node.current[device]
        lane = node.lanes[rank]
        carrier = Carrier(node.groups[rank], lane, buffers[rank], elements)  # type: ignore[arg-type]
        streams = [world.new_stream() for _ in range(3)]

        def on(stream: int, rank: int = rank) -> None:
            node.current[rank] = stream

        for parcel in range(parcels):
            parts = list(buffers[rank][parcel].view(ranks, elements))
            on(streams[0])
            carrier.give(parcel, parts)
            module.after(streams[1], streams[0], 999)
            on(streams[1])
            mine = parts[rank]

            def combine(found: list[torch.Tensor], mine: torch.Tensor = mine, stream: int = streams[1]) -> None:
                def act() -> None:
                    mine.copy_(torch.stack(found).sum(0))

                world.put(stream, act)

            carrier.reduce(parcel, mine, combine)
            carrier.share(parcel, mine)
            on(streams[2])
            carrier.receive(parcel, parts, shared=True)
        on(streams[0])
        lane.flush()
    world.run(seed=ranks * elements)
    for rank in range(ranks):
        assert torch.equal(buffers[rank], want), rank
    if elements == 100 and ranks > 2:
        # What a rank sums comes in one copy, and leaves in two, around its own place, unless that is at an end.
        assert world.copies.count((4 * elements * (ranks - 1), ranks - 1)) >= parcels * (ranks + 2)
        assert len(world.copies) == parcels * (ranks + 2 * (2 * ranks - 2) + ranks)


@pytest.mark.parametrize("seed", range(20))
def test_uneven_messages_in_random_orders(seed: int, modules: Any) -> None:
    """As matmul_all_to_all does with uneven splits: empty ones, short ones, ones longer than the ring."""
    lanes, module, world = modules
    ranks = 2 + seed % 5
    node = Node(ranks, lanes, module, world)
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([0, 1, 40, CHUNK // 4, CHUNK, 6 * CHUNK])
    parcels = 4
    counts = sizes[torch.randint(len(sizes), (parcels, ranks, ranks), generator=generator)]
    sent = [
        [[_tensor(int(counts[p, s, d]), 7 * s + 3 * d + p) for d in range(ranks)] for s in range(ranks)]
        for p in range(parcels)
    ]
    got = [[[torch.full_like(sent[p][s][d], -1) for s in range(ranks)] for d in range(ranks)] for p in range(parcels)]
    for rank in range(ranks):
        module.current_stream = lambda device: node.current[device]
        lane, streams = node.lanes[rank], [world.new_stream(), world.new_stream()]
        for parcel in range(parcels):
            ahead = [(rank + step) % ranks for step in range(1, ranks)]
            behind = [(rank - step) % ranks for step in range(1, ranks)]
            node.current[rank] = streams[0]
            out = [Outgoing(d, sent[parcel][rank][d], None, 0, parcel % 2) for d in ahead if len(sent[parcel][rank][d])]
            lane.exchange(out, [])
            node.current[rank] = streams[1]
            come = [
                Incoming(s, None, 0, len(got[parcel][rank][s]), parcel % 2, got[parcel][rank][s])
                for s in behind
                if len(got[parcel][rank][s])
            ]
            lane.exchange([], come)
    world.run(seed)
    for parcel in range(parcels):
        for sender in range(ranks):
            for rank in range(ranks):
                if rank != sender:
                    assert torch.equal(got[parcel][rank][sender], sent[parcel][sender][rank]), (parcel, sender, rank)


def test_a_missing_flag_shows(modules: Any) -> None:
    """The driver's random order finds a copy in that does not wait for the bytes."""
    lanes, module, world = modules
    node = Node(2, lanes, module, world)
    for lane in node.lanes:
        lane._accept = dict.fromkeys(lane._accept, b"")
    wrong = 0
    for turn in range(10):
        source, into = _tensor(50, turn), torch.full((50,), -1, dtype=torch.int32)
        module.current_stream = lambda device: node.current[device]
        node.lanes[0].exchange([Outgoing(1, source, None, 0, turn % 2)], [])
        node.lanes[1].exchange([], [Incoming(0, None, 0, 50, turn % 2, into)])
        world.run(turn)
        wrong += not torch.equal(source, into)
    assert wrong > 0


def test_steps_pack_as_the_driver_reads_them(modules: Any) -> None:
    _, module, world = modules
    memory = (ctypes.c_byte * 1024)()
    signals = FakeSignals(memory, module, 0, 2)
    stream = world.new_stream()
    module.batch(stream, signals.packed([Step(False, 0, 1, -5), Step(True, 0, 1, -5), Step(False, 0, 0, 9)]))
    world.run(0)
    assert ctypes.c_int32.from_address(signals.address(0, 1)).value == -5
    assert ctypes.c_int32.from_address(signals.address(0, 0)).value == 9


class Memory(NamedTuple):
    """As much of a tensor as joining chunks looks at."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def test_rows_too_far_apart_are_copied_one_by_one(modules: Any) -> None:
    lanes, _, _ = modules
    for step, copies in ((1 << 20, 1), ((1 << 31) - 1, 1), (1 << 31, 3)):
        for near, far in ((100, step), (step, 100)):  # in the rings, on the device
            chunks = [lanes._Chunk(peer, 0, peer * near, Memory(peer * far), 0, 64) for peer in range(3)]
            assert len(lanes._joined(chunks, None)) == copies


def test_only_rows_at_even_distances_are_joined(modules: Any) -> None:
    lanes, _, _ = modules
    for hosts, devices, copies in (
        ((0, 100, 200), (0, 70, 140), [3]),
        ((0, 100, 200), (0, 70, 210), [2, 1]),  # a gap on the device
        ((0, 100, 300), (0, 70, 140), [2, 1]),  # a gap in the rings
        ((0, 100, 200), (140, 0, 70), [1, 2]),  # rows must follow each other upwards
        ((0, 10, 20), (0, 70, 140), [1, 1, 1]),  # and must not overlap
    ):
        chunks = [lanes._Chunk(peer, 0, hosts[peer], Memory(devices[peer]), 0, 64) for peer in range(3)]
        assert [rows.height for _, rows in lanes._joined(chunks, None)] == copies
    sizes = [lanes._Chunk(peer, 0, 100 * peer, Memory(100 * peer), 0, 64 - peer) for peer in range(3)]
    assert len(lanes._joined(sizes, None)) == 3
    places = [lanes._Chunk(one // 2, one % 2, 100 * one, Memory(70 * one), 0, 64) for one in range(4)]
    ((held, rows),) = lanes._joined(places, None)  # two messages to each of two peers
    assert (held, rows.height) == ([(0, 0), (0, 1), (1, 0), (1, 1)], 4)


def test_copies_of_a_graph_stay_inside_their_memory(modules: Any) -> None:
    """The driver counts a whole step for the last row of a captured copy."""
    lanes, _, _ = modules
    memory = torch.zeros(4, 100, dtype=torch.uint8)
    for first, rings, heights in ((0, 300, [3]), (1, 300, [2, 1]), (0, 290, [2, 1])):  # 30 bytes in rows 0 to 2, 1 to 3
        chunks = [lanes._Chunk(peer, 0, 100 * peer, memory[first + peer, 60:90], 0, 30) for peer in range(3)]
        assert [rows.height for _, rows in lanes._joined(chunks, None)] == [3]
        assert [rows.height for _, rows in lanes._joined(chunks, rings)] == heights


def test_a_long_stop_is_made_in_pieces(modules: Any) -> None:
    """The driver takes at most 255 operations at once: sixteen ranks with sixteen parcels are more."""
    _, module, world = modules
    words = (ctypes.c_int32 * 600)()
    address = ctypes.addressof(words)
    stream = world.new_stream()
    steps = [(False, address + 4 * one, one + 1) for one in range(300)]
    steps += [(True, address + 4 * one, one + 1) for one in range(300)]
    module.batch(stream, module.packed(steps))
    world.run(0)
    assert list(words[:300]) == list(range(1, 301))
    assert world.stops == 3
