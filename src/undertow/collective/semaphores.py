"""From "this instruction comes after that one" to counted semaphores.

One semaphore for each pair of workers (and each sort of wait between them): a worker posts in program order, so the
k-th post of an iteration is its k-th instruction that anybody of the other worker waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Semaphores:
    """Waits and posts as compressed rows over instructions; poster, waiter, posts and sort of each semaphore."""

    wait_start: Ints
    wait_semaphore: Ints
    wait_value: Ints
    wait_back: Ints
    post_start: Ints
    post_semaphore: Ints
    poster: Ints
    waiter: Ints
    posts: Ints
    sort: Ints


def number(
    waiter: NDArray[np.int64],
    waited: NDArray[np.int64],
    back: NDArray[np.int64],
    sort: NDArray[np.int64],
    worker_of: NDArray[np.signedinteger[Any]],
    workers: int,
    sorts: int,
) -> Semaphores:
    """Instruction `waiter[i]` waits for `waited[i]`, `back[i]` iterations ago. `worker_of`: of each instruction."""
    total = len(worker_of)
    pair = (worker_of[waited].astype(np.int64) * workers + worker_of[waiter]) * sorts + sort
    pairs = distinct(pair)
    semaphore = np.searchsorted(pairs, pair)
    posting = distinct(semaphore.astype(np.int64) * total + waited)
    post_semaphore, poster = posting // total, posting % total
    posts = np.bincount(post_semaphore, minlength=len(pairs))
    first_post = np.cumsum(posts) - posts
    value = np.searchsorted(posting, semaphore.astype(np.int64) * total + waited) - first_post[semaphore] + 1
    by_poster = np.argsort(poster, kind="stable")
    by_waiter = np.argsort(waiter, kind="stable")
    return Semaphores(
        wait_start=starts(np.bincount(waiter, minlength=total)),
        wait_semaphore=semaphore[by_waiter].astype(np.int32),
        wait_value=value[by_waiter].astype(np.int32),
        wait_back=back[by_waiter].astype(np.int32),
        post_start=starts(np.bincount(poster, minlength=total)),
        post_semaphore=post_semaphore[by_poster].astype(np.int32),
        poster=(pairs // sorts // workers).astype(np.int32),
        waiter=(pairs // sorts % workers).astype(np.int32),
        posts=posts.astype(np.int32),
        sort=(pairs % sorts).astype(np.int32),
    )


def distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sorted, each once; np.unique hashes first, which takes ten times as long here."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def starts(sizes: NDArray[np.signedinteger[Any]]) -> Ints:
    """Where each compressed row begins, and the end as a last entry."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
