"""Taking posts from the ring: in order, each once, and none that is wrong."""

from __future__ import annotations

import gc
import re
import weakref
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch

from undertow.errors import InvalidArgument
from undertow.fabric import atomics, post_ring
from undertow.fabric.post_ring import Post, PostRing
from undertow.fabric.symmetric import SymmetricBuffer
from undertow.kernels import ring_layout

GOOD = Post(5, 0, 1, 6, 0, 16, 0)


def buffer(number: int, nbytes: int) -> SymmetricBuffer:
    group: Any = SimpleNamespace(rank=0)
    return SymmetricBuffer(group, number, [torch.zeros(nbytes, dtype=torch.uint8), None], object())


def ring(capacity: int = 4) -> PostRing:
    """Of rank 0 of 2, with 3 signals; buffers 5 and 6 of 16 and 32 bytes."""
    group: Any = SimpleNamespace(rank=0, size=2)
    words = torch.zeros(ring_layout.ring_bytes(capacity) // 8, dtype=torch.int64)
    made = PostRing(group, words, capacity, 3)
    for number, nbytes in ((5, 16), (6, 32)):
        made.attach(buffer(number, nbytes))
    return made


@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**32 - 2])
def test_posts_are_taken_in_order_lap_after_lap(first: int) -> None:
    posts = ring()
    posts.compiled.taken[0] = first
    for ticket in range(first, first + 20):
        assert posts.take() is None
        together = 1 + ticket % 4  # in a ring of 4
        made = [Post(5, 0, 1, 6, (ticket + one) % 16, 16, 2) for one in range(together)]
        for one, post in enumerate(made):
            posts.put(posts.taken + one, post)
        assert [posts.take() for _ in made] == made
        assert atomics.load(posts.address + ring_layout.TAIL_OFFSET) == np.int64(posts.taken).astype(np.int32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"source_buffer": 7}, "source buffer is 7, but must be attached to the proxy."),
        ({"source_buffer": -1}, "source buffer is -1, but must be attached to the proxy."),
        ({"destination_buffer": 0}, "destination buffer is 0, but must be attached to the proxy."),
        ({"source_offset": 1}, "source range is [1, 17), but must be inside 16 bytes."),
        ({"source_offset": -1}, "source range is [-1, 15), but must be inside 16 bytes."),
        ({"byte_count": -1}, "source range is [0, -1), but must be inside 16 bytes."),
        ({"byte_count": 2**63 - 1, "source_offset": 1}, "inside 16 bytes."),
        ({"destination_offset": 17}, "destination range is [17, 33), but must be inside 32 bytes."),
        ({"destination_offset": 2**63 - 1}, "inside 32 bytes."),
        ({"destination_rank": 2}, "destination rank is 2, but must be between 0 and 1."),
        ({"destination_rank": -1}, "destination rank is -1, but must be between 0 and 1."),
        ({"signal_index": 3}, "signal index is 3, but must be between 0 and 2."),
        ({"signal_index": -2}, "signal index is -2, but must be between 0 and 2."),
    ],
)
def test_a_wrong_post_is_refused(changes: dict[str, int], sentence: str) -> None:
    posts = ring()
    fields = {name: getattr(GOOD, name) for name in Post.__slots__}
    posts.put(0, Post(**(fields | changes)))
    with pytest.raises(InvalidArgument, match=re.escape(sentence)):
        posts.take()


def test_what_may_be_posted_at_the_very_edges() -> None:
    posts = ring()
    for ticket, post in enumerate((GOOD, Post(5, 16, 0, 6, 32, 0, ring_layout.NO_SIGNAL), Post(6, 16, 1, 5, 0, 16, 2))):
        posts.put(ticket, post)
        assert posts.take() == post


def test_a_released_buffer_is_named_by_nobody() -> None:
    posts, third = ring(), buffer(9, 8)
    assert posts.attach(third) == posts.attach(third) == 9
    posts.put(0, Post(9, 0, 1, 9, 0, 8, 0))
    assert posts.take() == Post(9, 0, 1, 9, 0, 8, 0)
    third.release()
    posts.put(1, Post(9, 0, 1, 9, 0, 8, 0))
    with pytest.raises(InvalidArgument, match="source buffer is 9, but must be attached to the proxy"):
        posts.take()
    with pytest.raises(InvalidArgument, match="buffer is 9, but must be attached to the proxy"):
        posts.named(9)


def test_an_alias_that_goes_leaves_the_buffer_attached() -> None:
    posts, third = ring(), buffer(9, 8)
    posts.attach(third)
    third.as_type(torch.int32).release()
    assert posts.named(9) is third


def test_places_for_buffers_are_used_again() -> None:
    posts = ring()
    for number in range(100, 300):
        third = buffer(number, 8)
        posts.attach(third)
        third.release()
    assert posts.compiled.used[0] == 3
    held = [buffer(number, 8) for number in range(300, 1300)]
    for one in held:
        posts.attach(one)
    assert posts.compiled.used[0] == 2 + len(held)
    held[17].release()
    posts.attach(buffer(1400, 8))
    assert posts.compiled.used[0] == 2 + len(held)
    posts.put(0, Post(1400, 0, 0, 1299, 0, 8, 0))
    assert posts.take() == Post(1400, 0, 0, 1299, 0, 8, 0)


def test_more_buffers_than_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_ring, "_MOST_BUFFERS", 3)
    posts = ring()
    posts.attach(buffer(9, 8))
    with pytest.raises(InvalidArgument, match="attached buffers is 4, but must be at most 3 at a time"):
        posts.attach(buffer(10, 8))


def test_buffers_and_rings_do_not_keep_each_other() -> None:
    posts, third = ring(), buffer(9, 8)
    posts.attach(third)
    gone, kept = weakref.ref(posts), weakref.ref(third)
    gc.disable()
    try:
        posts.forget_all()
        del posts
        assert gone() is None
        del third
        assert kept() is None
    finally:
        gc.enable()


def test_a_descriptor_is_read_between_its_ready_word_and_its_going_back() -> None:
    afresh = numba.njit(post_ring.take.signatures[0], nogil=True)(post_ring.take.py_func)  # type: ignore[attr-defined]
    (text,) = afresh.inspect_llvm().values()
    body = text[text.index("define ") :]
    acquired = body.index("load atomic i32")
    assert "acquire" in body[acquired : body.index("\n", acquired)]
    reads = [match.start() for match in re.finditer(r"= load i64, ", body)]
    given_back = body.index("atomicrmw xchg")
    assert "seq_cst" in body[given_back : body.index("\n", given_back)]
    assert sum(acquired < one < given_back for one in reads) >= post_ring.POST_WORDS
