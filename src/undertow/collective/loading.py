"""Programs by name: of the library, or of a user's own file.

    ring            a program of the library
    FILE.py         every program that the file makes at its top level
    FILE.py:name    one of them

Schedule files of other systems (`is_schedule_file`) hold no program; `formats.read` reads them.

The file is run as Python runs a script, but not as `__main__`. What it raises, then or while one of its programs is
traced, becomes one sentence with the line of the file.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import ModuleType

from ..errors import InvalidArgument, ProgramRefused, UndertowError, UnusableTarget
from .algorithms import LIBRARY
from .contract import BUILT_IN
from .formats import SUFFIXES
from .language import Program, Trace
from .topology import Topology

_SUFFIX = ".py"


def is_schedule_file(target: str) -> bool:
    """Whether `target` names a schedule of another system rather than a program."""
    return target.endswith(SUFFIXES)


def load(target: str) -> list[Program]:
    """The programs that `target` names, at least one."""
    if target in LIBRARY:
        return [LIBRARY[target]]
    path, _, name = target.rpartition(":") if f"{_SUFFIX}:" in target else (target, "", "")
    if not path.endswith(_SUFFIX):
        raise UnusableTarget(target=target, reason=_unknown(target))
    module = _executed(path)
    named = {name: one for name, one in vars(module).items() if isinstance(one, Program)}
    own = {name: one for name, one in named.items() if not _is_imported(one, module)}
    if name in named:
        return [named[name]]
    if name:
        raise UnusableTarget(target=target, reason=f"the programs of {path} are {', '.join(own) or 'none at all'}")
    if not own:
        reason = "it makes no program at its top level (a function decorated with undertow.collective.program)"
        raise UnusableTarget(target=target, reason=reason)
    return list(dict.fromkeys(own.values()))


def trace(program: Program, ranks: int, topology: Topology | None = None, root: int = 0) -> Trace:
    """`program.trace`, where what goes wrong in the program's own code is told with its line."""
    path = program._function.__code__.co_filename
    try:
        return program.trace(ranks, topology, root)
    except InvalidArgument as error:
        where = _place(error, path)
        if where is None:
            raise
        reason = str(error).rstrip(".")
        raise ProgramRefused(program=program.name, where=where, reason=reason, trace="") from error
    except UndertowError:
        raise
    except (Exception, SystemExit) as error:
        raise UnusableTarget(target=program.name, reason=_last_line(error, path)) from error


def meaning(program: Program) -> str:
    """The built-in collective that the program is one of; empty where its contract is its own."""
    return program._collective if isinstance(program._collective, str) else ""


def _unknown(target: str) -> str:
    if target in BUILT_IN:
        programs = ", ".join(one.name for one in LIBRARY.values() if one.collective == target)
        return f"it is a collective, of which the library has the programs {programs}"
    files = ", ".join(f"FILE{one}" for one in (_SUFFIX, *SUFFIXES))
    return f"it is neither a file {files} nor a program of the library, which has {', '.join(LIBRARY)}"


def _executed(path: str) -> ModuleType:
    """The file as a module. Nothing is cached beside it; its folder is on the path from now on, as a script's is."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise UnusableTarget(target=path, reason=(error.strerror or str(error)).lower()) from error
    module = ModuleType(f"__program_{Path(path).stem}__")
    module.__file__ = path
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    try:
        exec(compile(text, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise UnusableTarget(target=path, reason=_last_line(error, path)) from error
    return module


def _is_imported(program: Program, module: ModuleType) -> bool:
    """Whether it is another module's program: rather a step of the ones here than one of them."""
    home = sys.modules.get(program._function.__module__)
    return home is not None and home is not module and any(one is program for one in vars(home).values())


def _last_line(error: BaseException, path: str) -> str:
    """'FILE:12: NameError: ...': the innermost line of the file, then what a traceback ends with."""
    kind = type(error).__name__
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}: {kind}: {error.msg}"
    where = _place(error, path)
    said = f"{kind}: {error}" if str(error) else kind
    return f"{where}: {said.rstrip('.')}" if where is not None else said.rstrip(".")


def _place(error: BaseException, path: str) -> str | None:
    """The innermost line of the file that the error passed through."""
    inside = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{inside[-1].lineno}" if inside else None
