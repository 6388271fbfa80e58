"""The flight recorder: order, wrapping, a killed writer, torn records, files."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from undertow import settings
from undertow.fabric import flight
from undertow.fabric.flight import RECORDS, RING_BYTES, FlightRing, write_flight_record
from undertow.fabric.segment import Segment


@pytest.fixture
def segment() -> Segment:
    return Segment.create(3 * RING_BYTES, "flight test")


def text(call: int) -> str:
    return json.dumps({"group": "g", "call": call, "operator": "matmul", "shape": "2x2", "plan": "serial"})


def in_a_fork(work: object) -> int:
    """Run `work` in a forked child; returns its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()  # type: ignore[operator]
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_calls_are_read_in_order_with_their_states(segment: Segment) -> None:
    writer, other, _ = FlightRing.many(segment, 3)
    writer.claim(rank=5)
    first, second, third = (writer.begin(text(call)) for call in (1, 2, 3))
    writer.end(second, failed=True)
    writer.end(first)
    reader = FlightRing.open(writer.path)
    records = reader.records()
    assert [(record["call"], record["state"]) for record in records] == [(1, "done"), (2, "failed"), (3, "running")]
    assert [record["sequence"] for record in records] == [first, second, third]
    assert records[0]["operator"] == "matmul"
    assert records[0]["end"] >= records[0]["start"] > 1e9
    assert records[2]["end"] == 0.0
    assert (reader.pid, reader.rank, reader.calls, reader.has_left) == (os.getpid(), 5, 3, False)
    assert other.records() == []
    writer.leave()
    assert reader.has_left


def test_the_last_64_calls_are_kept(segment: Segment) -> None:
    ring = FlightRing.many(segment, 1)[0]
    tickets = [ring.begin(text(call)) for call in range(200)]
    ring.end(tickets[0], failed=True)  # its place was taken long ago
    records = ring.records()
    assert [record["call"] for record in records] == list(range(200 - RECORDS, 200))
    assert {record["state"] for record in records} == {"running"}
    assert ring.calls == 200


def test_long_text_is_cut_and_kept_as_text(segment: Segment) -> None:
    ring = FlightRing.many(segment, 2)[0]
    ring.begin('{"operator": "' + "é" * 1000 + '"}')
    (record,) = ring.records()
    assert record["text"].startswith('{"operator": "éé')
    assert FlightRing.many(segment, 2)[1].records() == []


def test_torn_records_never_raise(segment: Segment) -> None:
    ring = FlightRing.many(segment, 1)[0]
    noise = random.Random(0)
    for _ in range(200):
        for index in range(RECORDS):
            ring.begin(text(index))
        for _ in range(50):
            ring._bytes[noise.randrange(RING_BYTES)] = noise.randrange(256)
        assert len(ring.records()) <= RECORDS


def test_a_killed_writer_loses_nothing(segment: Segment) -> None:
    path = FlightRing.many(segment, 3)[2].path

    def write_and_die() -> None:
        ring = FlightRing.open(path)
        ring.claim(rank=2)
        ring.end(ring.begin(text(1)))
        ring.begin(text(2))
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(in_a_fork(write_and_die)) == signal.SIGKILL
    ring = FlightRing.many(segment, 3)[2]
    assert [record["state"] for record in ring.records()] == ["done", "running"]
    assert not ring.has_left


def test_mine_is_one_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "_mine", None)
    mine = FlightRing.mine()
    assert FlightRing.mine() is mine
    assert mine.pid == os.getpid()
    assert FlightRing.open(mine.path).pid == os.getpid()

    def child() -> None:
        own = FlightRing.mine()
        assert own is FlightRing.mine()
        assert own.pid == os.getpid()
        own.begin(text(1))

    assert in_a_fork(child) == 0
    assert mine.records() == []


def test_mine_takes_the_launchers_slot_but_never_somebody_elses(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings = FlightRing.many(segment, 3)
    monkeypatch.setenv(settings.FLIGHT_RING.name, rings[1].path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(flight, "_mine", None)
    assert FlightRing.mine().path == rings[1].path
    assert (rings[1].pid, rings[1].rank) == (os.getpid(), 1)

    def child() -> None:  # inherits the variable
        assert FlightRing.mine().path != rings[1].path

    assert in_a_fork(child) == 0
    assert rings[1].pid == os.getpid()


@pytest.mark.parametrize("path", ["/proc/1/fd/9999:0", "nonsense", "no/such/file:x"])
def test_mine_survives_a_stale_variable(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.FLIGHT_RING.name, path)
    monkeypatch.setattr(flight, "_mine", None)
    assert FlightRing.mine().pid == os.getpid()


def test_opening_beyond_the_segment_is_refused(segment: Segment) -> None:
    for slot in (-1, 99):
        with pytest.raises(OSError, match="holds no flight ring"):
            FlightRing.open(f"{segment.path}:{slot}")


def test_recording_is_cheap(segment: Segment) -> None:
    ring = FlightRing.many(segment, 1)[0]
    data = text(1).encode()
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        ring.end(ring.begin(data))
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 50e-6  # about 3 us; the bound forgives a busy machine


def test_flight_records_are_files_of_which_20_stay(segment: Segment, tmp_path: Path) -> None:
    rings = dict(enumerate(FlightRing.many(segment, 2)))
    rings[1].claim(rank=1)
    rings[1].begin(text(7))
    files = [write_flight_record(tmp_path / "new", rings, f"cause {index}") for index in range(23)]
    assert sorted((tmp_path / "new").iterdir()) == sorted(files[3:])
    record = json.loads(files[-1].read_text())
    assert record["cause"] == "cause 22"
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
    assert record["ranks"][1]["pid"] == os.getpid()
    assert record["ranks"][1]["records"][0]["call"] == 7
    assert write_flight_record(tmp_path / "one.json", rings, "named") == tmp_path / "one.json"


def test_names_of_flight_records_sort_by_time_across_a_full_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([1_000_000_000_999_999_999, 1_000_000_001_000_000_001])
    monkeypatch.setattr(time, "time_ns", lambda: next(readings))
    files = [write_flight_record(tmp_path, {}, cause) for cause in ("before", "after")]
    assert files == sorted(files)


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in (settings.FLIGHT_DIR, settings.CACHE_DIR):
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert write_flight_record(None, {}, "none").parent == tmp_path / "undertow" / "flight"
    monkeypatch.setenv(settings.FLIGHT_DIR.name, str(tmp_path / "chosen"))
    assert write_flight_record(None, {}, "none").parent == tmp_path / "chosen"
