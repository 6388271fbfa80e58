"""A few letters that differ where programs of one name differ: ranks compare them, and tables name programs by them.

They say what a program's function is made of, and are the same in every process: its code with its constants and inner
functions, its defaults, what it has taken from the function around it, and functions and programs of its module that
it names. Other things of its module do not count: a script may keep its own rank there. Things that are neither numbers
nor words count by their type only, as their looks may tell where in memory they lie.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import CodeType, FunctionType

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))


def signature_of(*parts: object) -> str:
    """For a function and whatever else decides what it does."""
    return f"{zlib.crc32(_letters(list(parts), set()).encode()):08x}"


def _letters(one: object, seen: set[int]) -> str:
    """`seen`: the functions that were entered before, which may find each other and themselves."""
    if isinstance(one, _PLAIN):
        return repr(one)
    if isinstance(one, (tuple, list)):
        return f"({', '.join(_letters(part, seen) for part in one)})"
    if isinstance(one, (set, frozenset)):  # whose order differs from process to process
        return f"{{{', '.join(sorted(_letters(part, seen) for part in one))}}}"
    if isinstance(one, Mapping):
        return _letters([*one.items()], seen)
    if isinstance(one, CodeType):
        return f"{one.co_code.hex()} {one.co_names} {_letters(one.co_consts, seen)}"
    one = getattr(one, "__func__", one)  # of a method
    if isinstance(one, FunctionType):
        return _of_function(one, seen)
    known = getattr(one, "signature", None)  # another program
    return known if isinstance(known, str) else type(one).__qualname__


def _of_function(function: FunctionType, seen: set[int]) -> str:
    code = function.__code__
    if id(function) in seen:
        return code.co_name
    seen.add(id(function))
    named = [function.__globals__[name] for name in sorted(_names(code) & function.__globals__.keys())]
    helpers = [one for one in named if isinstance(one, FunctionType) and one.__module__ == function.__module__]
    programs = [one.signature for one in named if isinstance(getattr(one, "signature", None), str)]
    taken = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    defaults = [function.__defaults__, function.__kwdefaults__]
    return _letters([code, defaults, taken, helpers, programs], seen)


def _names(code: CodeType) -> set[str]:
    """Global names that a function and those inside it may look at, and those of attributes, which do no harm."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*(_names(one) for one in inner))


def _is_empty(cell: object) -> bool:
    """Whether a variable of the function around has no value yet."""
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018
    except ValueError:
        return True
    return False
