"""What a link does with a message: one after the other, or all at once with equal shares. Compiled loops.

*FIFO.* A message that reaches a link at t begins there at max(t, when the link is free) and keeps it for
service = bytes / rate (or what the link's curve says). Cut-through: it goes on as soon as it begins, and its end is not
before the end of what still arrives; store-and-forward: it goes on when it ends.

*Max-min fair.* Every message moves over all its links at one rate. Rates grow together until a link is full; the
messages on it keep what they have, the others grow on. No message can get more without one that has less losing some.
"""

from __future__ import annotations

import math

import numpy as np

from .compiled import compiled

FREE, BUSY, MOVED, RATE, LATENCY = range(5)  # columns of links: seconds, seconds, bytes, bytes per second, seconds
LINK_COLUMNS = 8
ROUTE, HOP_AT, IS_PULL = 1, 2, 3  # columns of messages: numbers
# Bytes that are left; bytes per second; fair: the link that lets it have no more, FIFO: its last hop that was noted.
SIZE, SPEED, BOUND = 0, 2, 3
CURVE_FROM, CURVE_TO = 5, 6  # rows of `curves`; equal where the link has none
LAST = 7  # of links: the last hop that was noted
# Columns of hops: the logged flight, the link, the hop before of the same message, the hop before on the same link; and
# when the message came there, began, let the next one begin, had left.
HOP_FLIGHT, HOP_LINK, HOP_BEFORE, HOP_AHEAD = range(4)
HOP_CAME, HOP_BEGAN, HOP_FREED, HOP_LEFT = range(4)
HOPS = 13  # of counters: how many are noted


@compiled
def service_seconds(link, nbytes, links, curves):
    """Seconds for which a message keeps a link. Curves hold logarithms; outside them: `plan.machine.at`'s rule."""
    first, last = int(links[link, CURVE_FROM]), int(links[link, CURVE_TO])
    if first == last or nbytes <= 0:
        return nbytes / links[link, RATE]
    amount = math.log(nbytes)
    if amount <= curves[first, 0]:
        return math.exp(curves[first, 1])
    if amount >= curves[last - 1, 0]:
        return math.exp(curves[last - 1, 1] + amount - curves[last - 1, 0])
    at = first + 1
    while curves[at, 0] < amount:
        at += 1
    share = (amount - curves[at - 1, 0]) / (curves[at, 0] - curves[at - 1, 0])
    return math.exp(curves[at - 1, 1] + share * (curves[at, 1] - curves[at - 1, 1]))


@compiled
def serve(link, now, nbytes, arrives, forwards, links, curves):
    """Put a message through a FIFO link: when it begins there and when its last byte has left.

    `arrives`: when its last byte gets here. While that is late, the link has time for others.
    """
    service = service_seconds(link, nbytes, links, curves)
    begin = max(now, links[link, FREE])
    end = begin + service
    links[link, FREE] = end
    links[link, BUSY] += service
    links[link, MOVED] += nbytes
    if not forwards and arrives > end:
        end = arrives
    return begin, end


@compiled
def note(link, now, begin, end, before, flight, links, hop_i, hop_f, counters):
    """Write down how a FIFO link served a message; the row."""
    row = counters[HOPS]
    counters[HOPS] += 1
    hop_i[row, HOP_FLIGHT], hop_i[row, HOP_LINK], hop_i[row, HOP_BEFORE] = flight, link, before
    hop_i[row, HOP_AHEAD] = int(links[link, LAST])
    hop_f[row, HOP_CAME], hop_f[row, HOP_BEGAN], hop_f[row, HOP_FREED] = now, begin, links[link, FREE]
    hop_f[row, HOP_LEFT] = end
    links[link, LAST] = row
    return row


@compiled
def work(memory, now, nbytes, links):
    """Let a FIFO memory read and write: when it has. Less than `serve`: nothing arrives, and it has no curve."""
    end = max(now, links[memory, FREE]) + nbytes / links[memory, RATE]
    links[memory, FREE] = end
    links[memory, BUSY] += nbytes / links[memory, RATE]
    links[memory, MOVED] += nbytes
    return end


@compiled
def fair_rates(active, count, message_i, message_f, route_start, route_link, links, room, users, touched):
    """Fill the speeds of the first `count` active messages, bytes per second: in how many seconds the first is over.

    Progressive filling: the link that fills first decides for its messages, then the rest share what is left. `room`
    and `users` are per link, users 0.
    """
    used = 0
    for index in range(count):
        message = active[index]
        message_f[message, SPEED] = -1.0
        route = message_i[message, ROUTE]
        for entry in range(route_start[route], route_start[route + 1]):
            link = route_link[entry]
            if users[link] == 0:
                room[link] = links[link, RATE]
                touched[used] = link
                used += 1
            users[link] += 1
    left = count
    while left > 0:
        least = np.inf
        for index in range(used):
            link = touched[index]
            if users[link] > 0 and room[link] / users[link] < least:
                least = room[link] / users[link]
        bound = least * (1 + 1e-12)
        for index in range(count):
            message = active[index]
            if message_f[message, SPEED] >= 0:
                continue
            route = message_i[message, ROUTE]
            for entry in range(route_start[route], route_start[route + 1]):
                link = route_link[entry]
                if room[link] / users[link] <= bound:
                    message_f[message, SPEED] = -2.0  # rooms change only when all messages of this round are found
                    message_f[message, BOUND] = link
        for index in range(count):
            message = active[index]
            if message_f[message, SPEED] == -2.0:
                message_f[message, SPEED] = least
                left -= 1
                route = message_i[message, ROUTE]
                for entry in range(route_start[route], route_start[route + 1]):
                    link = route_link[entry]
                    users[link] -= 1
                    room[link] = max(0.0, room[link] - least)
    for index in range(used):
        users[touched[index]] = 0
    first = np.inf
    for index in range(count):
        first = min(first, message_f[active[index], SIZE] / message_f[active[index], SPEED])
    return first


@compiled
def progress(active, count, message_f, seconds):
    """The first `count` active messages move on."""
    for index in range(count):
        message_f[active[index], SIZE] -= message_f[active[index], SPEED] * seconds
