"""How the gather kernel pushes rows: read once, stored to all they are for, told while the next are on their way."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fused_builds import STAGES, brought, gather
from ptx import check_acquire_order, check_release_order
from test_fused_tokens import interpreted
from triton.backends.nvidia.compiler import get_ptxas

from undertow.plan.fused import NARROW_TILE

WIDTHS = (256, 1024)


def pushing(ptx: str) -> str:
    """What pushes rows, in order: 16 bytes are loaded (L) or stored (S), a barrier (B), a release (R).

    From the first such load to the last release: what the matmul moves are bulk copies here.
    """
    kinds = (
        ("L", r"ld\.global\.v4\.b32"), ("S", r"st\.global\.v4\.b32"), ("B", r"barrier\.sync 0;"), ("R", r"st\.release"),
    )  # fmt: skip
    found = sorted((match.start(), kind) for kind, text in kinds for match in re.finditer(text, ptx))
    letters = "".join(kind for _, kind in found)
    return letters[letters.index("L") : letters.rindex("R") + 1]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_next_rows_are_on_their_way_while_some_are_stored(width: int) -> None:
    """Loads of a block, then the word of the part before, then the stores of the block before: never load by load."""
    block = min(32 << 10, 64 * width) // 256 // 8  # loads of a thread
    blocks = 128 * width // (block * 8 * 256)
    found = pushing(gather(width=width).ptx)
    first, rest = "L" * block, ("L" * block + "S" * block) * (blocks - 1)
    assert found == first + first + "BR" + "S" * block + rest + "BR"


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_stored_before_their_word(width: int) -> None:
    bare_stores = gather(False, width=width), gather(False, tokens=True, width=width)
    for kernel in (gather(width=width), gather(width=width, pull=True), *bare_stores):
        moved = [one for one in check_release_order(kernel.ptx) if "cp.async.bulk" not in one]
        assert moved == []
        bare = re.sub(r"(\.reg \.b64 place;\n)\s*barrier\.sync 0;", r"\1", kernel.ptx)
        assert bare != kernel.ptx
        assert [one for one in check_release_order(bare) if "cp.async.bulk" not in one] != []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("ranks", "pull"), [(2, False), (8, False), (4, True)])
def test_multiplications_are_not_serialised(width: int, ranks: int, pull: bool) -> None:
    kernel = gather(width=width, ranks=ranks, transposed=True, pull=pull)
    assert kernel.spills == 0
    assert "serialized" not in log(kernel.ptx)


def log(ptx: str) -> str:
    """What ptxas has to say: among other things that it has each wgmma wait for the one before."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source), "-o", f"{folder}/kernel.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(
    "made",
    [
        brought,
        lambda: brought(pull=False, ranks=8),
        lambda: brought(False, bias=True),
        lambda: brought(tile=(64, 256)),
        lambda: brought(tile=NARROW_TILE, width=256),
        lambda: brought(False, tile=NARROW_TILE, width=256, bias=True),
        lambda: brought(in_step=True, ranks=8),
        lambda: brought(in_step=True, ranks=8, tile=(64, 256)),
    ],
    ids=["pulled", "pushed to 8", "with tails", "few rows", "narrow", "narrow, with tails", "in step", "few in step"],
)
def test_loads_of_brought_rows_run_ahead_from_tile_to_tile(made: Any) -> None:
    """Two main loops, own rows' and the others', each with one step's loads in it, the rest before it."""
    kernel = made()
    assert kernel.spills == 0
    assert not kernel.serialised
    assert kernel.shared > 4 * (128 + 128) * 64 * 2
    loads = re.findall(r"cp\.async\.bulk\.tensor\.\d+d\.shared", kernel.ptx)
    assert len(loads) == 2 * 2 * STAGES


