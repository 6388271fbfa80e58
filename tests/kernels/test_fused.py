"""The fused kernels: what their words release and acquire, that nothing spills, that loads still run ahead."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fused_builds import STAGES, decode, few, gather, scatter
from ptx import check_acquire_order, check_after_bulk_stores, check_release_order

from undertow.kernels.turns import LINE
from undertow.plan import fused
from undertow.plan.plan import Plan

SHARED = 227 << 10  # bytes that a CTA may have on sm_90


def test_plans_and_kernels_mean_the_same_line() -> None:
    assert LINE.value == fused.LINE


@pytest.mark.parametrize("tile", [(128, 256), (64, 256)])
def test_a_tile_of_bulk_stores_arrives_before_its_word(tile: tuple[int, int]) -> None:
    """In the loop, and after it for the last tile."""
    ptx = scatter(4, False, tile).ptx
    words = len(re.findall(r"st\.release\.gpu", ptx))
    assert words >= 2
    assert check_after_bulk_stores(ptx, r"st\.release\.gpu", r"4d") == words
    for dropped in ("cp.async.bulk.wait_group 0;", "fence.proxy.async;"):
        with pytest.raises(AssertionError):
            check_after_bulk_stores(ptx.replace(f"    {dropped}\n", ""), r"st\.release\.gpu", r"4d")


def test_a_tile_of_ordinary_stores_and_a_sum_arrive_before_their_words() -> None:
    """In the loop, after it for the last tile, and (BROADCAST) of sums: all of them by the same few lines."""
    ptx = scatter(joined=False).ptx
    assert len(re.findall(r"st\.release\.sys", ptx)) >= 3
    assert check_release_order(ptx) == []
    spoiled = re.sub(r"(\.reg \.b64 place;\n)\s*barrier\.sync 0;", r"\1", ptx)
    assert spoiled != ptx
    assert check_release_order(spoiled) != []


def unordered_loads(ptx: str) -> list[str]:
    """Loads that may run before the acquire that covers them. Bulk loads are of this rank's own factors."""
    return [one for one in check_acquire_order(ptx) if "cp.async.bulk.tensor.2d.shared" not in one.split(": ")[1]]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("broadcast", [True, False])
def test_slots_are_read_after_they_were_waited_for(broadcast: bool, joined: bool) -> None:
    ptx = scatter(4, broadcast, joined=joined).ptx
    assert unordered_loads(ptx) == []
    spoiled = re.sub(r"JOIN:\n\s*barrier\.red\.or\.pred failed, 0, failed;", "JOIN:", ptx)
    assert spoiled != ptx
    assert unordered_loads(spoiled) != []


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_slice_is_asked_for_before_the_one_before_is_added(ranks: int) -> None:
    """Loads of one slice stand before the stores of the other, twice in the loop, and none is moved in registers."""
    loop = scatter(ranks, False).innermost_loop("LDG.E.128")
    each = 4 if ranks <= 4 else 2  # 16 bytes of every rank for each thread
    order = "".join({"LDG.E.128": "a", "STG.E.128": "s"}.get(one.split()[one.startswith("@")], "") for one in loop)
    assert order == 2 * ("a" * ranks * each + "s" * each)
    assert sum("MOV" in one for one in loop) < 40


@pytest.mark.parametrize("bulk", [True, False])
def test_rows_are_read_after_they_were_waited_for(bulk: bool) -> None:
    ptx = gather(bulk).ptx
    assert check_acquire_order(ptx) == []
    assert check_acquire_order(ptx.replace("fence.proxy.async.global;", "")) != []


def test_rows_are_stored_before_their_word() -> None:
    assert check_release_order(gather(False).ptx) == []


@pytest.mark.parametrize(
    "made",
    [
        scatter,
        lambda: scatter(4, False),
        lambda: scatter(8, bias=True),
        lambda: scatter(8, joined=False),
        lambda: scatter(2, False, (64, 256)),
        gather,
        lambda: gather(False),
    ],
    ids=[
        *("scatter", "scatter of 4", "scatter of 8, finished", "scatter by ordinary stores", "scatter of few rows"),
        *("gather", "gather with tails"),
    ],
)
def test_loads_run_ahead_and_nothing_spills(made: Any) -> None:
    kernel = made()
    assert kernel.spills == 0
    assert kernel.registers <= 255
    assert STAGES * (64 + 256) * 64 * 2 <= kernel.shared <= SHARED
    assert "wgmma.mma_async" in kernel.ptx
    assert not kernel.serialised


