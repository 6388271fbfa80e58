"""Signals between ranks, and the pairs of them that say who may write to a place and who may read it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from .. import errors


class Step(NamedTuple):
    """One operation: set counter `word` of `rank` to `value`, or wait until mine (`rank` is this one) reaches it."""

    waits: bool
    rank: int
    word: int
    value: int
    sender: int | None = None


class Signals(ABC):
    """`count` 32-bit counters on every rank. `add` and `set` release, `wait` acquires; comparison is cyclic."""

    count: int

    @abstractmethod
    def add(self, rank: int, index: int, amount: int = 1) -> None:
        """Add to `rank`'s counter. Releases: stores made before are visible to whoever waits for it."""

    @abstractmethod
    def set(self, rank: int, index: int, value: int) -> None:
        """Set `rank`'s counter. Releases, as `add`."""

    @abstractmethod
    def wait(self, index: int, target: int, sender: int | None = None) -> None:
        """Wait until my counter reaches `target`. Acquires. `sender` is only for the error, should nobody come."""

    def perform(self, steps: Sequence[Step]) -> None:
        """Several operations, in this order."""
        for waits, rank, index, value, sender in steps:
            if waits:
                self.wait(index, value, sender)
            else:
                self.set(rank, index, value)

    def packed(self, steps: Sequence[Step]) -> bytes:
        """The same as one stop of a stream; only signals that streams move have that."""
        raise errors.InvalidArgument(argument="signals", was="on a CPU", must="of a GPU")

    @abstractmethod
    def read(self, index: int) -> int:
        """My counter now."""

    @abstractmethod
    def address(self, rank: int, index: int) -> int:
        """Address of a counter, for kernels."""

    @abstractmethod
    def release(self) -> None:
        """Free the counters."""


class Handoffs:
    """`slots` pairs between every sender and every receiver. Only constants are ever written.

    sender:    claim (wait empty, clear empty) -> write the bytes -> deliver (set full at the receiver)
    receiver:  accept (wait full)  -> read the bytes -> free (clear full, set empty at the sender)

    A captured graph that replays these finds the pair as the last replay left it, so nothing has to count replays.
    `deliver` releases the bytes to `accept`; `free` releases the *reading* of them to the next `claim`.

    Each comes in two forms: done at once, and (`claiming`, ...) as steps, which `packed` makes into one stop of a
    stream: it then stops once between two copies, not once for every word.
    """

    def __init__(self, signals: Signals, rank: int, size: int, slots: int) -> None:
        self._signals = signals
        self._rank = rank
        self._size = size
        self.slots = slots

    @staticmethod
    def words(size: int, slots: int) -> int:
        """How many signals the pairs of a group take."""
        return 2 * size * slots

    def reset(self) -> None:
        """All slots empty. Before first use, by every rank, followed by a barrier."""
        for peer in range(self._size):
            for slot in range(self.slots):
                self._signals.set(self._rank, self._full(peer, slot), 0)
                self._signals.set(self._rank, self._empty(peer, slot), 1)

    def release(self) -> None:
        """Free the words. No stream may use them any more."""
        self._signals.release()

    def claim(self, receiver: int, slot: int) -> None:
        self._signals.perform(self.claiming(receiver, slot))

    def deliver(self, receiver: int, slot: int) -> None:
        self._signals.perform(self.delivering(receiver, slot))

    def accept(self, sender: int, slot: int) -> None:
        self._signals.perform(self.accepting(sender, slot))

    def free(self, sender: int, slot: int) -> None:
        self._signals.perform(self.freeing(sender, slot))

    def packed(self, steps: Sequence[Step]) -> bytes:
        """Steps of these as one stop of a stream, where signals can do that."""
        return self._signals.packed(steps)

    def claiming(self, receiver: int, slot: int) -> tuple[Step, ...]:
        empty = self._empty(receiver, slot)
        return Step(True, self._rank, empty, 1, receiver), Step(False, self._rank, empty, 0)

    def delivering(self, receiver: int, slot: int) -> tuple[Step, ...]:
        return (Step(False, receiver, self._full(self._rank, slot), 1),)

    def accepting(self, sender: int, slot: int) -> tuple[Step, ...]:
        return (Step(True, self._rank, self._full(sender, slot), 1, sender),)

    def freeing(self, sender: int, slot: int) -> tuple[Step, ...]:
        cleared = Step(False, self._rank, self._full(sender, slot), 0)
        return cleared, Step(False, sender, self._empty(self._rank, slot), 1)

    def _full(self, sender: int, slot: int) -> int:
        """Lives at the receiver."""
        return self._pair(sender, slot)

    def _empty(self, receiver: int, slot: int) -> int:
        """Lives at the sender."""
        return self._size * self.slots + self._pair(receiver, slot)

    def _pair(self, peer: int, slot: int) -> int:
        """A wrong number here would be the word of another pair."""
        if not 0 <= peer < self._size:
            raise errors.InvalidArgument(argument="peer", was=peer, must=f"between 0 and {self._size - 1}")
        if not 0 <= slot < self.slots:
            raise errors.InvalidArgument(argument="slot", was=slot, must=f"between 0 and {self.slots - 1}")
        return peer * self.slots + slot
