"""The words by which fused lookups tell places and slices, under a fake driver: any order of streams, calls in a row.

A kernel is as many operations as it has slices, each the work of a slice's last CTA. Calls follow each other without a
host in between, as in a replayed graph, so a rank may be a whole call ahead of another.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_driver import World
from no_driver import imported

from undertow.fabric.signals import Step
from undertow.plan.bags import Layout, Piece, slices
from undertow.plan.plan import SLICES, Plan, split
from undertow.plan.tiles import chunks

CALLS = 4


@pytest.fixture(name="cuda")
def embedding_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with imported("undertow.ops.embedding_peers", monkeypatch) as module:
        yield module


class Words:
    """Words of all ranks; what is performed goes to this rank's stream."""

    def __init__(self, world: World, stream: int, memory: np.ndarray[Any, Any], rank: int) -> None:
        self._world, self._stream, self._memory, self._rank = world, stream, memory, rank

    def address(self, rank: int, index: int) -> int:
        return int(self._memory[rank, index : index + 1].ctypes.data)

    def perform(self, steps: Sequence[Step]) -> None:
        for waits, rank, word, value, _ in steps:
            address = self.address(rank, word)
            if waits:
                self._world.wait_value(self._stream, address, value, 0)
            else:
                self._world.write_value(self._stream, address, value, 0)


def played(cuda: Any, seed: int, ranks: int, parcels: int, clear_late: bool = False) -> None:
    """All ranks, several calls; every slice must find the place that its destination chose for that very call.

    Calls of both kinds follow each other: with words that streams wait for, and as one kernel that waits itself.
    """
    world = World()
    memory = [np.zeros((ranks, 2 * ranks * cuda.MOST_PARCELS), np.int32) for _ in range(2)]
    batches, held = [3, 2, 4, 1][:ranks], [True, seed % 3 > 0, True, True][:ranks]
    plan = Plan("fused", "peer", split(4, parcels), order=SLICES, own_last=True)
    places = np.full((ranks, 2, ranks, parcels), -1)  # the call that wrote a slice last
    for rank in range(ranks):
        stream, made = world.new_stream(), iter(memory)
        exchange = cuda.Exchange(
            SimpleNamespace(
                group=SimpleNamespace(size=ranks, rank=rank),
                signals=lambda count, stream=stream, rank=rank, made=made: Words(world, stream, next(made), rank),
            )
        )
        here = [parcel for parcel, ranges in enumerate(chunks(batches, plan)) if ranges[rank][1]]
        sources = [one for one in range(ranks) if held[one] and one != rank]
        leaving = slices(batches, plan, rank) if held[rank] else ()
        for call in range(CALLS):
            place, in_kernel = (call + rank) % 2, (seed >> call) % 2 == 0
            words = exchange.words("fused" if in_kernel else "serial")
            if in_kernel:
                for address in words.told(sources, here):
                    world.write_value(stream, address, place + 1, 0)
                for one in leaving:
                    if one.destination != rank:
                        world.wait_value(stream, words.choice(one.destination, one.parcel), 1, 0)
            else:
                words.begin(place, sources, here, leaving)
            for one in leaving:
                _finish(world, stream, words, places, rank, one, call, place, clear_late)
            if in_kernel:
                for address in words.awaited(sources, here):
                    world.wait_value(stream, address, 1, 0)
                    world.write_value(stream, address, 0, 0)
            else:
                words.arrived(sources, here)

            def checked(rank: int = rank, place: int = place, call: int = call, here: Any = tuple(here)) -> None:
                for source, parcel in itertools.product(range(ranks), here):
                    if held[source]:
                        assert places[rank, place, source, parcel] == call

            world.put(stream, checked)
    world.run(seed)
    for part in memory:
        assert not part[:, ranks * cuda.MOST_PARCELS :].any(), "every arrival is cleared"
    assert not memory[1].any(), "in a kernel's words every choice is, too"