def test_what_is_moved_is_moved_16_bytes_at_a_time() -> None:
    for kernel in (scatter(), gather(False)):
        found = set(re.findall(r"(?:ld|st)\.global\.\S+", kernel.ptx))
        assert not [one for one in found if "b16" in one], found
        assert any("v4.b32" in one for one in found)


FEW = [(rows, columns) for rows in (16, 32, 64) for columns in (64, 128)]
THREADS, REGISTERS = 256, 64 << 10  # of a CTA, of an SM


@pytest.mark.parametrize(("tile", "at_once", "ranks"), [((16, 64), 2, 4), ((64, 32), 1, 8), (fused.ROW_TILE, 2, 4)])
def test_few_rows_are_sent_as_packets(tile: tuple[int, int], at_once: int, ranks: int) -> None:
    """A packet is data and flag in one access; nothing else is waited for."""
    ptx = decode(tile, ranks, at_once=at_once).ptx
    assert len(re.findall(r"st\.relaxed\.sys\.global\.b64", ptx)) >= ranks
    assert not re.search(r"ld\.acquire", ptx)
    polled = re.findall(r"@wanted(\d+) ld\.relaxed\.sys\.global\.b64", ptx)
    assert len(set(polled)) == ranks * at_once


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
@pytest.mark.parametrize("tile", fused.DECODE_TILES)
@pytest.mark.parametrize("changes", [
    {"RANKS": 4}, {"RANKS": 8, "AT_ONCE": 1},
    {"RANKS": 8, "AT_ONCE": 1, "TURNS": True, "BIAS": True, "ACTIVATION": 3, "TRANSPOSED": False},
    {"RANKS": 8, "AT_ONCE": 1, "SPLIT": 4},
], ids=["4 ranks", "8", "8, bounded, weights by rows", "8, four parts"])  # fmt: skip
def test_small_ctas_find_room_beside_each_other(tile: tuple[int, int], changes: dict[str, Any], target: str) -> None:
    """Two on any SM, or those that multiply might find none beside those that wait; where many are wanted, four."""
    if tile == fused.ROW_TILE and "TRANSPOSED" in changes:
        return  # it has none such
    kernel = decode(tile, target=target, **changes)
    if "TURNS" in changes or "SPLIT" in changes:
        assert kernel.spills <= 128  # bytes, of addresses of 32 packets
        assert kernel.registers * 128 * 2 <= REGISTERS
        assert kernel.shared * 2 <= (SHARED if target == "sm_90" else 99 << 10)
        return
    wanted = 8 if tile == fused.ROW_TILE else 4 if target == "sm_90" else 2
    assert kernel.spills == 0
    assert kernel.registers * 128 * wanted <= REGISTERS
    assert kernel.shared * wanted <= (SHARED if target == "sm_90" else 99 << 10)


def test_one_row_reads_16_bytes_at_a_time() -> None:
    loop = decode(fused.ROW_TILE).innermost_loop("LDG.E.EF.128")
    assert sum("LDG.E.EF.128" in one for one in loop) == 4


@pytest.mark.parametrize(("tile", "weights"), [(fused.ROW_TILE, "LDG.E.EF.128"), ((16, 64), "LDGSTS")])
def test_nobody_waits_for_the_number_of_the_call_before_weights_are_asked_for(
    tile: tuple[int, int], weights: str
) -> None:
    code = [one for _, one in decode(tile).sass]
    first = next(at for at, one in enumerate(code) if weights in one)
    asked = [at for at, one in enumerate(code[:first]) if "LDG.E.STRONG" in one]
    assert asked
    for at in asked:
        (register,) = re.findall(r"LDG\.E\.STRONG\S* (R\d+),", code[at])
        assert not [one for one in code[at + 1 : first] if re.search(rf"\b{register}\b", one)]


def test_a_call_counts_who_read_its_number_and_who_left() -> None:
    """Behind a barrier: all threads have read it, and have stored, and who left releases that."""
    ptx = decode().ptx
    counts = [one.start() for one in re.finditer(r"atom\.global\.gpu\.relaxed|atom\.relaxed\.gpu", ptx)]
    reads = [one.start() for one in re.finditer(r"ld\.volatile\.global", ptx)]
    assert len(counts) == 2  # of those that multiply, of those that sum
    for one in counts:
        read = max(found for found in reads if found < one)
        assert "bar.sync" in ptx[read:one], "a thread counts, and another has not read"
    releases = [one.start() for one in re.finditer(r"(?:atom|red)\.(?:global\.)?(?:gpu\.release|release\.gpu)", ptx)]
    assert releases
    for one in releases:
        stores = [found.start() for found in re.finditer(r"st\.global\.(?!relaxed)\S*b(?:16|32)", ptx[:one])]
        barriers = [found.start() for found in re.finditer(r"\bbar(?:rier)?\.", ptx[:one])]
        assert barriers[-1] > stores[-1]


