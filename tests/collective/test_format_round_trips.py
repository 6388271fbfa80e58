"""Every program of the library, written for other systems and read again: checked, and run with exact results.

All of them fit. What other runtimes have no room for is refused, and the sentence says which limit it is.
"""

from __future__ import annotations

import pytest
from contract_runs import run_exactly

from undertow.collective.algorithms import LIBRARY, OUT_OF_PLACE_ONLY
from undertow.collective.checker import check
from undertow.collective.formats import JSON, XML, msccl_import, msccl_read, mscclpp_import, mscclpp_read, text
from undertow.collective.schedule import Schedule
from undertow.collective.topology import Topology
from undertow.errors import NotExpressible

RANKS = (2, 4, 8, 16)


def compiled(name: str, ranks: int, suffix: str, **options: object) -> Schedule:
    target = "staged" if suffix == XML else "direct"
    return LIBRARY[name].compile(topology=Topology.grid(2, ranks // 2), target=target, check=False, **options)


def read_again(written: str, suffix: str) -> list[Schedule]:
    if suffix == XML:
        return msccl_import.schedules(msccl_read.parse(written.encode()))
    return [mscclpp_import.schedule_of(mscclpp_read.parse(written.encode()))]


@pytest.mark.parametrize("suffix", [XML, JSON])
@pytest.mark.parametrize("name", LIBRARY)
def test_library_programs_there_and_back(name: str, suffix: str) -> None:
    for ranks in RANKS:
        schedule = compiled(name, ranks, suffix)
        for again in read_again(text(schedule, suffix), suffix):
            assert again.contract.outputs == schedule.contract.outputs
            check(again)
            run_exactly(again, seed=ranks, runs=1, tiles=(2,) if ranks > 4 else (1, 3))


@pytest.mark.parametrize("suffix", [XML, JSON])
@pytest.mark.parametrize("name", LIBRARY)
def test_in_place_there_and_back(name: str, suffix: str) -> None:
    if LIBRARY[name].trace(4, Topology.grid(2, 2)).contract.in_place is None or name in OUT_OF_PLACE_ONLY:
        with pytest.raises(Exception, match=r"no form in place|overlap|does not hold|overwritten"):
            check(compiled(name, 4, suffix, in_place=True))
        return
    for again in read_again(text(compiled(name, 4, suffix, in_place=True), suffix), suffix):
        assert again.in_place
        check(again)
        run_exactly(again, runs=1)


@pytest.mark.parametrize("name", ["ring", "two_shot", "hierarchical", "all_to_all_two_step", "reduce_scatter_halving"])
def test_instances_become_threadblocks(name: str) -> None:
    schedule = compiled(name, 4, XML, instances=3)
    (again,) = read_again(text(schedule, XML), XML)
    (single,) = read_again(text(compiled(name, 4, XML), XML), XML)
    assert len(again.worker_rank) == 3 * len(single.worker_rank)
    check(again)
    run_exactly(again, runs=1)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("suffix", [XML, JSON])
def test_several_workers(suffix: str, workers: int) -> None:
    for name in ("two_shot", "all_to_all_swap", "halving_doubling"):
        for again in read_again(text(compiled(name, 4, suffix, workers=workers), suffix), suffix):
            check(again)
            run_exactly(again, runs=1)


def test_channels_are_shared_out() -> None:
    """Of more than 32 threadblocks that send on a channel, some get another one."""
    made = msccl_read.parse(text(compiled("all_gather_direct", 40, XML), XML).encode())
    assert 2 <= made.channels <= 3
    for again in msccl_import.schedules(made):
        check(again)


def test_what_a_format_cannot_say_is_refused() -> None:
    with pytest.raises(NotExpressible, match="only a staged schedule"):
        text(compiled("ring", 4, JSON), XML)
    with pytest.raises(NotExpressible, match="only a direct schedule"):
        text(compiled("ring", 4, XML), JSON)
    with pytest.raises(NotExpressible, match="uses 19 channels, and the executor at most 16"):
        text(compiled("all_gather_direct", 20, JSON), JSON)
    with pytest.raises(NotExpressible, match="2 instances"):
        text(compiled("ring", 4, JSON, instances=2), JSON)
    with pytest.raises(NotExpressible, match="33 channels, and the runtime has at most 32"):
        text(compiled("ring", 2, XML, instances=33), XML)
    with pytest.raises(NotExpressible, match="threadblocks, and the runtime has at most 216"):
        text(compiled("one_shot", 16, XML, instances=8), XML)
    with pytest.raises(NotExpressible, match="waits for a kernel's tiles"):
        text(LIBRARY["ring"].compile(4, ready=True, check=False), XML)
