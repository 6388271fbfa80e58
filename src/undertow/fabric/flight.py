"""The flight recorder: this process's last calls, in memory that outlives it.

A ring lives in a `Segment`, so a SIGKILL of its writer takes nothing from it: the launcher and the peers of the node
read what the dead rank did last. Writing costs a few stores (`flight_writer`); nothing is locked against
readers. A reader may therefore meet a half-written record. It reports what it can and never raises.

    header (128 bytes): pid, state (0 alive, 1 left), calls ever begun, rank
    64 records (512 bytes each): sequence, state, start, end, length, text
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import settings
from . import flight_writer
from .flight_writer import (
    COUNT_WORD,
    DONE,
    FAILED,
    HEADER_BYTES,
    RECORD_BYTES,
    RECORDS,
    RING_BYTES,
    RUNNING,
    TEXT_BYTES,
    Text,
)
from .segment import Segment

KEPT_FILES = 20

_HEADER = struct.Struct("<qqqq")
_RECORD = struct.Struct("<qqddq")
_INTEGER = struct.Struct("<q")
_STATE_OFFSET, _COUNT_OFFSET, _RANK_OFFSET = 8, 8 * COUNT_WORD, 24  # in the header
_ALIVE, _LEFT = 0, 1
_STATE_NAMES = {RUNNING: "running", DONE: "done", FAILED: "failed"}


class FlightRing:
    """One process's ring of calls: slot `slot` of a segment that may hold the rings of several ranks."""

    def __init__(self, segment: Segment, slot: int, path: str) -> None:
        self.path = path
        self._segment = segment
        whole = segment.tensor(0, (segment.size,), torch.uint8).numpy().data
        self._bytes = whole[slot * RING_BYTES : (slot + 1) * RING_BYTES]
        self.address = segment.address + slot * RING_BYTES

    @staticmethod
    def mine() -> FlightRing:
        """This process's ring, made at the first call; a forked child gets a ring of its own."""
        global _mine
        found = _mine
        if found is None or found[0] != os.getpid():
            with _mine_lock:
                if _mine is None or _mine[0] != os.getpid():
                    _mine = (os.getpid(), _make_mine())
                found = _mine
        return found[1]

    @staticmethod
    def open(path: str) -> FlightRing:
        """The ring that its owner knows as `path`."""
        file, _, slot = path.rpartition(":")
        index = int(slot)
        segment = Segment.open(file)
        if not 0 <= index < segment.size // RING_BYTES:
            raise OSError(f"{path} holds no flight ring")
        return FlightRing(segment, index, path)

    @staticmethod
    def many(segment: Segment, count: int) -> list[FlightRing]:
        """Views of `count` rings in one segment of this process, one for each rank it launches."""
        return [FlightRing(segment, slot, f"{segment.path}:{slot}") for slot in range(count)]

    # -- writing -------------------------------------------------------------------------------------------------

    def begin(self, text: str | bytes | Text, number: int = -1) -> int:
        """Record that a call begins; `text` is JSON, cut to the room there is. Returns the ticket for `end`."""
        if not isinstance(text, Text):
            text = Text(text.encode() if isinstance(text, str) else text)
        return int(flight_writer.begin(self.address, text.address, text.length, number))

    def end(self, ticket: int, failed: bool = False) -> None:
        """Record that the call of `ticket` is over, unless 64 later calls have taken its place."""
        flight_writer.end(self.address, ticket, failed)

    def leave(self) -> None:
        """Say that this process finishes on purpose: its exit is no death."""
        _INTEGER.pack_into(self._bytes, _STATE_OFFSET, _LEFT)

    def claim(self, rank: int) -> None:
        """Make this process the owner of an unused ring."""
        _HEADER.pack_into(self._bytes, 0, os.getpid(), _ALIVE, 0, rank)

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._integer(0)

    @property
    def rank(self) -> int:
        return self._integer(_RANK_OFFSET)

    @property
    def calls(self) -> int:
        """How many calls were ever begun."""
        return self._integer(_COUNT_OFFSET)

    @property
    def has_left(self) -> bool:
        return self._integer(_STATE_OFFSET) == _LEFT

    def records(self) -> list[dict[str, Any]]:
        """The last calls, oldest first: sequence, state, start and end (seconds since 1970), and the call's fields."""
        copy = bytes(self._bytes)  # one look, so that a record does not change while it is taken apart
        found: list[dict[str, Any]] = []
        for index in range(RECORDS):
            offset = HEADER_BYTES + index * RECORD_BYTES
            sequence, state, start, end, length = _RECORD.unpack_from(copy, offset)
            if sequence <= 0:
                continue
            begin = offset + _RECORD.size
            fields = _fields(copy[begin : begin + min(length, TEXT_BYTES)])
            name = _STATE_NAMES.get(state, "unknown")
            found.append({**fields, "sequence": sequence, "state": name, "start": start, "end": end})
        return sorted(found, key=lambda record: int(record["sequence"]))

    def _integer(self, offset: int) -> int:
        return int(_INTEGER.unpack_from(self._bytes, offset)[0])


