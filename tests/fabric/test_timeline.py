"""Events, their arithmetic, the Chrome format and the recorder."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from undertow.errors import InvalidArgument
from undertow.fabric import timeline as module
from undertow.fabric.timeline import Event, Recorder, Timeline, current, event, recording

SECOND = 10**9


def work(engine: str, start: float, end: float, rank: int = 0, name: str = "work") -> Event:
    return Event(name, rank, engine, round(start * SECOND), round((end - start) * SECOND))


def test_overlap_counts_the_seconds_both_engines_are_busy() -> None:
    timeline = Timeline(
        [
            work("compute", 0, 4),
            work("compute", 6, 8),
            work("dma", 3, 7),
            work("dma", 7.5, 9),
        ]
    )
    # [3, 4] + [6, 7] + [7.5, 8]
    assert timeline.overlap("compute", "dma") == pytest.approx(2.5)
    assert timeline.overlap("dma", "compute") == pytest.approx(2.5)
    assert timeline.span("dma") == pytest.approx(6.0)
    assert timeline.busy("dma") == pytest.approx(5.5)
    assert timeline.overlap("compute", "net") == 0.0
    assert timeline.span("net") == 0.0


def test_nested_and_touching_events_are_counted_once() -> None:
    timeline = Timeline([work("a", 0, 10), work("a", 2, 3), work("a", 10, 12), work("b", 1, 11), work("b", 1, 11)])
    assert timeline.busy("a") == pytest.approx(12.0)
    assert timeline.overlap("a", "b") == pytest.approx(10.0)


def test_ranks_overlap_only_with_themselves() -> None:
    timeline = Timeline([work("compute", 0, 2, rank=0), work("dma", 1, 3, rank=1), work("compute", 2.5, 4, rank=1)])
    assert timeline.overlap("compute", "dma", rank=0) == 0.0
    assert timeline.overlap("compute", "dma", rank=1) == pytest.approx(0.5)
    assert timeline.overlap("compute", "dma") == pytest.approx(0.5)
    assert timeline.span("compute") == pytest.approx(4.0)
    assert timeline.span("compute", rank=1) == pytest.approx(1.5)


def test_chrome_format_has_ranks_as_processes_and_engines_as_threads() -> None:
    first = Timeline([work("compute", 100, 101, rank=0, name="gemm")], {"torch": "2"})
    second = Timeline([Event("put", 1, "dma", 100 * SECOND + 1500, 2500, "lane", {"bytes": 4096})], {"torch": "3"})
    data = first.merge([second]).to_chrome()
    json.dumps(data)
    metadata = [entry for entry in data["traceEvents"] if entry["ph"] == "M"]
    complete = [entry for entry in data["traceEvents"] if entry["ph"] == "X"]
    names = {(entry["name"], entry["pid"]): entry["args"]["name"] for entry in metadata if "name" in entry["args"]}
    assert names == {
        ("process_name", 0): "rank 0",
        ("process_name", 1): "rank 1",
        ("thread_name", 0): "compute",
        ("thread_name", 1): "dma",
    }
    assert [entry["name"] for entry in complete] == ["gemm", "put"]
    put = complete[1]
    assert (put["ts"], put["dur"], put["pid"], put["cat"], put["args"]) == (1.5, 2.5, 1, "lane", {"bytes": 4096})
    threads = {(entry["pid"], entry["tid"]) for entry in metadata if entry["name"] == "thread_name"}
    assert {(entry["pid"], entry["tid"]) for entry in complete} == threads
    assert data["otherData"]["environment"] == {"torch": "2"}


def test_save_and_load_keep_every_nanosecond(tmp_path: Path) -> None:
    uptime = 400 * 86400 * SECOND + 123_456_789
    timeline = Timeline(
        [
            Event("gemm", 0, "compute", uptime, 1, "", {"m": 64}),
            Event("put", 3, "dma", uptime + 5 * SECOND + 1, 7_000_001, "lane"),
        ],
        {"ranks": 4},
    )
    path = tmp_path / "traces" / "one.json"
    timeline.save(path)
    loaded = Timeline.load(path)
    assert loaded.events == timeline.events
    assert loaded.environment == {"ranks": 4}


def test_an_empty_timeline_is_a_valid_trace(tmp_path: Path) -> None:
    Timeline().save(tmp_path / "empty.json")
    assert len(Timeline.load(tmp_path / "empty.json")) == 0


def test_recorder_stamps_host_times(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = iter([1000, 1600, 2000, 2001])
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: next(stamps))
    recorder = Recorder(rank=2, device="cpu")
    with recorder.event("gemm", engine="compute", category="kernel", m=8):
        pass
    with pytest.raises(ZeroDivisionError), recorder.event("put", engine="dma"):
        1 / 0  # noqa: B018
    assert recorder.timeline().events == [
        Event("gemm", 2, "compute", 1000, 600, "kernel", {"m": 8}),
        Event("put", 2, "dma", 2000, 1, "", {}),
    ]


def test_module_event_does_nothing_without_a_recorder() -> None:
    assert current() is None
    assert event("gemm", "compute", m=1) is event("put", "dma"), "something was made for nothing"


def test_recording_reaches_other_threads_and_ends() -> None:
    def worker(index: int) -> None:
        for _ in range(50):
            with event("step", f"worker {index}"):
                pass

    with recording(Recorder(rank=0, device="cpu")) as recorder:
        threads = [threading.Thread(target=worker, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert current() is None
    with recorder.event("late", engine="worker 0"), event("late", "worker 0"):
        pass
    timeline = recorder.timeline({"ranks": 1})
    assert len(timeline) == 200
    assert sorted(timeline.engines) == [f"worker {index}" for index in range(4)]
    assert timeline.environment == {"ranks": 1}


def test_recordings_nest() -> None:
    with recording(Recorder(device="cpu")) as outer:
        with recording(Recorder(device="cpu")) as inner:
            with event("inside", "compute"):
                pass
            assert current() is inner
        assert current() is outer
        with event("outside", "compute"):
            pass
    assert [each.name for each in inner.timeline().events] == ["inside"]
    assert [each.name for each in outer.timeline().events] == ["outside"]


def test_a_failing_block_ends_its_recording() -> None:
    with pytest.raises(RuntimeError, match="boom"), recording(Recorder(device="cpu")):
        raise RuntimeError("boom")
    assert current() is None


def test_rank_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    assert Recorder(device="cpu").rank == 5
    with pytest.raises(InvalidArgument, match="device is 'tpu'"):
        Recorder(device="tpu")  # type: ignore[arg-type]


def test_processes_of_a_node_share_the_clock() -> None:
    before = time.perf_counter_ns()
    code = "import time; print(time.perf_counter_ns())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert before < int(answer.stdout) < time.perf_counter_ns()