def test_who_keeps_in_step_waits_for_a_while_only() -> None:
    """One CTA of a rank that fell out would hold up the others for ever: looks are counted, and end the loop."""
    kernel = brought(in_step=True, ranks=8)
    loops = re.findall(r"AGAIN\w*:(.*?)@late bra AGAIN", kernel.ptx, re.DOTALL)
    assert len(loops) >= 2  # in each main loop
    for loop in loops:
        assert re.search(r"sub\.u32 looks, looks, 1;.*setp\.ne\.and\.u32 late, looks, 0, late;", loop, re.DOTALL)
    assert len(re.findall(r"red\.relaxed\.gpu\.global\.add\.s32", kernel.ptx)) == len(loops)
    assert "red.relaxed" not in brought(ranks=8).ptx


@pytest.mark.parametrize("options", [{"pull": False}, {"width": 256, "split": 4}, {"in_step": True}])
def test_brought_rows_are_told_of_when_they_are_there_and_waited_for(options: dict[str, Any]) -> None:
    ptx = brought(False, **options).ptx  # bulk stores of the result are not what words tell of
    assert check_release_order(ptx) == []
    spoiled = re.sub(r"(\.reg \.b64 place;\n)\s*barrier\.sync 0;", r"\1", ptx)
    assert spoiled != ptx
    assert check_release_order(spoiled) != []
    # A wait, a CTA barrier and a proxy fence stand before the others' loop, and in it.
    waits = [one.start() for one in re.finditer(r"ld\.acquire\.sys", ptx)]
    fences = [one.start() for one in re.finditer(r"fence\.proxy\.async\.global", ptx)]
    assert len(waits) - ("split" in options) == len(fences) >= 2  # parts of sums are read by ordinary loads
    for wait, fence in zip(waits, fences, strict=False):
        assert "barrier.red" in ptx[wait:fence]


@pytest.mark.parametrize(
    "made",
    [
        lambda: brought(width=256, split=4),
        lambda: brought(False, width=256, split=2, bias=True),
        lambda: brought(width=1024, split=8, ranks=8),
        lambda: brought(tile=(64, 256), width=256, split=4),
    ],
    ids=["in 4", "in 2, with tails", "in 8", "few rows"],
)
def test_parts_of_the_last_tiles_are_summed_when_they_are_there(made: Any) -> None:
    kernel = made()
    assert kernel.spills == 0
    assert not kernel.serialised
    loads = [one.start() for one in re.finditer(r"cp\.async\.bulk\.tensor\.\d+d\.shared", kernel.ptx)]
    fences = [one.start() for one in re.finditer(r"fence\.proxy\.async\.global", kernel.ptx)]
    waits = [one.start() for one in re.finditer(r"ld\.acquire\.sys", kernel.ptx)]
    assert len(loads) == 3 * 2 * STAGES
    # The loads of a part follow the wait for its rows; the wait for the parts is the last.
    assert sum(one > fences[-1] for one in loads) == 2 * STAGES
    assert waits[-2] < fences[-1] < waits[-1]
    assert "barrier.red" in kernel.ptx[waits[-2] : fences[-1]]
    assert re.search(r"ld\.global\.v4\.b32", kernel.ptx[waits[-1] :])
    assert check_acquire_order(kernel.ptx) == []


def test_narrow_tiles_of_odd_columns_fit_the_other_kernel() -> None:
    """A rank whose columns cannot be stored 16 bytes at a time has it, whatever the plan's tile."""
    kernel = gather(False, tile=NARROW_TILE, even=False, pull=True, width=256)
    assert kernel.spills == 0
    assert "serialized" not in log(kernel.ptx)


def test_a_gather_as_it_is_launched() -> None:
    interpreted("interpreted_launches.py::test_a_gather_as_it_is_launched[True-rows1-264-1-True]")


def test_brought_rows_as_they_are_launched() -> None:
    name = "interpreted_launches.py::test_brought_rows_as_they_are_launched"
    interpreted(*(f"{name}[{way}-rows0-24-136]" for way in ("beside", "narrow")), f"{name}[split-rows2-264-136]")


def test_rows_that_stay_as_they_are_launched() -> None:
    name = "interpreted_launches.py::test_rows_that_stay_as_they_are_launched"
    interpreted(f"{name}[at once-rows0-24-136]", f"{name}[pushed-rows0-24-136]")