def write_flight_record(where: str | Path | None, rings: Mapping[int, FlightRing], cause: str) -> Path:
    """Write the calls of every rank as JSON and return the file.

    `where` is a file (`….json`), a folder, or None for the folder of `UNDERTOW_FLIGHT_DIR`. A folder keeps its newest
    20 records, so that a job which fails every night does not fill the disk.
    """
    target = default_folder() if where is None else Path(where)
    is_file = target.suffix == ".json"
    folder = target.parent if is_file else target
    folder.mkdir(parents=True, exist_ok=True)
    if not is_file:
        # One reading of the clock, in UTC, so that the names sort as the records were written.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))
        target = folder / f"flight-{stamp}-{nanoseconds:09d}-{os.getpid()}.json"
    ranks = [
        {"rank": rank, "pid": ring.pid, "left": ring.has_left, "calls": ring.calls, "records": ring.records()}
        for rank, ring in sorted(rings.items())
    ]
    target.write_text(json.dumps({"cause": cause, "time": time.time(), "ranks": ranks}, indent=1))
    if not is_file:
        for old in sorted(folder.glob("flight-*.json"))[:-KEPT_FILES]:
            old.unlink(missing_ok=True)
    return target


def default_folder() -> Path:
    """Where flight records go: `UNDERTOW_FLIGHT_DIR`, else the user's cache."""
    chosen = settings.FLIGHT_DIR.get()
    return Path(chosen) if chosen else settings.cache_folder() / "flight"


def _fields(data: bytes) -> dict[str, Any]:
    """The call's fields; text that was cut or torn is kept as text."""
    text = data.decode(errors="replace")
    try:
        fields = json.loads(text)
    except ValueError:
        return {"text": text}
    return fields if isinstance(fields, dict) else {"text": text}


def _make_mine() -> FlightRing:
    """The launcher's slot if it is there and nobody's yet, else a segment of our own.

    The variable is inherited by whatever this process starts, and a launcher may be gone: neither may end a program.
    """
    rank = int(os.environ.get("RANK", "0"))
    path = settings.FLIGHT_RING.get()
    if path:
        try:
            ring = FlightRing.open(path)
        except (OSError, ValueError):
            ring = None
        if ring is not None and ring.pid in (0, os.getpid()):
            ring.claim(rank)
            return ring
    segment = Segment.create(RING_BYTES, "flight ring")
    ring = FlightRing(segment, 0, f"{segment.path}:0")
    ring.claim(rank)
    return ring


_mine: tuple[int, FlightRing] | None = None
_mine_lock = threading.Lock()


def _forget_lock() -> None:
    """A forked child must not wait for a lock whose holder stayed in the parent."""
    global _mine_lock
    _mine_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
