"""Threads of control of which one runs at a time, in an order that is drawn at random.

Each hands over wherever another could notice the order. Who goes on is drawn, some much more often than others; so is
when that happens which happens by itself, such as the landing of a store. What a missing wait leaves open shows as
wrong results of some order, a wait for what never comes as `Deadlock`.
"""

from __future__ import annotations

import inspect
import random
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import triton.language as tl

PACES = (1, 16, 256)
_MOST = 200_000  # turns: more than any world needs


class Deadlock(AssertionError):
    """Not all are done, and nobody can go on, or those who can come to no end."""


class _Stop(BaseException):
    """Ends a role whose world has come to its end."""


def _always() -> bool:
    return True


class Role:
    """A thread that runs when the world says so. `place`: what those who built the world know it by."""

    def __init__(self, world: World, place: Any, work: Callable[[], None]) -> None:
        self.world, self.place, self.work = world, place, work
        self.ready: Callable[[], bool] = _always
        self.over = False
        self.pace = world.draw.choice(PACES)
        self.go = threading.Lock()
        self.go.acquire()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.go.acquire()
        if not self.world.stopped:
            try:
                self.work()
            except _Stop:
                pass
            except BaseException as error:
                self.world.failed = self.world.failed or error
        self.over = True
        if not self.world.stopped:
            self.world.hand_over()


class World:
    """All roles, and what happens beside them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.roles: list[Role] = []
        self.current: Role
        self.under_way: list[Callable[[], None]] = []  # what happens once, at any time
        self.pace = self.draw.choice(PACES)  # of what is under way
        self.stopped = False
        self.failed: BaseException | None = None
        self._active: list[Role] = []
        self._turns = 0
        self._ended = threading.Lock()
        self._ended.acquire()

    def start(self, place: Any, work: Callable[[], None]) -> Role:
        self.roles.append(Role(self, place, work))
        self._active.append(self.roles[-1])
        return self.roles[-1]

    def pause(self, ready: Callable[[], bool] = _always) -> None:
        """Hand over, until it is this role's turn again and it may go on."""
        role = self.current
        role.ready = ready
        following = self._chosen()
        if following is not role:
            (self._ended if following is None else following.go).release()
            role.go.acquire()
            if self.stopped:
                raise _Stop

    def abandon(self, lost: Callable[[Any], bool]) -> None:
        """Those in such places never go on, nor does who calls, who is one of them."""
        self._active = [role for role in self._active if not lost(role.place)]
        self.pause()

    def events(self) -> Iterable[tuple[float, Callable[[], None]]]:
        """What may happen by itself now, each with its pace."""
        return ((self.pace, lambda one=one: self._happens(one)) for one in self.under_way)  # type: ignore[misc]

    def stuck(self) -> bool:
        """Nobody can go on: whether that has been changed."""
        return False

    def run(self) -> None:
        """Until all roles are done, and nothing happens any more."""
        try:
            self.hand_over()
            self._ended.acquire()
        finally:
            self.stopped = True
            for role in self.roles:
                if not role.over:
                    role.go.release()
                role.thread.join()
        if self.failed is not None:
            raise self.failed

    def hand_over(self) -> None:
        """To whoever is next, by one who does not come back."""
        following = None
        if self.failed is None:
            try:
                following = self._chosen()
            except BaseException as error:
                self.failed = error
        (self._ended if following is None else following.go).release()

    def _happens(self, one: Callable[[], None]) -> None:
        self.under_way.remove(one)
        one()

    def _chosen(self) -> Role | None:
        """Whose turn it is now, after what happens before that; None: all are done."""
        while True:
            self._active = [role for role in self._active if not role.over]
            able: list[Any] = [role for role in self._active if role.ready()]
            paces = [role.pace for role in able]
            for pace, event in self.events():
                able.append(event)
                paces.append(pace)
            if able:
                chosen = self.draw.choices(able, paces)[0]
                if isinstance(chosen, Role):
                    self.current = chosen
                    self._turns += 1
                    if self._turns > _MOST:
                        raise Deadlock("some go round and round")
                    return chosen
                chosen()
            elif not self._active:
                return None
            elif not self.stuck():
                raise Deadlock(f"{len(self._active)} of {len(self.roles)} roles wait for ever")


@contextmanager
def plain(*modules: Any) -> Iterator[None]:
    """The device functions of these modules as plain ones, and their constants as plain values."""
    kept = [dict(vars(module)) for module in modules]
    for module, names in zip(modules, kept, strict=True):
        for name, value in names.items():
            if isinstance(value, tl.constexpr):
                setattr(module, name, value.value)
            elif hasattr(value, "__triton_builtin__"):
                setattr(module, name, value.__wrapped__)
            elif hasattr(value, "fn"):
                setattr(module, name, value.fn)
    try:
        yield
    finally:
        for module, names in zip(modules, kept, strict=True):
            vars(module).clear()
            vars(module).update(names)


def rewrite(modules: Iterable[Any], name: str, change: Callable[[str], str]) -> None:
    """Change the text of a function that one of these modules, made plain, defines; for all that use it."""
    modules = list(modules)
    found = {getattr(module, name) for module in modules if hasattr(module, name)}
    (function,) = found
    text = textwrap.dedent(inspect.getsource(function))
    changed = change(text)
    assert changed != text, "nothing was changed"
    home = next(module for module in modules if module.__name__ == function.__module__)
    exec(changed[changed.index("def ") :], vars(home))  # without its decorators
    for module in modules:
        if hasattr(module, name):
            setattr(module, name, getattr(home, name))
