"""Plans on disk: what was tuned once is not tuned again. Advisory: whatever is wrong with a file, it is a miss.

One JSON file (`plan.files`) for each problem, machine and set of versions, in `plans` of the user's cache folder, with
every field checked.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import settings
from ..errors import InvalidArgument
from . import files
from .plan import Plan

if TYPE_CHECKING:
    from .problem import Problem
    from .tuner import Trial

FORMAT = "undertow plan 2"
MOST_BYTES = files.MOST_BYTES
_FIELDS = {"format": str, "key": str, "machine": str, "versions": dict, "made": str, "reason": str, "plan": dict}


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file says: the plan, where and when it was made, and why it was chosen.

    `trials` are (digest, grain:lane, parcels, predicted, measured median) of every candidate; `gemm_seconds` is what
    the matmul took without any communication, None where nobody measured it.
    """

    key: str
    machine: str
    versions: dict[str, str]
    made: str
    reason: str
    plan: Plan
    trials: tuple[tuple[str, str, int, float | None, float | None], ...] = ()
    gemm_seconds: float | None = None


def folder() -> Path:
    return settings.cache_folder() / "plans"


def path_of(problem: Problem, machine: str, versions: Mapping[str, str]) -> Path:
    """The file of this problem on this machine under these versions."""
    surroundings = json.dumps([machine, sorted(versions.items())])
    return folder() / f"{problem.key}-{hashlib.sha256(surroundings.encode()).hexdigest()[:12]}.json"


def load(problem: Problem, machine: str, versions: Mapping[str, str]) -> Entry | None:
    """What is stored for the problem; None if nothing is, or nothing usable, which is then said in one log line."""
    path = path_of(problem, machine, versions)
    entry = read(path)
    if entry is None:
        return None
    try:
        if (entry.key, entry.machine, entry.versions) != (problem.key, machine, dict(versions)):
            must = f"of {problem.key} on {machine}"
            raise InvalidArgument(argument="plan file", was=f"of {entry.key} on {entry.machine}", must=must)
        entry.plan.check(problem)
    except InvalidArgument as error:
        _say("Plan file %s is not used: %s", path, error)
        return None
    return entry


def store(
    problem: Problem,
    machine: str,
    versions: Mapping[str, str],
    plan: Plan,
    reason: str,
    trials: Sequence[Trial] = (),
    gemm_seconds: float | None = None,
) -> bool:
    """Keep the plan. False, and one log line, if the folder cannot be written: nothing depends on it."""
    path = path_of(problem, machine, versions)
    content = {
        "format": FORMAT,
        "key": problem.key,
        "machine": machine,
        "versions": dict(versions),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "reason": reason,
        "plan": asdict(plan),
        "trials": [
            [one.plan.digest, one.plan.name, len(one.plan.parcels), one.predicted, _finite(one.median)]
            for one in trials
        ],
        "gemm_seconds": gemm_seconds,
    }
    try:
        files.write(path, content)
    except OSError as error:
        _say("The plan of %s is not kept: %s", problem.key, error)
        return False
    return True


def read(path: Path) -> Entry | None:
    """The content of one file; None if it is not there, or damaged, which is then said in one log line."""
    try:
        return _parse(files.read(path))
    except FileNotFoundError:
        return None
    except files.DAMAGE as error:
        _say("Plan file %s is damaged and is not used: %s", path, files.first_line(error))
        return None


def show() -> list[tuple[Path, Entry | None]]:
    """Every file of the folder, by name, with its content; None for a damaged one."""
    return [(path, read(path)) for path in _files()]


def clear(containing: str = "") -> int:
    """Remove the files whose names contain the text, and the remains of writers that died; how many were plans."""
    removed = 0
    for path in _files():
        if containing in path.name:
            with suppress(FileNotFoundError):
                path.unlink()
                removed += 1
    if folder().is_dir():
        for scratch in folder().glob(".*.json.*"):
            if containing in scratch.name:
                with suppress(OSError):
                    scratch.unlink()
    return removed


def _files() -> list[Path]:
    return sorted(folder().glob("[!.]*.json")) if folder().is_dir() else []


def _parse(content: Any) -> Entry:
    if not isinstance(content, dict) or set(content) != {*_FIELDS, "trials", "gemm_seconds"}:
        raise ValueError("it has not the fields of a plan file")
    for name, kind in _FIELDS.items():
        if not isinstance(content[name], kind):
            raise TypeError(f"its {name} is no {kind.__name__}")
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
    versions = {str(name): str(version) for name, version in content["versions"].items()}
    trials = tuple(
        (str(digest), str(name), int(parcels), _number(predicted), _number(measured))
        for digest, name, parcels, predicted, measured in content["trials"]
    )
    plan = Plan.from_json(json.dumps(content["plan"]))
    return Entry(
        content["key"],
        content["machine"],
        versions,
        content["made"],
        content["reason"],
        plan,
        trials,
        _number(content["gemm_seconds"]),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _finite(value: float | None) -> float | None:
    return value if value is not None and value < float("inf") else None


def _say(message: str, *facts: object) -> None:
    logging.getLogger("undertow").warning(message, *facts)
