"""The loop of the simulator: runs the instructions of a schedule against the links of a machine, event by event.

A *flight* is one instruction in one iteration, from its start until its last byte has arrived. It reads what it needs
from other ranks (*pulls*: a request goes there, data come back) and writes to other ranks (*pushes*), streaming: a push
begins when the first bytes of all pulls are here, and ends no earlier than they do. Then

    out         the worker is done with it and goes on: the last byte has left, or has been read
    delivered   the last byte has arrived everywhere
    post        seen by the waiter at max(delivered of all that its worker has done so far, out + way of a signal)

Events: a message reaches its next link, a worker starts, pushes may begin, a message is over (fair sharing only). Posts
are no events: see `workers`. Flights, messages, posts and events under way are rows of arrays, handed out again when
they are over; an instruction that moves nothing and tells nobody has no flight. So memory follows what is under way.
One turn of the loop makes at most one flight; room is made before.
"""

from __future__ import annotations

from ..collective.schedule import END, NEEDED
from . import links as of_links
from . import workers as of
from .compiled import compiled
from .engines import has_engine, next_copy
from .event_queue import has_room, is_empty, put, settle, take
from .links import BOUND, FREE, HOP_AT, IS_PULL, LATENCY, ROUTE, SIZE, SPEED, fair_rates, note, progress, serve, work
from .workers import advance, begins, bytes_of, post

FINE, TOO_MANY, FULL = range(3)
_HOP, TRY, _GO, _PUSH, _OVER, _DUE, _FREED = range(7)
KIND_BITS = 3  # of an event; above them the number of what it is about
# Columns of flights and messages. A free row keeps the number of the next free one in its first column.
_LINKED, _WORKER, _INSTRUCTION, _LEFT, _HEADS, _LOGGED, _LINK = range(7)
_BYTES, _HEAD, _TAIL, _OUT, _DELIVERED = range(5)
_FLIGHT, _IS_WORK = 0, 2  # of messages: what it belongs to, beside the columns of `links`; neither pull nor push
_ARRIVES = 1
# Columns of the log: worker, instruction, iteration, begin, out, delivered, the flight that let it begin, and what
# bounded it: a link where sharing is fair, else a hop.
LOG_STEP, LOG_LINK, LOG_COLUMNS = 1, 7, 8