def _finish(
    world: World, stream: int, words: Any, places: Any, rank: int, one: Any, call: int, own: int, clear_late: bool
) -> None:
    address = words.choice(one.destination, one.parcel)
    choice = ctypes.c_int32.from_address(address) if address else ctypes.c_int32(own + 1)
    signal = words.signal(one.destination, one.parcel)
    assert (signal == 0) == (one.destination == rank)

    def clear() -> None:
        choice.value = 0

    def act() -> None:
        places[one.destination, choice.value - 1, rank, one.parcel] = call
        if signal:
            if not clear_late:
                clear()
            ctypes.c_int32.from_address(signal).value = 1

    world.put(stream, act)
    if clear_late and signal:
        world.put(stream, clear)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_order_is_right(cuda: Any, ranks: int) -> None:
    for seed in range(15):
        played(cuda, seed, ranks, 1 + seed % 3)


def test_a_choice_that_is_cleared_too_late_is_seen(cuda: Any) -> None:
    """A destination that knows of a slice chooses again at once; clearing after that would lose its choice."""
    lost = 0
    for seed in range(80):
        try:
            played(cuda, seed, 3, 1, clear_late=True)
        except AssertionError:
            lost += 1
    assert lost > 0


# -- places ------------------------------------------------------------------------------------------------------------


class _Space:
    """Symmetric memory of one rank, in the host's."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.local = nbytes, torch.zeros(nbytes, dtype=torch.uint8)

    def address(self, rank: int) -> int:
        return self.local.data_ptr()

    def reaches(self, rank: int) -> bool:
        return True


class _Graph:
    """A graph that is being captured; `is_gone` once nobody can replay it."""

    def __init__(self, number: int) -> None:
        self.number, self.is_gone = number, False


def one_rank(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, capture: list[int] | None = None, order: list[str] | None = None
) -> Any:
    """An exchange of one rank whose workspace grows as a fabric's, and a torch that takes host memory for a GPU's.

    `capture`: the number of the one that calls are in, now. `order`: what is said of the order of calls.
    """
    said = order if order is not None else []
    capture = capture or [0]
    held: dict[str, _Space] = {}

    def workspace(purpose: str, nbytes: int) -> _Space:
        if purpose not in held or held[purpose].nbytes < nbytes:
            held[purpose] = _Space(-(-nbytes // (1 << 20)) * (1 << 20))
        return held[purpose]

    def as_tensor(leased: Any, device: object = None) -> torch.Tensor:
        about = leased.__cuda_array_interface__
        memory = (ctypes.c_ubyte * about["shape"][0]).from_address(about["data"][0])
        memory.lease = leased  # type: ignore[attr-defined]
        return torch.from_numpy(np.frombuffer(memory, np.uint8))

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capture[0] > 0)
    monkeypatch.setattr(cuda.stream_memory, "current_stream", lambda device: 0)
    monkeypatch.setattr(cuda.stream_memory, "capture_of", lambda stream: capture[0])
    monkeypatch.setattr(cuda, "Captured", lambda stream: _Graph(capture[0]))
    group, device = SimpleNamespace(size=1, rank=0), torch.device("cpu")
    fabric = SimpleNamespace(
        group=group, device=device, workspace=workspace, signals=lambda count: None, rest=lambda: None,
        follow=lambda what: said.append(f"follow {what}"), enqueued=lambda what: said.append(f"enqueued {what}"),
    )  # fmt: skip
    return cuda.Exchange(fabric)


def test_calls_follow_each_other_from_the_place_on_to_what_is_copied_out(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any streams: a second call tells its place only when the first is over, and has been read."""
    order: list[str] = []
    exchange, layout = one_rank(cuda, monkeypatch, order=order), Layout(((Piece(0, 10, 64),),))
    kept = exchange.take(layout, [4], torch.empty(0))
    copied = exchange.take(layout, [4], torch.empty(0))
    assert order == 2 * [f"follow {cuda.WAITING}"]
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: order.append("copied") or tensor)
    assert (kept.finish().data_ptr(), copied.place) == (kept.whole.data_ptr(), 0)
    copied.finish()
    assert order[2:] == [f"enqueued {cuda.WAITING}", "copied", f"enqueued {cuda.WAITING}"]


