"""A few letters that differ where programs of one name differ: ranks compare them, and tables name programs by them.

They say what a program's function is made of, and are the same in every process: its code with its constants and inner
functions, its defaults, what it has taken from the function around it, and the plain numbers and words that it finds in
its module. Things of other kinds count by their type only, as their looks may tell where in memory they lie.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import CodeType, FunctionType

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))


def signature_of(*parts: object) -> str:
    """For a function and whatever else decides what it does."""
    return f"{zlib.crc32(_letters(list(parts), ()).encode()):08x}"


def _letters(one: object, around: tuple[CodeType, ...]) -> str:
    """`around`: the functions that this was found in: one that is among its own variables is not entered again."""
    if isinstance(one, _PLAIN):
        return repr(one)
    if isinstance(one, (tuple, list)):
        return f"({', '.join(_letters(part, around) for part in one)})"
    if isinstance(one, (set, frozenset)):  # whose order differs from process to process
        return f"{{{', '.join(sorted(_letters(part, around) for part in one))}}}"
    if isinstance(one, Mapping):
        return _letters([*one.items()], around)
    if isinstance(one, CodeType):
        return f"{one.co_code.hex()} {one.co_names} {_letters(one.co_consts, around)}"
    one = getattr(one, "__func__", one)  # of a method
    if isinstance(one, FunctionType):
        return _of_function(one, around)
    known = getattr(one, "signature", None)  # another program
    return known if isinstance(known, str) else type(one).__qualname__


def _of_function(function: FunctionType, around: tuple[CodeType, ...]) -> str:
    code = function.__code__
    if code in around:
        return code.co_name
    names = sorted(_names(code) & function.__globals__.keys())
    found = [(name, function.__globals__[name]) for name in names]
    of_module = [(name, value) for name, value in found if isinstance(value, (*_PLAIN, tuple, list, set, frozenset))]
    taken = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    defaults = [function.__defaults__, function.__kwdefaults__]
    return _letters([code, defaults, taken, of_module], (*around, code))


def _names(code: CodeType) -> set[str]:
    """Global names that a function and those inside it may look at."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*(_names(one) for one in inner))


def _is_empty(cell: object) -> bool:
    """Whether a variable of the function around has no value yet."""
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018
    except ValueError:
        return True
    return False
