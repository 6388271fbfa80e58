"""How the gather kernel pushes rows: read once, stored to all they are for, told while the next are on their way."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from fused_builds import gather
from ptx import check_release_order
from test_fused_tokens import interpreted
from triton.backends.nvidia.compiler import get_ptxas

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


def test_a_gather_as_it_is_launched() -> None:
    interpreted("interpreted_launches.py::test_a_gather_as_it_is_launched[True-rows1-264-1-True]")
