"""MSCCL's XML, read: the original files of msccl-tools and the dialects of Azure's and AMD's executors.

The parser sees no document type, hence no entity can be declared; depth, elements and numbers are bounded. What a
dialect adds (`outofplace`, `minBytes`, `maxBytes`, `nthreads`, ...) is optional, other attributes are kept as they are.
So is what has one meaning when it is left out: peers, waits, sizes, places that only inform. Numbers are decimal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn
from xml.parsers import expat

from ...errors import UnreadableFile
from .lanes import MOST_STEPS as MOST_STEPS_OF_ALL
from .msccl import (
    BUFFERS,
    COLLECTIVES,
    HALVES,
    READS,
    RECEIVES,
    SENDS,
    SLOTS,
    STORES,
    TYPES,
    Algorithm,
    Facts,
    Gpu,
    Step,
    Threadblock,
)
from .msccl_copies import Copy, with_copies
from .text import LONGEST_WORD, MOST_RANKS, byte_count, damaged, read_bytes, shown, whole_number

_LEVELS, _COPY = ("algo", "gpu", "tb", "step"), "copy"  # of which the last is for a gpu, beside its tb
_KNOWN = frozenset(
    {"name", "proto", "nchannels", "nchunksperloop", "ngpus", "coll", "inplace", "outofplace"}
    | {"minBytes", "maxBytes", "nthreads"}
)
_OPEN = {"srcbuf": "i", "dstbuf": "o"}  # what is written where a place is left out
_MOST_ATTRIBUTES = 64


def read(path: str | Path) -> Algorithm:
    """The schedule in a file."""
    return parse(read_bytes(path), str(path))


def parse(data: bytes, path: str = "<bytes>") -> Algorithm:
    """The schedule in the bytes of a file; `path` is for complaints."""
    reader = _Reader(path)
    reader.feed(data)
    return reader.result()


class _Element:
    """What is open at one level: attributes, line, and what was found inside."""

    __slots__ = ("attributes", "children", "copies", "line", "name")

    def __init__(self, name: str, attributes: dict[str, str], line: int) -> None:
        self.name, self.attributes, self.line = name, attributes, line
        self.children: dict[int, Any] = {}
        self.copies: list[Copy] = []


class _Reader:
    def __init__(self, path: str) -> None:
        self._path = path
        self._open: list[_Element] = []
        self._steps = 0
        self._found: Algorithm | None = None
        self._parser = parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.StartDoctypeDeclHandler = self._refuse_doctype
        parser.CharacterDataHandler = self._text

    def feed(self, data: bytes) -> None:
        try:
            self._parser.Parse(data, True)
        except UnreadableFile:
            raise
        except expat.ExpatError as error:
            damaged(self._path, error.lineno, f"this is no XML: {expat.ErrorString(error.code)}")
        except (ValueError, LookupError) as error:
            damaged(self._path, self._line, f"its encoding cannot be used: {shown(str(error))}")

    def result(self) -> Algorithm:
        if self._found is None:
            self._damaged("there is no algo in it")
        return self._found

    @property
    def _line(self) -> int:
        return int(self._parser.CurrentLineNumber)

    def _damaged(self, reason: str, line: int | None = None) -> NoReturn:
        damaged(self._path, self._line if line is None else line, reason)

    def _refuse_doctype(self, *_: object) -> None:
        self._damaged("a document type has no place here, as it could declare entities")

    def _text(self, text: str) -> None:
        if text.strip():
            self._damaged(f"text ({shown(text.strip())}) has no place here")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        depth = len(self._open)
        if depth == 0 and name == "msccl_algos":
            self._damaged("it lists schedules instead of being one; name one of the files it lists")
        if depth and self._open[-1].name == _COPY:
            self._damaged(f"{shown(name)} stands inside {_COPY}, where nothing can")
        if depth == len(_LEVELS) or (name != _LEVELS[depth] and (depth, name) != (2, _COPY)):
            inside = f"inside {_LEVELS[depth - 1]}" if depth else "outermost"
            wanted = f"only {_LEVELS[depth]} can" if depth < len(_LEVELS) else "nothing can"
            newer = ": this is msccl-tools' newer form, which no runtime reads" if (depth, name) == (3, "op") else ""
            self._damaged(f"{shown(name)} stands {inside}, where {wanted}{newer}")
        if len(attributes) > _MOST_ATTRIBUTES:
            self._damaged(f"{name} has {len(attributes)} attributes, more than {_MOST_ATTRIBUTES}")
        if name in ("step", _COPY):
            self._steps += 1
            if self._steps > MOST_STEPS_OF_ALL:
                self._damaged(f"there are more than {MOST_STEPS_OF_ALL} steps")
        self._open.append(_Element(name, attributes, self._line))

    def _end(self, name: str) -> None:
        element = self._open.pop()
        if name == "algo":
            self._found = self._algorithm(element)
            return
        if name == _COPY:
            source, destination = self._number(element, "i_off", 0), self._number(element, "o_off", 0)
            self._open[-1].copies.append(Copy(source, destination, element.line))
            return
        number, made = {"gpu": self._gpu, "tb": self._threadblock, "step": self._step}[name](element)
        siblings = self._open[-1].children
        if number in siblings:
            self._damaged(f"{name} {number} stands here twice", element.line)
        siblings[number] = made

    # -- elements ------------------------------------------------------------------------------------------------------

    def _step(self, element: _Element) -> tuple[int, Step]:
        number = self._number(element, "s", 0)
        kind = self._word(element, "type", (*TYPES, "ra"))
        if kind == "ra":
            self._damaged("step type 'ra' is known to MSCCL's reader, but no runtime implements it", element.line)
        source = self._place(element, "srcbuf", "srcoff", kind in READS)
        destination = self._place(element, "dstbuf", "dstoff", kind in STORES)
        count = self._number(element, "cnt", 0, default=0 if kind == "nop" else None)
        block, step = self._number(element, "depid", -1, default=-1), self._number(element, "deps", -1, default=-1)
        if (block < 0) != (step < 0):
            self._damaged(f"depid is {block} and deps is {step}, but both or none must be -1", element.line)
        depends_on = None if block < 0 else (block, step)
        published = self._number(element, "hasdep", 0, 1, default=0) == 1
        return number, Step(kind, source, destination, count, depends_on, published, element.line)

    def _place(self, element: _Element, buffer: str, offset: str, own: bool) -> tuple[str, int]:
        """One of a step's two. What only informs may be left open, or out."""
        if not own and buffer not in element.attributes:
            return _OPEN[buffer], -1
        letter = self._word(element, buffer, tuple(BUFFERS))
        return letter, self._number(element, offset, 0 if own else -1, default=None if own else -1)

    def _threadblock(self, element: _Element) -> tuple[int, Threadblock]:
        number = self._number(element, "id", 0)
        send, receive = (self._number(element, name, -1, default=-1) for name in ("send", "recv"))
        alone = max(send, receive) < 0
        channel = self._number(element, "chan", -1 if alone else 0, default=0 if alone else None)
        steps: tuple[Step, ...] = self._dense(element, "step")
        for step in steps:
            if step.count and ((step.type in SENDS and send < 0) or (step.type in RECEIVES and receive < 0)):
                verb, attribute = ("sends", "send") if step.type in SENDS and send < 0 else ("receives", "recv")
                self._damaged(f"a step of type {step.type} {verb}, but {attribute} of its tb is -1", step.line)
        return number, Threadblock(send, receive, max(channel, 0), steps)

    def _gpu(self, element: _Element) -> tuple[int, Gpu]:
        number = self._number(element, "id", 0)
        sizes = [self._number(element, name, 0, default=0) for name in ("i_chunks", "o_chunks", "s_chunks")]
        return number, Gpu(sizes[0], sizes[1], sizes[2], with_copies(self._dense(element, "tb"), element.copies))

    def _algorithm(self, element: _Element) -> Algorithm:
        gpus: tuple[Gpu, ...] = self._dense(element, "gpu")
        if not gpus:
            self._damaged("there is no gpu in it", element.line)
        ranks = self._number(element, "ngpus", 1, MOST_RANKS, default=len(gpus))
        if len(gpus) != ranks:
            self._damaged(f"ngpus is {ranks}, but there are {len(gpus)} of them", element.line)
        collective = self._collective(element)
        protocol = self._protocol(element) if "proto" in element.attributes else "Simple"
        chunks = self._number(element, "nchunksperloop", 1)
        in_place = self._number(element, "inplace", 0, 1, default=0) == 1
        apart = self._number(element, "outofplace", 0, 1, default=int(not in_place)) == 1
        forms = tuple(form for form, meant in ((False, apart or not in_place), (True, in_place)) if meant)
        facts = Facts(
            protocol,
            forms,
            self._bytes(element, "minBytes"),
            self._bytes(element, "maxBytes"),
            self._number(element, "nthreads", 1) if "nthreads" in element.attributes else None,
            tuple((name, value) for name, value in element.attributes.items() if name not in _KNOWN),
        )
        name = element.attributes.get("name", collective)
        if len(name) > LONGEST_WORD or not name.isprintable():
            self._damaged(f"name is {shown(name)}, but must be a word of at most {LONGEST_WORD} letters", element.line)
        return Algorithm(name, collective, chunks, gpus, facts)

    def _collective(self, element: _Element) -> str:
        """As MSCCL spells it, whatever the case; of names with and without a hyphen or underscore, the one it is in."""
        said = self._attribute(element, "coll")
        plain = said.lower().replace("_", "").replace("-", "")
        if plain in HALVES:
            reason = "which is one half of a call and promises nothing: sendrecv is both"
            self._damaged(f"coll is {shown(said)}, {reason}", element.line)
        if said not in COLLECTIVES and plain not in COLLECTIVES:
            known = f"one of {', '.join(COLLECTIVES)} (custom: whatever its steps compute)"
            self._damaged(f"coll is {shown(said)}, but must be {known}", element.line)
        return said if said in COLLECTIVES else plain

    def _protocol(self, element: _Element) -> str:
        said = self._attribute(element, "proto")
        found = next((known for known in SLOTS if known.lower() == said.lower()), None)
        if found is None:
            self._damaged(f"proto is {shown(said)}, but must be one of {', '.join(SLOTS)}", element.line)
        return found

    # -- attributes ----------------------------------------------------------------------------------------------------

    def _dense(self, element: _Element, what: str) -> tuple[Any, ...]:
        found = element.children
        for number in range(len(found)):
            if number not in found:
                self._damaged(f"{what} {number} is missing among {len(found)}", element.line)
        return tuple(found[number] for number in range(len(found)))

    def _attribute(self, element: _Element, name: str) -> str:
        value = element.attributes.get(name)
        if value is None:
            self._damaged(f"{element.name} has no {name}", element.line)
        return value

    def _number(
        self, element: _Element, name: str, least: int, most: int | None = None, default: int | None = None
    ) -> int:
        if default is not None and name not in element.attributes:
            return default
        text = self._attribute(element, name)
        value = whole_number(text)
        if value is None or value < least or (most is not None and value > most):
            bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
            self._damaged(f"{name} is {shown(text)}, but must be a whole number {bounds}", element.line)
        return value

    def _bytes(self, element: _Element, name: str) -> int | None:
        """A size, which may have more digits than a count."""
        text = element.attributes.get(name)
        if text is None:
            return None
        value = byte_count(text)
        if value is None:
            self._damaged(f"{name} is {shown(text)}, but must be a number of bytes in decimal digits", element.line)
        return value

    def _word(self, element: _Element, name: str, known: tuple[str, ...]) -> str:
        value = self._attribute(element, name)
        if value not in known:
            self._damaged(f"{name} is {shown(value)}, but must be one of {', '.join(known)}", element.line)
        return value