def test_a_call_begins_when_the_one_in_front_has_ended() -> None:
    """Nothing is read or stored before the wait; the next one is let in behind a barrier, when packets have come."""
    for tile in (fused.ROW_TILE, (16, 64)):
        ptx = decode(tile).ptx
        before, after = ptx.split("griddepcontrol.wait")
        assert not re.findall(r"\b(?:ld|st|atom|red)\.(?!param)|cp\.async", before)
        (let,) = (one.start() for one in re.finditer(r"griddepcontrol\.launch_dependents", after))
        barriers = [found.start() for found in re.finditer(r"\bbar(?:rier)?\.", after[:let])]
        assert barriers[-1] > after[:let].rindex("bra POLL")
    assert "griddepcontrol" not in decode(target="sm_80").ptx


@pytest.mark.parametrize("tile", FEW)
@pytest.mark.parametrize("ranks", [4, 8])
def test_the_next_call_of_few_rows_finds_room_beside_this_one(tile: tuple[int, int], ranks: int) -> None:
    """What fills more than half an SM would not be launched before this one ends, and could not ask for its weights."""
    kernel = few(tile, ranks, ahead=1024 if tile[1] == 64 else 512)
    assert kernel.spills <= 64  # bytes, of a few addresses that are used once
    assert kernel.registers * THREADS * 2 <= REGISTERS
    assert 80 << 10 <= kernel.shared <= fused.HALF_SHARED
    assert not kernel.serialised
    assert ("wgmma" in kernel.ptx) == (tile[0] == 64)


def test_weights_of_few_rows_stream_across_tiles() -> None:
    """There is one loop over all steps of all tiles: bulk loads before it, and once in it."""
    for tile in ((16, 64), (64, 128)):
        kernel = few(tile)
        stages = fused.owned_stages(Plan("fused", "peer", ((0, 1),), tile=tile, ahead=512), True)
        loads = len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", kernel.ptx))
        assert loads == stages * 2  # of x and of w


@pytest.mark.parametrize("transposed", [True, False])
def test_before_the_launch_in_front_has_ended_weights_are_only_asked_for(transposed: bool) -> None:
    """What is read or stored comes after the wait, in every CTA; the next one is let in behind a barrier."""
    ptx = few((16, 64), transposed=transposed).ptx
    before, after = ptx.split("griddepcontrol.wait")
    assert "cp.async.bulk.prefetch.L2.global" in before
    assert "cp.async.bulk.prefetch" not in after
    assert not re.findall(r"\b(?:ld|st|atom|red)\.(?!param)|cp\.async\.bulk\.tensor|mbarrier\.arrive", before)
    assert not re.search(r"\bret\b", before)
    let = [one.start() for one in re.finditer(r"griddepcontrol\.launch_dependents", after)]
    assert len(let) >= 2  # all are known to run; nothing is left to wait for
    for one in let:  # what some threads waited for, all know
        barriers = [found.start() for found in re.finditer(r"\bbar(?:rier)?\.", after[:one])]
        assert barriers[-1] > after[:one].rindex("bra POLL")
    asks = re.findall(r"@wanted cp\.async\.bulk\.prefetch", before)
    assert len(asks) == 2 * (1 if transposed else 2)  # of two blocks, 512 elements along K: rows of 256 threads


def test_parts_and_sums_are_told_of_when_they_are_there() -> None:
    for tile, ranks in (((16, 64), 4), ((64, 128), 8)):
        ptx = few(tile, ranks).ptx
        assert len(re.findall(r"st\.release\.sys", ptx)) >= 1
        assert check_release_order(ptx) == []
        assert unordered_loads(ptx) == []
        for text, check in (
            (r"(\.reg \.b64 place;\n)\s*barrier\.sync 0;", check_release_order),
            (r"(JOIN:\n)\s*barrier\.red\.or\.pred failed, 0, failed;", unordered_loads),
        ):
            spoiled = re.sub(text, r"\1", ptx)
            assert spoiled != ptx
            assert check(spoiled) != []


def test_parts_and_sums_move_16_bytes_at_a_time() -> None:
    found = set(re.findall(r"(?:ld|st)\.global\.\S+", few((64, 128)).ptx))
    assert not [one for one in found if "b16" in one], found
    assert any("v4.b32" in one for one in found)


def test_few_rows_without_tma() -> None:
    kernel = few((64, 128), target="sm_80", ahead=0)
    assert kernel.spills == 0
    assert "griddepcontrol" not in kernel.ptx
    assert "cp.async.bulk" not in kernel.ptx
    assert check_release_order(kernel.ptx) == []