def test_a_narrow_call_leaves_a_wide_result_alone(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All shapes share the places; the one that is held is the wider."""
    exchange, like = one_rank(cuda, monkeypatch), torch.empty(0)
    wide = exchange.take(Layout(((Piece(0, 10, 64),),)), [1024], like)
    wide.whole.fill_(1)
    narrow = exchange.take(Layout(((Piece(0, 10, 8),),)), [1024], like)
    narrow.whole.fill_(2)
    assert (wide.place, narrow.place) == (1, 0), "a source that the watchdog releases finds a 1: the first place"
    assert bool((wide.whole == 1).all())


def test_memory_goes_when_places_grow_and_not_with_a_result(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symmetric memory that goes waits for kernels, which may wait for a thread of this process."""
    exchange, like, places = one_rank(cuda, monkeypatch), torch.empty(0), []
    for rows in (1 << 10, 1 << 16, 1 << 17):
        kept = exchange.take(Layout(((Piece(0, 10, 64),),)), [rows], like)
        places.append(weakref.ref(exchange._memory[kept.base[0]]))
        assert [one() is None for one in places] == [number < len(places) - 2 for number in range(len(places))]
    kept.whole.fill_(1)


LAYOUT = Layout(((Piece(0, 10, 8),),))


def test_a_captured_call_takes_no_place_that_another_may_get(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay writes to its place again, whoever holds a result by then; the result is that very place."""
    capture = [7]
    exchange, like = one_rank(cuda, monkeypatch, capture), torch.empty(0)
    captured = exchange.take(LAYOUT, [4], like)
    written = captured.whole.data_ptr()
    assert captured.finish().data_ptr() == written
    del captured  # as a caller does whose graph only has to be replayed
    capture[0] = 0
    held = exchange.take(LAYOUT, [4], like)
    another = exchange.take(LAYOUT, [4], like)
    capture[0] = 8
    other = exchange.take(LAYOUT, [4], like)
    assert len({written, *(one.whole.data_ptr() for one in (held, other))}) == 3
    assert other.finish().data_ptr() not in (written, other.whole.data_ptr()), "a second graph copies out"
    assert (held.place, another.place, other.place) == (1, 0, 0)


def test_calls_of_one_capture_share_a_place_when_the_first_result_is_dropped(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, like = one_rank(cuda, monkeypatch, [7]), torch.empty(0)
    first = exchange.take(LAYOUT, [4], like)
    second = exchange.take(LAYOUT, [4], like)
    assert (first.place, second.place) == (2, 0)
    kept = first.finish(), second.finish()
    assert kept[0].data_ptr() != kept[1].data_ptr(), "two results of one graph that are both kept"
    del first, second, kept
    assert exchange.take(LAYOUT, [4], like).place == 2


def test_a_place_is_free_again_when_its_graph_and_its_result_are_gone(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = [7]
    exchange, like = one_rank(cuda, monkeypatch, capture), torch.empty(0)
    kept = exchange.take(LAYOUT, [4], like).whole
    exchange._graph.is_gone = True
    capture[0] = 8
    assert exchange.take(LAYOUT, [4], like).place == 0, "its result is still held"
    del kept
    again = exchange.take(LAYOUT, [4], like).place
    assert again == 2


def test_more_places_serve_more_graphs(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = [1]
    monkeypatch.setattr(cuda, "PLACES", 5)
    exchange, like = one_rank(cuda, monkeypatch, capture), torch.empty(0)
    found = []
    for capture[0] in (1, 2, 3, 4):
        found.append(exchange.take(LAYOUT, [4], like).place)
    assert found == [2, 3, 4, 0]


def test_a_place_told_again_waits_for_the_stream_that_had_it(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is dropped while the stream of its call still reads it; the next call is on another stream."""

    class Stream:
        def __init__(self) -> None:
            self.waited_for: list[Stream] = []

        def wait_stream(self, other: Stream) -> None:
            self.waited_for.append(other)

    exchange, like, layout = one_rank(cuda, monkeypatch), torch.empty(0), Layout(((Piece(0, 10, 8),),))
    first, second = Stream(), Stream()
    for stream in (first, first, second, second):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        assert exchange.take(layout, [4], like).place == 1
    assert (first.waited_for, second.waited_for) == ([], [first])


def test_the_first_call_is_refused_in_a_capture(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are made collectively, by the host: nothing of that can be captured."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(cuda.InvalidArgument, match="before it is captured"):
        cuda.Exchange.of(SimpleNamespace(kept={}))
