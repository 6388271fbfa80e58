"""A queue of events in arrays: the earliest first; among those of one moment the lowest turn, then first come.

Ranks that do the same do it at the same moment, to the last bit. So what is kept in order are not events but *moments*:
(time, turn) pairs, each with a list of its events. A small table finds the list of a moment that was met not long ago;
where two moments fall to one place of it, the later one gets it, and should the first come again it simply has a second
list, which the counter of lists puts behind the first. So a simulation is the same on every machine and in both cores.

The lists stand in a heap of four children a node, which is half as deep as a binary one. Taking the last event of a
list leaves the top of the heap *vacant*, for mostly another moment comes at once and takes its place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled

_PLACES = 1 << 10
_TURN_BITS = 44
# Columns of state.
SIZE, _MADE, _FREE_LIST, _LISTS, _FREE_EVENT, EVENTS, _VACANT = range(7)
_FIRST, _LAST, _TURN = range(3)  # columns of lists; a free list keeps the next free one as its first
_PAYLOAD, _NEXT = range(2)  # columns of events; free ones keep the next free one


def empty_state() -> NDArray[np.int64]:
    state = np.zeros(8, np.int64)
    state[_FREE_LIST] = state[_FREE_EVENT] = -1
    return state


def empty_places() -> NDArray[np.int64]:
    return np.full(_PLACES, -1, np.int64)


@compiled
def has_room(state, heap_times, events, count):
    """Whether so many more events fit."""
    return state[SIZE] + count < len(heap_times) and state[EVENTS] + count < len(events)


@compiled
def is_empty(state):
    return state[SIZE] == 0


@compiled
def _rise(times, orders, lists, at, time, order, which):
    while at > 0:
        above = (at - 1) >> 2
        if times[above] < time or (times[above] == time and orders[above] < order):
            break
        times[at], orders[at], lists[at] = times[above], orders[above], lists[above]
        at = above
    times[at], orders[at], lists[at] = time, order, which


@compiled
def _sink(times, orders, lists, size, time, order, which):
    at = 0
    while True:
        below = 4 * at + 1
        if below >= size:
            break
        least, least_time = below, times[below]
        end = below + 4 if below + 4 < size else size
        for other in range(below + 1, end):
            if times[other] < least_time or (times[other] == least_time and orders[other] < orders[least]):
                least, least_time = other, times[other]
        if least_time > time or (least_time == time and orders[least] > order):
            break
        times[at], orders[at], lists[at] = least_time, orders[least], lists[least]
        at = least
    times[at], orders[at], lists[at] = time, order, which


@compiled
def put(state, places, heap_times, heap_orders, heap_lists, lists, list_times, events, time, turn, payload):
    """Put one event in; there must be room."""
    event = state[_FREE_EVENT]
    if event >= 0:
        state[_FREE_EVENT] = events[event, _NEXT]
    else:
        event = state[EVENTS]
        state[EVENTS] += 1
    events[event, _PAYLOAD], events[event, _NEXT] = payload, -1
    # Any function of the time will do that spreads times which differ in a few bits.
    place = int(time * 9.007199254740993e15) & 0x7FFFFFFFFFFFFFFF
    place = (place ^ (place >> 11) ^ (place >> 23) ^ turn) & (_PLACES - 1)
    found = places[place]
    if found >= 0 and list_times[found] == time and lists[found, _TURN] == turn:
        events[lists[found, _LAST], _NEXT] = event
        lists[found, _LAST] = event
        return
    found = state[_FREE_LIST]
    if found >= 0:
        state[_FREE_LIST] = lists[found, _FIRST]
    else:
        found = state[_LISTS]
        state[_LISTS] += 1
    places[place] = found
    list_times[found] = time
    lists[found, _FIRST], lists[found, _LAST], lists[found, _TURN] = event, event, turn
    order = (turn << _TURN_BITS) + state[_MADE]
    state[_MADE] += 1
    if state[_VACANT]:
        state[_VACANT] = 0
        _sink(heap_times, heap_orders, heap_lists, state[SIZE], time, order, found)
    else:
        _rise(heap_times, heap_orders, heap_lists, state[SIZE], time, order, found)
        state[SIZE] += 1


@compiled
def settle(state, heap_times, heap_orders, heap_lists):
    """Close the place at the top if nobody took it; the queue can be read after that."""
    if state[_VACANT]:
        state[_VACANT] = 0
        state[SIZE] -= 1
        size = state[SIZE]
        if size > 0:
            _sink(heap_times, heap_orders, heap_lists, size, heap_times[size], heap_orders[size], heap_lists[size])


@compiled
def take(state, heap_lists, lists, list_times, events):
    """The payload of the first event, whose time is heap_times[0]."""
    found = heap_lists[0]
    event = lists[found, _FIRST]
    payload, after = events[event, _PAYLOAD], events[event, _NEXT]
    events[event, _NEXT] = state[_FREE_EVENT]
    state[_FREE_EVENT] = event
    if after >= 0:
        lists[found, _FIRST] = after
    else:
        list_times[found] = -1.0  # no moment: nobody appends to it any more
        lists[found, _FIRST], state[_FREE_LIST] = state[_FREE_LIST], found
        state[_VACANT] = 1
    return payload
