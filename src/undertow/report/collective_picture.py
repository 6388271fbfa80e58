"""The flow of chunks through a schedule as a picture: ranks as rows, time to the right, colours by chunk.

Time counts steps: an instruction comes one step after the last thing it waits for. Few ranks are drawn box by box, with
lines where data goes to another rank; many are summed up in bands of ranks and of time, the darker the busier.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from ..collective.formats.order import sequential, waits_of
from ..collective.schedule import MOVE, Schedule
from .collective import form_in_words, ranks_in_words

MOST_ROWS, MOST_COLUMNS = 32, 96
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BOX, _GAP, _LEFT, _TOP = 15, 6, 62, 46
_WIDEST = 1500


@dataclass(frozen=True, slots=True)
class Box:
    """One instruction: whose, when, the chunk that it moves (the first of several), and how many it sums."""

    rank: int
    step: int
    chunk: int
    sources: int
    to: tuple[int, ...]  # other ranks that it stores to
    words: str


@dataclass(frozen=True)
class Flow:
    """All boxes of a schedule, in an order in which they can happen; `chunks` is how many colours there are."""

    title: str
    ranks: int
    steps: int
    chunks: int
    boxes: tuple[Box, ...]

    @property
    def summed_up(self) -> bool:
        return self.ranks > MOST_ROWS or self.steps > MOST_COLUMNS


def flow(schedule: Schedule) -> Flow:
    """When every instruction can come at the earliest, if each takes one step."""
    one, waits = schedule.instructions, waits_of(schedule)
    rank_of = np.repeat(schedule.worker_rank, np.diff(schedule.worker_start)).tolist()
    before: dict[int, list[int]] = {}
    for waiter, waited, back in waits.tolist():
        if back == 0:
            before.setdefault(waiter, []).append(waited)
    first = set(schedule.worker_start.tolist())
    ends: dict[int, int] = {}
    boxes = []
    for at in sequential(schedule.worker_start.tolist(), waits, len(one)):
        after = before.get(at, []) if at in first else [*before.get(at, []), at - 1]
        start = max((ends[other] for other in after), default=0)
        moves = one.kind[at] == MOVE and one.count[at] > 0
        ends[at] = start + int(moves)
        if moves:
            sources = one.source_atom[one.source_start[at] : one.source_start[at + 1]]
            stores = one.store_atom[one.store_start[at] : one.store_start[at + 1]]
            chunk = _chunk(schedule, at, [int(atom) for atom in (*stores, *sources)])
            owners = sorted({int(schedule.atom_rank[atom]) for atom in stores} - {rank_of[at]})
            boxes.append(
                Box(rank_of[at], start, chunk, len(sources), tuple(owners), schedule.describe(at).partition(" (")[0])
            )
    title = f"{schedule.name} for {schedule.contract.name}, {ranks_in_words(schedule.ranks)},"
    title += f" {'staged' if schedule.staged else 'direct'}, {form_in_words(schedule.in_place)}"
    chunks = 1 + max((box.chunk for box in boxes), default=0)
    return Flow(title, schedule.ranks, max(ends.values(), default=0), chunks, tuple(boxes))


def _chunk(schedule: Schedule, at: int, atoms: list[int]) -> int:
    """Which chunk of the data an instruction moves: its length class, or its place where all are of one class."""
    one = schedule.instructions
    if schedule.contract.factor * schedule.contract.spans > 1:
        return int(one.class_of[one.class_start[at]])
    user = [atom for atom in atoms if atom < schedule.user_atoms]
    atom = user[0] if user else atoms[0]
    return atom - int(schedule.first_atom[schedule.atom_rank[atom], schedule.atom_buffer[atom]])


def colour(chunk: int, chunks: int, light: float = 0.55) -> str:
    """As hexadecimal digits. Neighbours differ while there are few; of many, neighbours look alike."""
    turn = (chunk * 0.618034) % 1.0 if 12 < chunks <= MOST_ROWS else 0.9 * chunk / max(1, chunks)
    red, green, blue = colorsys.hls_to_rgb(turn, light, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


# -- in a terminal -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    symbol: str
    chunk: int | None


def cells(shown: Flow, columns: int = 80) -> Iterator[tuple[str, list[Cell]]]:
    """Rows for a terminal: a name and its cells. A cell shows the chunk moved most; neighbours may share a letter."""
    across, down = max(1, -(-shown.steps // columns)), max(1, -(-shown.ranks // MOST_ROWS))
    table: dict[tuple[int, int], Counter[int]] = {}
    for box in shown.boxes:
        table.setdefault((box.rank // down, box.step // across), Counter())[box.chunk] += 1
    for row in range(-(-shown.ranks // down)):
        last = min(shown.ranks, (row + 1) * down) - 1
        name = f"rank {row * down}" if down == 1 else f"{row * down}-{last}"
        made = []
        for column in range(-(-shown.steps // across)):
            found = table.get((row, column))
            if found is None:
                made.append(Cell("·", None))
                continue
            ((chunk, _),) = found.most_common(1)
            letter = chunk if shown.chunks <= len(_SYMBOLS) else chunk * len(_SYMBOLS) // shown.chunks
            made.append(Cell(_SYMBOLS[letter], chunk))
        yield name, made


def terminal(shown: Flow, columns: int = 80, coloured: bool = False) -> Iterator[str]:
    """The picture as lines of text."""
    yield f"{shown.title}: {len(shown.boxes)} moves in {shown.steps} steps"
    rows = list(cells(shown, columns))
    width = max((len(name) for name, _ in rows), default=0)
    for name, found in rows:
        yield f"{name:<{width}} " + "".join(_painted(one, shown.chunks) if coloured else one.symbol for one in found)
    across = max(1, -(-shown.steps // columns))
    said = "each sign is the chunk that is moved most" if across > 1 or shown.ranks > MOST_ROWS else "signs are chunks"
    yield f"{'':<{width}} {said}; one column is {across} step{'s' if across > 1 else ''}"


def _painted(cell: Cell, chunks: int) -> str:
    if cell.chunk is None:
        return cell.symbol
    digits = colour(cell.chunk, chunks)
    red, green, blue = (int(digits[at : at + 2], 16) for at in (1, 3, 5))
    return f"\x1b[38;2;{red};{green};{blue}m{cell.symbol}\x1b[0m"


# -- as SVG ------------------------------------------------------------------------------------------------------------


def svg(shown: Flow) -> str:
    """The picture as a file of its own, without scripts or anything from elsewhere."""
    return _bands(shown) if shown.summed_up else _boxes(shown)


def _boxes(shown: Flow) -> str:
    deep = [1] * shown.ranks
    stacked: Counter[tuple[int, int]] = Counter()
    depth = []
    for box in shown.boxes:
        depth.append(stacked[box.rank, box.step])
        stacked[box.rank, box.step] += 1
        deep[box.rank] = max(deep[box.rank], stacked[box.rank, box.step])
    height = [max(_BOX + 3, min(count, 12) * (_BOX + 1)) for count in deep]
    top = [_TOP + sum(height[:rank]) + _GAP * rank for rank in range(shown.ranks)]
    unit = max(26, min(64, (_WIDEST - _LEFT) // max(1, shown.steps)))
    lines, marks = [], []
    reads: dict[tuple[int, int], list[int]] = {}
    for number, box in enumerate(shown.boxes):
        reads.setdefault((box.rank, box.chunk), []).append(number)

    def place(number: int) -> tuple[float, float]:
        box = shown.boxes[number]
        return _LEFT + box.step * unit, top[box.rank] + min(depth[number], 11) * (_BOX + 1)

    for number, box in enumerate(shown.boxes):
        x, y = place(number)
        paint = colour(box.chunk, shown.chunks)
        for other in box.to:
            later = [one for one in reads.get((other, box.chunk), ()) if shown.boxes[one].step > box.step]
            end = place(min(later, key=lambda one: shown.boxes[one].step)) if later else None
            to_x, to_y = end if end is not None else (x + unit, float(top[other]))
            lines.append(
                f'<path d="M{x + unit - 5:.0f} {y + _BOX / 2:.0f} L{to_x:.0f} {to_y + _BOX / 2:.0f}"'
                f' stroke="{paint}" stroke-width="1" opacity="0.55" fill="none"/>'
            )
        border = ' stroke="#333" stroke-width="1"' if box.sources > 1 else ""
        marks.append(
            f'<g><title>{escape(box.words)}</title><rect x="{x:.0f}" y="{y:.0f}" width="{unit - 5}" height="{_BOX}"'
            f' rx="2" fill="{paint}"{border}/><text x="{x + (unit - 5) / 2:.0f}" y="{y + _BOX - 4:.0f}"'
            f' text-anchor="middle" font-size="9">{box.chunk}</text></g>'
        )
    rows = [
        f'<rect x="{_LEFT - 4}" y="{top[rank] - 2}" width="{shown.steps * unit + 8}" height="{height[rank] + 2}"'
        f' fill="#f4f4f4"/><text x="8" y="{top[rank] + _BOX - 3}">rank {rank}</text>'
        for rank in range(shown.ranks)
    ]
    ticks = [
        f'<text x="{_LEFT + step * unit + unit // 2 - 2}" y="{_TOP - 8}" text-anchor="middle" fill="#777">{step}</text>'
        for step in range(0, shown.steps, max(1, 40 // unit))
    ]
    words = "colours and numbers are chunks; a border means a sum; lines lead to other ranks"
    size = (_LEFT + shown.steps * unit + 16, top[-1] + height[-1] + 12)
    return _page(shown, size, [*ticks, *rows, *lines, *marks], words)


def _bands(shown: Flow) -> str:
    across, down = max(1, -(-shown.steps // MOST_COLUMNS)), max(1, -(-shown.ranks // MOST_ROWS))
    columns, rows = -(-shown.steps // across), -(-shown.ranks // down)
    table: dict[tuple[int, int], Counter[int]] = {}
    for box in shown.boxes:
        table.setdefault((box.rank // down, box.step // across), Counter())[box.chunk] += 1
    busiest = max((one.total() for one in table.values()), default=1)
    made = []
    for (row, column), found in sorted(table.items()):
        ((chunk, _),) = found.most_common(1)
        opacity = 0.25 + 0.75 * found.total() / busiest
        made.append(
            f'<rect x="{_LEFT + column * 13}" y="{_TOP + row * 16}" width="12" height="14" opacity="{opacity:.2f}"'
            f' fill="{colour(chunk, shown.chunks)}"><title>{found.total()} moves</title></rect>'
        )
    for row in range(rows):
        last = min(shown.ranks, (row + 1) * down) - 1
        name = f"{row * down}" if down == 1 else f"{row * down}-{last}"
        made.append(f'<text x="8" y="{_TOP + row * 16 + 11}">{name}</text>')
    words = (
        f"a box is {down} rank{'s' * (down > 1)} for {across} step{'s' * (across > 1)}: the colour is the chunk moved"
    )
    words += " most, the darker the busier"
    return _page(shown, (_LEFT + columns * 13 + 16, _TOP + rows * 16 + 12), made, words)


def _page(shown: Flow, size: tuple[int, int], drawn: list[str], words: str) -> str:
    wide = max(size[0], 8 * max(len(shown.title), len(words)) + 20)
    head = f"{shown.title}: {len(shown.boxes)} moves in {shown.steps} steps"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {size[1]}" width="{wide}" height="{size[1]}"'
            ' font-family="sans-serif" font-size="11">',
            f'<rect width="{wide}" height="{size[1]}" fill="#ffffff"/>',
            f'<text x="8" y="15" font-size="13">{escape(head)}</text>',
            f'<text x="8" y="29" fill="#777">{escape(words)}</text>',
            *drawn,
            "</svg>",
            "",
        ]
    )
