"""Steps as files: the graph language of `steps`, written down in TOML.

format = "undertow step 1"
name = "a small step"

[[operations]]
name = "lookup"                 # what others wait for it by
kind = "compute"                # or all_reduce, reduce_scatter, all_gather, all_to_all
bytes = 4e9                     # compute: flops, bytes, or seconds
[[operations]]
name = "rows"
kind = "all_to_all"
bytes = 64e6                    # of the longest buffer of a rank
group = "all"                   # all (unless said), node, across
stream = "rows"                 # engine that it runs on, after what is before it there; unless said, its group's
multiprocessors = 8             # that it holds, for the interference model; unless said, as the machine's file has it
after = ["lookup"]
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument
from ..plan.tables import Section
from .cluster import Cluster
from .collectives import COLLECTIVES, GROUPS, Collectives
from .steps import Step
from .tasks import COMPUTE, Outcome

FORMAT = "undertow step 1"
MOST_BYTES = 16 << 20
MOST_OPERATIONS = 100_000


def load(path: str | Path) -> Mapping[str, Any]:
    """The file's table, bounded in size."""
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise InvalidArgument(argument="step", was=f"a file of more than {MOST_BYTES} bytes", must="a smaller one")
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgument(argument="step", was=str(path), must=f"a readable file in TOML ({error})") from error


def run(data: Mapping[str, Any], cluster: Cluster, known: Collectives | None = None) -> Outcome:
    """Check every field, then simulate."""
    top = Section("step", data)
    top.choice("format", (FORMAT,))
    top.text("name")
    operations = top.take("operations")
    top.finish()
    if not isinstance(operations, list) or not 0 < len(operations) <= MOST_OPERATIONS:
        must = f"a list of 1 to {MOST_OPERATIONS} tables"
        raise InvalidArgument(argument="step.operations", was=type(operations).__name__, must=must)
    step = Step(cluster, known)
    numbers: dict[str, int] = {}
    sections = [Section(f"step.operations[{index}]", one) for index, one in enumerate(operations)]
    names = [section.text("name") for section in sections]
    for name, section in zip(names, sections, strict=True):
        if name in numbers:
            raise section.refuse("name", name, "a name of its own")
        _add(step, name, section, numbers, names)
    return step.run()


def _add(step: Step, name: str, section: Section, numbers: dict[str, int], names: list[str]) -> None:
    kind = section.choice("kind", (COMPUTE, *COLLECTIVES))
    wanted = section.take("after") if section.has("after") else []
    if not isinstance(wanted, list) or not all(isinstance(one, str) for one in wanted):
        raise section.refuse("after", wanted, "a list of names")
    for one in wanted:
        if one not in numbers:
            later = "of operations before it: otherwise they would wait for each other in a circle"
            raise section.refuse("after", one, later if one in names else "the name of an operation")
    after = [numbers[one] for one in wanted]
    if kind == COMPUTE:
        amounts = {key: section.not_negative(key) for key in ("flops", "bytes", "seconds") if section.has(key)}
        if not amounts:
            raise section.refuse("kind", kind, "compute with flops, bytes or seconds")
        numbers[name] = step.compute(
            name, flops=amounts.get("flops", 0.0), nbytes=amounts.get("bytes", 0.0), seconds=amounts.get("seconds"),
            after=after,
        )  # fmt: skip
    else:
        group = section.choice("group", GROUPS) if section.has("group") else "all"
        stream = section.text("stream") if section.has("stream") else ""
        held = section.whole("multiprocessors") if section.has("multiprocessors") else None
        nbytes = section.not_negative("bytes")
        numbers[name] = step.collective(
            kind, nbytes, group=group, after=after, name=name, stream=stream, multiprocessors=held
        )
    section.finish()
