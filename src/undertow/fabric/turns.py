"""Threads that wait, then work briefly, beside one that computes: when they wake, they are to run at once.

A thread that computes without a pause keeps its core for a whole *turn* of the scheduler, and one that wakes beside it
may wait so long. Linux (6.12 and later) lets a thread ask for shorter turns of its own: it then runs as soon as it
wakes, and its part of the core stays what it was, in smaller pieces. No privilege is needed. Measured beside a thread
that keeps the core busy, waking every millisecond to work for one: one time in ten it began 3.8 ms late; with turns of
0.1 and of 0.5 ms, 0.09 ms.
"""

from __future__ import annotations

import ctypes
import platform
import struct

_TURN_NANOSECONDS = 200_000
_TIMER_SLACK_NANOSECONDS = 5_000  # the usual 50 us would be added to every short sleep
_PR_SET_TIMERSLACK = 29
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")  # size, policy, flags, nice, priority, runtime, deadline, period, clamps
_OTHER = 0  # SCHED_OTHER
_RUNTIME = 5  # where the length of a turn stands


def ask_for_short_turns() -> None:
    """For the calling thread, as long as it lives. Where the system knows no such thing, nothing changes."""
    fields = _read()
    if fields is None:
        return
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NANOSECONDS), 0, 0, 0)
    if fields[1] != _OTHER:  # somebody chose this thread's scheduling: theirs counts
        return
    fields[0], fields[_RUNTIME] = _ATTRIBUTES.size, _TURN_NANOSECONDS
    library.syscall(_SCHED_SETATTR, 0, _ATTRIBUTES.pack(*fields), 0)


def turn() -> float | None:
    """Seconds of the calling thread's turn; None where the system does not tell."""
    fields = _read()
    return None if fields is None else fields[_RUNTIME] / 1e9


def _read() -> list[int] | None:
    """The calling thread's attributes, or None where they cannot be had."""
    if platform.system() != "Linux" or _SCHED_GETATTR is None:
        return None
    found = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if ctypes.CDLL(None).syscall(_SCHED_GETATTR, 0, found, _ATTRIBUTES.size, 0):
        return None
    return list(_ATTRIBUTES.unpack(found.raw))
