"""Functions compiled to machine code once for all processes, and kept on disk.

Numba keeps what it compiled beside the source, and compiles anew when that file changes. But a compiled function also
holds whatever it calls, and the numbers that it names, which may stand in other files: a ring's layout, the kind of an
atomic. What is kept here is known by all of them (`identity`), so an edit or a `git pull` leaves no old half in use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.types import Type

_OTHERS = ("numba", "numpy", "llvmlite")
_PLAIN = (int, float, str, bytes, tuple, frozenset, type(None), Type)


class _Cache(FunctionCache):  # type: ignore[misc]
    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(signature, codegen), identity(self._py_func))


def compiled(function: Callable[..., Any], signature: Any = None, **options: Any) -> Callable[..., Any]:
    """`function` as machine code that runs without the GIL: at its first call, or, for a `signature`, now."""
    dispatcher = numba.njit(nogil=True, **options)(function)
    dispatcher._cache = _Cache(function)
    if signature is not None:
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    return dispatcher  # type: ignore[no-any-return]


def identity(function: Callable[..., Any]) -> str:
    """Of the function's code, of all it calls, and of the numbers they name."""
    parts = sorted(set(_parts(function, set())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {sorted(map(repr, value)) if isinstance(value, frozenset) else value!r}"
        return
    # Numba's own: what was compiled, and what emits code for it.
    function = getattr(value, "py_func", None) or getattr(value, "_defn", None) or value
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    if function.__module__.partition(".")[0] in _OTHERS:  # whose version Numba looks at
        return
    seen.add(id(function))
    name, names = f"{function.__module__}.{function.__qualname__}", set[str]()
    for code in _codes(function.__code__):
        yield f"{name} {code.co_name} {code.co_code.hex()}"
        for constant in code.co_consts:
            if not isinstance(constant, CodeType):
                yield from (f"{name} {part}" for part in _parts(constant, seen))
        names |= set(code.co_names)
    for cell in function.__closure__ or ():
        yield from _parts(cell.cell_contents, seen)
    for other in sorted(names & function.__globals__.keys()):
        named = function.__globals__[other]
        if isinstance(named, ModuleType):
            for attribute in sorted(names & vars(named).keys()):
                yield from (f"{named.__name__}.{attribute} {part}" for part in _parts(vars(named)[attribute], seen))
        else:
            yield from (f"{name} {other} {part}" for part in _parts(named, seen))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
