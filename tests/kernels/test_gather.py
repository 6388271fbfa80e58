"""How the gather kernel brings rows: beside the main loop of own tiles, or before it; told when all are stored."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fused_builds import STAGES, gather
from ptx import check_acquire_order, check_release_order
from test_fused_tokens import interpreted

SHARED = 227 << 10  # bytes that a CTA may have on sm_90
BESIDE: dict[str, tuple[dict[str, Any], int]] = {  # how it is launched, and to how many ranks rows go
    "push, 2 ranks": ({"ranks": 2}, 1),
    "push, 8 ranks": ({"ranks": 8, "transposed": True}, 7),
    "push, few rows": ({"tile": (64, 256)}, 3),
    "pull": ({"pull": True}, 1),
    "pull, 8 ranks": ({"pull": True, "ranks": 8, "transposed": True}, 1),
    "tokens": ({"tokens": True, "transposed": True}, 1),
}


def bringing(ptx: str) -> str:
    """What brings rows, in order: 16 bytes are loaded (L) or stored (S), a barrier (B), a release (R).

    From the first such load to the last release: what the matmul moves are bulk copies here.
    """
    kinds = (
        ("L", r"ld\.global\.v4\.b32"), ("S", r"st\.global\.v4\.b32"), ("B", r"barrier\.sync 0;"), ("R", r"st\.release"),
    )  # fmt: skip
    found = sorted((match.start(), kind) for kind, text in kinds for match in re.finditer(text, ptx))
    letters = "".join(kind for _, kind in found)
    return letters[letters.index("L") : letters.rindex("R") + 1]


@pytest.mark.parametrize("name", BESIDE)
def test_rows_are_on_their_way_while_others_are_stored(name: str) -> None:
    """Before the first tile: a chunk asked for, the word of the piece before, then the stores of the chunk before.

    Beside a tile: what the step before asked for is stored, and after the last step what that one did; then the words.
    """
    options, copies = BESIDE[name]
    block = 32 * 512 // 256 // 8  # loads of a thread
    before = "L" * block + "L" * block + "BR" + "S" * block * copies + "BR"
    assert bringing(gather(**options).ptx) == before + "S" * copies + "L" + "S" * copies + "BR"


@pytest.mark.parametrize("name", BESIDE)
def test_rows_are_copied_while_tensor_cores_multiply(name: str) -> None:
    """In the machine's own main loop of own tiles: 16 bytes a thread and step, and one wgmma stays under way."""
    options, copies = BESIDE[name]
    kernel = gather(**options)
    loop = kernel.innermost_loop("HGMMA", "STG")
    moves = re.findall(r"\b(?:LDG|STG)\S+", "\n".join(loop))
    assert moves == ["STG.E.128"] * copies + ["LDG.E.128"]
    waits = [one for one in loop if "DEPBAR" in one and "gsb0" in one]
    assert waits
    assert all("gsb0, 0x1" in one for one in waits), "a step waits for its own wgmma"
    others = kernel.innermost_loop("HGMMA", without="STG")
    assert not re.search(r"\bLDG", "\n".join(others)), "tiles of others' rows bring nothing"


@pytest.mark.parametrize("name", BESIDE)
def test_loads_run_ahead_and_nothing_spills(name: str) -> None:
    options, _ = BESIDE[name]
    kernel = gather(**options)
    assert kernel.spills == 0
    assert kernel.registers <= 255
    assert not kernel.serialised
    rows, columns = options.get("tile", (128, 256))
    assert STAGES * (rows + columns) * 64 * 2 <= kernel.shared <= SHARED


VARIANTS: dict[str, dict[str, Any]] = {
    "push": {}, "pull": {"pull": True}, "push, ordinary stores": {"bulk": False, "ranks": 8},
    "tokens": {"bulk": False, "tokens": True}, "without TMA": {"bulk": False, "target": "sm_80", "tile": (128, 128)},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_are_stored_before_their_words(name: str) -> None:
    kernel = gather(**VARIANTS[name])
    moved = [one for one in check_release_order(kernel.ptx) if "cp.async.bulk" not in one]
    assert moved == []
    bare = re.sub(r"(\.reg \.b64 place;\n)\s*barrier\.sync 0;", r"\1", kernel.ptx)
    assert bare != kernel.ptx
    assert [one for one in check_release_order(bare) if "cp.async.bulk" not in one] != []


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_are_read_after_their_words(name: str) -> None:
    kernel = gather(**VARIANTS[name])
    assert check_acquire_order(kernel.ptx) == []
    bare = kernel.ptx.replace("barrier.red.or.pred failed, 0, failed;", "")
    assert bare != kernel.ptx
    assert check_acquire_order(bare) != []


def test_a_gather_as_it_is_launched() -> None:
    """Pulled and beside tiles, from shards of which one has too few own tiles; `test_every_launch` has all others."""
    interpreted("interpreted_launches.py::test_a_gather_as_it_is_launched[True-uneven shards-True-None]")


def test_rows_that_arrive_as_it_is_launched() -> None:
    interpreted("interpreted_launches.py::test_rows_that_arrive_as_it_is_launched[520-True-True]")