@compiled
def run(
    steps, waits, posts, pulls, pushes, pace, traffic, class_of, class_bytes, tile_bytes, push_factor, workers,
    iterations, semaphores, signal_seconds, route_start, route_link, request_seconds, links, curves, memory,
    memory_route, fair, forwards, step_seconds, message_seconds, engine_seconds, directed, ready_at, needed, parcels,
    traced, most_events, counters, clock, engines, queue, places, times, orders, heap, lists, list_times, pending,
    new_time, new_turn, new, stand, moment, flight_i, flight_f, message_i, message_f, post_i, post_f, active, room,
    users, touched, log, hop_i, hop_f,
):  # fmt: skip
    """Go on until all is over (FINE), more than `most_events` were met (TOO_MANY), or an array is full (FULL).

    `push_factor`: bytes on the wire for a byte pushed. `pace`, `traffic`: for each byte of its chunks, the seconds that
    an instruction keeps its worker, at least, and the bytes that it reads and writes in memory; link `memory` + rank is
    that of a rank, alone on route `memory_route` + rank. `ready_at[rank * parcels + p]`: when parcel p of a rank is
    complete. `needed`: when a tile's data came. What follows `most_events` is how things stand, see `State`: arrays are
    never made here, since a loop that made some would count references to all, which takes as long as all the rest.
    """
    by_engines = len(engines) > 0
    at_once = (
        not fair and not by_engines
    )  # a push begins where it is made, so that its worker knows at once when it ends
    news, flights, free_flight, messages = counters[0], counters[1], counters[2], counters[3]
    free_message, actives, logged, made = counters[4], counters[5], counters[6], counters[7]
    events, spare, again = counters[8], counters[9], counters[10]
    now, next_over, since = clock[0], clock[1], clock[2]
    dirty = clock[3] > 0
    verdict = FINE
    while True:
        if not has_room(queue, times, pending, news):
            verdict = FULL
            break
        for index in range(news):
            put(
                queue, places, times, orders, heap, lists, list_times, pending, new_time[index], new_turn[index],
                new[index],
            )  # fmt: skip
        news = 0
        settle(queue, times, orders, heap)
        if (
            flights == len(flight_i)
            or messages + spare > len(message_i)
            or counters[of.POSTS] + spare > len(post_i)
            or actives + spare > len(new)
            or actives == len(active)
            or (traced and (logged == len(log) or counters[of_links.HOPS] + spare > len(hop_i)))
        ):
            verdict = FULL
            break
        if fair:
            if dirty and (is_empty(queue) or times[0] > now):
                next_over, since, dirty = now, now, False
                next_over += fair_rates(
                    active, actives, message_i, message_f, route_start, route_link, links, room, users, touched,
                )  # fmt: skip
            if actives > 0 and (is_empty(queue) or next_over < times[0]):
                progress(active, actives, message_f, next_over - since)
                kept = 0
                for index in range(actives):
                    one = active[index]
                    if message_f[one, SIZE] <= message_f[one, SPEED] * next_over * 1e-13 + 1e-9:
                        new_time[news], new_turn[news], new[news] = next_over, 0, (one << KIND_BITS) | _OVER
                        news += 1
                    else:
                        active[kept] = one
                        kept += 1
                actives, dirty, now, since = kept, True, next_over, next_over
                continue
        if again >= 0:  # posts of this worker are due before anything else
            what, which = _DUE, again
        else:
            if is_empty(queue):
                break
            if events == most_events:
                verdict = TOO_MANY
                break
            now = times[0]
            payload = take(queue, heap, lists, list_times, pending)
            events += 1
            what, which = payload & ((1 << KIND_BITS) - 1), payload >> KIND_BITS
        go, push, over, flight = -1, -1, -1, -1  # what this event is about; the flight may be complete
        head, tail = 0.0, 0.0  # of a message, where it arrives
        coming, come_at = -1, 0.0  # an event that follows from this one

        if what == _GO:
            go = which
        elif what == TRY:
            if stand[which, of.STATE] == of.BLOCKED:  # else a post was quicker
                come_at = begins(
                    which, now, iterations, steps, waits, workers, semaphores, post_i, post_f, ready_at, parcels,
                    stand, moment, counters,
                )  # fmt: skip
                if come_at >= 0:
                    coming = (which << KIND_BITS) | _GO
        elif what == _DUE:
            flight = stand[which, of.OLDEST]
        elif what == _FREED:
            freed = next_copy(which, engines, message_i, route_start)
            if freed >= 0:
                coming, come_at = (freed << KIND_BITS) | _HOP, now + engine_seconds
                if message_i[freed, IS_PULL]:
                    come_at += request_seconds[message_i[freed, ROUTE]]
        elif what == _PUSH:
            push = which
        elif what == _OVER:
            over, tail = which, now
            for entry in range(route_start[message_i[over, ROUTE]], route_start[message_i[over, ROUTE] + 1]):
                tail += links[route_link[entry], LATENCY]
        elif fair:  # the message begins, and everybody's rate changes
            if not dirty:
                progress(active, actives, message_f, now - since)
                since, dirty = now, True
            active[actives] = which
            actives += 1
            begun, route, head = message_i[which, _FLIGHT], message_i[which, ROUTE], now
            for entry in range(route_start[route], route_start[route + 1]):
                link = route_link[entry]
                head += links[link, LATENCY]
                links[link, of_links.MOVED] += message_f[which, SIZE]
                links[link, of_links.BUSY] += message_f[which, SIZE] / links[link, of_links.RATE]
            if message_i[which, IS_PULL] == 1:
                flight_i[begun, _HEADS] -= 1
                flight_f[begun, _HEAD] = max(flight_f[begun, _HEAD], head)
                step = flight_i[begun, _INSTRUCTION]
                if flight_i[begun, _HEADS] == 0 and steps[step, of.PUSH_FROM] < steps[step, of.PUSH_TO]:
                    coming, come_at = (begun << KIND_BITS) | _PUSH, flight_f[begun, _HEAD]
        else:
            hop, link = message_i[which, HOP_AT], route_link[message_i[which, HOP_AT]]
            begin, end = serve(link, now, message_f[which, SIZE], message_f[which, _ARRIVES], forwards, links, curves)
            if traced:
                message_f[which, BOUND] = note(
                    link, now, begin, end, int(message_f[which, BOUND]), flight_i[message_i[which, _FLIGHT], _LOGGED],
                    links, hop_i, hop_f, counters,
                )  # fmt: skip
            head, tail = (end if forwards else begin) + links[link, LATENCY], end + links[link, LATENCY]
            if hop + 1 < route_start[message_i[which, ROUTE] + 1]:
                message_i[which, HOP_AT], message_f[which, _ARRIVES] = hop + 1, tail
                coming, come_at = (which << KIND_BITS) | _HOP, head
            else:
                over = which

        if over >= 0:
            flight, is_pull = message_i[over, _FLIGHT], message_i[over, IS_PULL]
            flight_i[flight, _LEFT] -= 1
            if is_pull != _IS_WORK:
                tail += message_seconds
            if tail >= max(flight_f[flight, _DELIVERED], flight_f[flight, _OUT]):  # what bounds the last bounds all
                flight_i[flight, _LINK] = int(message_f[over, BOUND])
            flight_f[flight, _DELIVERED] = max(flight_f[flight, _DELIVERED], tail)
            if is_pull or by_engines:  # read, copied or worked on: the worker has seen the end of it
                flight_f[flight, _OUT] = max(flight_f[flight, _OUT], tail)
            elif fair:
                flight_f[flight, _OUT] = max(flight_f[flight, _OUT], now)
            if is_pull == 1 and not fair:
                flight_i[flight, _HEADS] -= 1
                flight_f[flight, _HEAD] = max(flight_f[flight, _HEAD], head)
                flight_f[flight, _TAIL] = max(flight_f[flight, _TAIL], tail)
                if flight_i[flight, _HEADS] == 0 and flight_i[flight, _LEFT] > 0:
                    coming, come_at = (flight << KIND_BITS) | _PUSH, max(now, flight_f[flight, _HEAD])
            if by_engines and is_pull != _IS_WORK:
                engine = 2 * workers[flight_i[flight, _WORKER], of.RANK] + is_pull * directed
                new_time[news], new_turn[news], new[news] = tail, 0, (engine << KIND_BITS) | _FREED
                news += 1
            message_i[over, _FLIGHT], free_message = free_message, over

        if go >= 0:
            step = stand[go, of.AT]
            kind = steps[step, of.KIND]
            turn = iterations - 1 if kind == END else stand[go, of.TURN]
            stand[go, of.STATE] = of.BUSY
            made += 1
            nbytes = bytes_of(step, turn, steps, class_of, class_bytes, tile_bytes)
            pulled, pushed = 0, 0
            if nbytes > 0:
                pulled = steps[step, of.PULL_TO] - steps[step, of.PULL_FROM]
                pushed = steps[step, of.PUSH_TO] - steps[step, of.PUSH_FROM]
            sent = now + step_seconds
            out, worked, rank = sent + nbytes * pace[step], nbytes * traffic[step], workers[go, of.RANK]
            begin, end = 0.0, -1.0
            if worked > 0 and not fair:
                begin = max(sent, links[memory + rank, FREE])
                end = work(memory + rank, sent, worked, links)
                out, worked = max(out, end), 0.0
            hop = -1
            if traced:
                log[logged, 0], log[logged, 1], log[logged, 2], log[logged, 3] = go, step, turn, now
                log[logged, 4], log[logged, 5], log[logged, 6] = out, out, stand[go, of.CAUSE]
                if end >= 0:
                    hop = note(memory + rank, sent, begin, end, -1, logged, links, hop_i, hop_f, counters)
                log[logged, 7] = hop if end == out else -1
                stand[go, of.OWN] = logged
                logged += 1
            if pulled + pushed == 0 and worked == 0 and steps[step, of.POST_FROM] == steps[step, of.POST_TO]:
                # Nothing moves and nobody is told: it is over before whatever its worker does next.
                come_at = advance(
                    go, now, out, iterations, steps, waits, workers, semaphores, post_i, post_f, ready_at, parcels,
                    stand, moment, counters,
                )  # fmt: skip
                if come_at >= 0:
                    coming = (go << KIND_BITS) | _GO
            else:
                flight = free_flight
                if flight >= 0:
                    free_flight = flight_i[flight, _LINKED]
                else:
                    flight = flights
                    flights += 1
                flight_i[flight, _LINKED], flight_i[flight, _WORKER], flight_i[flight, _INSTRUCTION] = -1, go, step
                flight_i[flight, _LEFT], flight_i[flight, _HEADS] = pulled + pushed + (worked > 0), pulled
                flight_i[flight, _LINK], flight_i[flight, _LOGGED] = hop if end == out else -1, logged - 1
                flight_f[flight, _BYTES], flight_f[flight, _HEAD], flight_f[flight, _TAIL] = nbytes, now, 0.0
                flight_f[flight, _OUT] = out
                flight_f[flight, _DELIVERED] = out if pushed == 0 else now
                if stand[go, of.NEWEST] >= 0:
                    flight_i[stand[go, of.NEWEST], _LINKED] = flight
                else:
                    stand[go, of.OLDEST] = flight
                stand[go, of.NEWEST] = flight
            if kind == NEEDED:
                needed[rank * parcels + steps[step, of.NUMBER]] = now
            if forwards:  # whole messages leave after the sum, streams while it is made
                sent = out
            for index in range(pulled + (worked > 0)):
                fresh = free_message
                if fresh >= 0:
                    free_message = message_i[fresh, _FLIGHT]
                else:
                    fresh = messages
                    messages += 1
                message_i[fresh, _FLIGHT], message_f[fresh, _ARRIVES], message_f[fresh, BOUND] = flight, 0.0, -1
                if index == pulled:  # what it does in memory, beside what others do there
                    message_i[fresh, ROUTE], message_i[fresh, IS_PULL] = memory_route + rank, _IS_WORK
                    message_f[fresh, SIZE], reach = worked, sent
                else:
                    route = pulls[steps[step, of.PULL_FROM] + index]
                    message_i[fresh, ROUTE], message_i[fresh, HOP_AT] = route, route_start[route]
                    message_i[fresh, IS_PULL], message_f[fresh, SIZE] = 1, nbytes
                    reach = sent + request_seconds[route]
                    if by_engines:
                        if not has_engine(2 * rank + directed, fresh, engines, message_i):
                            continue
                        reach += engine_seconds
                # Requests leave one after the other: of those that arrive together, everybody's first goes first.
                new_time[news], new_turn[news], new[news] = reach, index, (fresh << KIND_BITS) | _HOP
                news += 1
            if pulled == 0 and pushed > 0:
                if sent > now:
                    coming, come_at = (flight << KIND_BITS) | _PUSH, sent
                else:
                    push = flight

        if push >= 0:
            flight, step = push, flight_i[push, _INSTRUCTION]
            nbytes = flight_f[flight, _BYTES] * push_factor
            for entry in range(steps[step, of.PUSH_FROM], steps[step, of.PUSH_TO]):
                route = pushes[entry]
                hop = route_start[route]
                head, tail, noted = now, flight_f[flight, _TAIL], -1
                if at_once:
                    link = route_link[hop]
                    begin, end = serve(link, now, nbytes, tail, forwards, links, curves)
                    if traced:
                        logs = flight_i[flight, _LOGGED]
                        noted = note(link, now, begin, end, -1, logs, links, hop_i, hop_f, counters)
                    flight_f[flight, _OUT] = max(flight_f[flight, _OUT], end)
                    head, tail = (end if forwards else begin) + links[link, LATENCY], end + links[link, LATENCY]
                    hop += 1
                    if hop == route_start[route + 1]:
                        if tail + message_seconds >= max(flight_f[flight, _DELIVERED], flight_f[flight, _OUT]):
                            flight_i[flight, _LINK] = noted
                        flight_f[flight, _DELIVERED] = max(flight_f[flight, _DELIVERED], tail + message_seconds)
                        flight_i[flight, _LEFT] -= 1
                        continue
                fresh = free_message
                if fresh >= 0:
                    free_message = message_i[fresh, _FLIGHT]
                else:
                    fresh = messages
                    messages += 1
                message_i[fresh, _FLIGHT], message_i[fresh, ROUTE] = flight, route
                message_i[fresh, HOP_AT], message_i[fresh, IS_PULL] = hop, 0
                message_f[fresh, SIZE], message_f[fresh, _ARRIVES], message_f[fresh, BOUND] = nbytes, tail, noted
                if by_engines:
                    if not has_engine(2 * workers[flight_i[flight, _WORKER], of.RANK], fresh, engines, message_i):
                        continue
                    head += engine_seconds
                new_time[news], new_turn[news], new[news] = head, 0, (fresh << KIND_BITS) | _HOP
                news += 1

        if coming >= 0:
            new_time[news], new_turn[news], new[news] = come_at, 0, coming
            news += 1
        if flight < 0:
            continue
        worker = flight_i[flight, _WORKER]
        complete = flight_i[flight, _LEFT] == 0
        ours = flight == stand[worker, of.NEWEST] and stand[worker, of.STATE] == of.BUSY
        if ours and (complete or (push >= 0 and at_once)):  # it is known when the worker is free: to its next step
            starts = advance(
                worker, now, flight_f[flight, _OUT], iterations, steps, waits, workers, semaphores, post_i, post_f,
                ready_at, parcels, stand, moment, counters,
            )  # fmt: skip
            if starts >= 0:
                new_time[news], new_turn[news], new[news] = starts, 0, (worker << KIND_BITS) | _GO
                news += 1
        again = -1
        flight = stand[worker, of.OLDEST]
        if complete and flight >= 0 and flight_i[flight, _LEFT] == 0:
            # Posts leave in the order of the worker's instructions, one instruction a turn.
            step = flight_i[flight, _INSTRUCTION]
            moment[worker, of.ARRIVED] = max(moment[worker, of.ARRIVED], flight_f[flight, _DELIVERED])
            for entry in range(steps[step, of.POST_FROM], steps[step, of.POST_TO]):
                semaphore = posts[entry]
                seen = max(moment[worker, of.ARRIVED], flight_f[flight, _OUT] + signal_seconds[semaphore], now)
                post(
                    semaphore, now, seen, flight_i[flight, _LOGGED], semaphores, post_i, post_f, counters,
                )  # fmt: skip
                waiter = semaphores[semaphore, of.WAITER]
                if stand[waiter, of.STATE] == of.BLOCKED:
                    starts = begins(
                        waiter, now, iterations, steps, waits, workers, semaphores, post_i, post_f, ready_at, parcels,
                        stand, moment, counters,
                    )  # fmt: skip
                    if starts >= 0:
                        new_time[news], new_turn[news], new[news] = starts, 0, (waiter << KIND_BITS) | _GO
                        news += 1
            if traced:
                place = flight_i[flight, _LOGGED]
                log[place, 4], log[place, 5] = flight_f[flight, _OUT], flight_f[flight, _DELIVERED]
                log[place, 7] = flight_i[flight, _LINK]
            following = flight_i[flight, _LINKED]
            stand[worker, of.OLDEST] = following
            if following < 0:
                stand[worker, of.NEWEST] = -1
            elif flight_i[following, _LEFT] == 0:
                again = worker
            flight_i[flight, _LINKED], free_flight = free_flight, flight

    counters[0], counters[1], counters[2], counters[3], counters[4] = news, flights, free_flight, messages, free_message
    counters[5], counters[6], counters[7], counters[8], counters[10] = actives, logged, made, events, again
    clock[0], clock[1], clock[2], clock[3] = now, next_over, since, 1.0 if dirty else 0.0
    return verdict
