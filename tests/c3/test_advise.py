"""Strategies, what is known, and advice: without ranks, from numbers alone."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from undertow.c3 import knowledge as known
from undertow.c3.advice import Advice, Side, advise, preferred
from undertow.c3.characterise import RATIOS, Result, Scenario, Tables, Together, grid, label, mean_shares
from undertow.c3.knowledge import Knowledge
from undertow.c3.strategies import STRATEGIES, Place, given, strategy
from undertow.errors import InvalidArgument, StrategyUnavailable
from undertow.plan.interference import Effect, Interference
from undertow.plan.plan import Share
from undertow.report.c3 import judge, mean_table, picture, scenario_table

CARD = Place("cuda", 132, {"net": "", "peer": "", "dma": ""}, divides=True)
RANK = Place("cuda", 33, {"net": "", "peer": "", "dma": ""})
TRUTH = Knowledge(
    Interference(
        33,
        (
            ("dma:base", Effect(0.0, 1e-12, 0.3)),
            ("dma:dma", Effect(0.0, 1e-12, 0.02, 0.0, 0.1)),
            ("peer:base", Effect(0.1, 0.0, 8.0)),
            ("peer:partition", Effect(0.0, 0.0, 0.2)),
            ("peer:priority", Effect(0.9, 0.0, 0.1, 0.0, 0.5)),
        ),
    ),
    ((4, 1.9), (8, 1.4), (16, 1.1)),
    "made up",
)


def made(noise: float = 0.0) -> list[Result]:
    """Scenarios whose times follow TRUTH."""
    found = []
    for number, scenario in enumerate(
        grid(("gemm", "stream"), ("all_gather", "all_reduce"), {"peer": (1 << 26, 1 << 28), "dma": (1 << 24, 1 << 26)})
    ):
        memory = 0.1 if scenario.compute == "gemm" else 1.0
        collective = scenario.nbytes / (3e11 if scenario.lane == "peer" else 1e10)
        compute = scenario.ratio * collective
        names = ("base", "priority", "partition") if scenario.lane == "peer" else ("base", "dma")
        together = {}
        for name in names:
            sms, ctas = (25, 8) if name == "partition" else (33, 33)
            run = TRUTH.run(name, scenario.lane, compute, collective, memory, scenario.nbytes, sms, ctas, 33)
            seconds = TRUTH.model.seconds(run) * (1 + noise * (-1) ** number)
            together[name] = Together(name, seconds, 0.0, 0.0, sms, ctas if scenario.lane == "peer" else 0)
        found.append(Result(scenario, memory, compute, collective, float(scenario.nbytes), 4, 33, together=together))
    return found


# -- strategies --------------------------------------------------------------------------------------------------------


def test_each_strategy_says_what_it_uses() -> None:
    found = {name: strategy(name, RANK) for name in STRATEGIES}
    assert found["base"].share == Share(None, None, 0)
    assert found["base"].compute_first
    assert found["priority"].share == Share(None, None, -1)
    assert not found["priority"].compute_first
    assert found["partition"].share == Share(25, 8, 0)
    assert found["both"].share == Share(25, 8, -1)
    assert found["dma"].lane == "dma"
    assert found["dma"].share.multiprocessors is None
    assert found["dma+fewer"].share.multiprocessors == 31
    assert strategy("partition", CARD).share == Share(100, 32, 0)
    assert strategy("dma+fewer", CARD).share.multiprocessors == 124
    assert strategy("partition", RANK, ctas=4).share == Share(29, 4, 0)
    assert "29 SMs" in strategy("partition", RANK, ctas=4).title


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (Share(multiprocessors=34), "share.multiprocessors is 34, but must be between 1 and the 33 SMs"),
        (Share(multiprocessors=0), "share.multiprocessors is 0"),
        (Share(communication_ctas=34), "share.communication_ctas is 34"),
        (Share(30, 8), "share is 30 SMs for computing beside 8 CTAs, but must be at most the 33 SMs"),
    ],
)
def test_a_share_larger_than_the_gpu_is_refused(share: Share, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        given(share, RANK)
    assert said in str(caught.value)


def test_a_share_of_a_divided_card_says_what_the_driver_gives() -> None:
    assert given(Share(100), CARD).share.multiprocessors == 100
    assert given(Share(101), CARD).share.multiprocessors == 100
    assert given(Share(131), CARD).share.multiprocessors == 124
    assert given(Share(101), dataclasses.replace(CARD, divides=False)).share.multiprocessors == 101
    with pytest.raises(InvalidArgument, match=r"share\.multiprocessors is 3, but must be at least 4"):
        given(Share(3), CARD)


def test_what_cannot_run_here_names_what_can() -> None:
    alone = Place("cpu", 1, {"net": "", "peer": "", "dma": "the group spans several nodes"})
    assert alone.possible == ["serial", "base", "priority"]
    with pytest.raises(StrategyUnavailable, match="possible here: serial, base, priority"):
        strategy("partition", alone)
    with pytest.raises(StrategyUnavailable, match="several nodes"):
        strategy("dma", alone)
    with pytest.raises(StrategyUnavailable, match="several nodes"):
        strategy("base", alone, lane="dma")
    with pytest.raises(InvalidArgument, match="share is 'quick'"):
        strategy("quick", alone)
    small = Place("cuda", 4, {"peer": ""}, divides=True)
    assert "partition" not in small.possible
    with pytest.raises(StrategyUnavailable, match="divides a card by 8 SMs, and this one has 4"):
        strategy("partition", small)
    with pytest.raises(InvalidArgument, match="ctas is 132, but must be between 1 and 131"):
        strategy("partition", CARD, ctas=132)


def test_a_side_of_no_seconds_is_refused() -> None:
    for sides in ((1.0, 0.0), (0.0, 1.0)):
        with pytest.raises(InvalidArgument, match=r"seconds is 0\.0, but must be above 0"):
            advise(*sides, place=CARD)


def test_what_was_known_stays_where_nothing_new_is_learnt() -> None:
    before = Knowledge(Interference(8, (("dma:dma", Effect(0.1)), ("peer:base", Effect(0.2)))), ((2, 1.5),), "assumed")
    now = known.merged(Knowledge(Interference(8, (("peer:base", Effect(0.4)),)), (), "learnt"), before)
    assert dict(now.model.effects) == {"dma:dma": Effect(0.1), "peer:base": Effect(0.4)}
    assert now.narrow == ((2, 1.5),)
    assert now.source == "learnt, 1 effects assumed"


# -- measurements ------------------------------------------------------------------------------------------------------


def test_labels_and_shares() -> None:
    assert label(1.16, 1.0) == "G-long"
    assert label(1.0, 1.16) == "C-long"
    assert label(1.14, 1.0) == label(1.0, 1.14) == "GC-equal"
    scenario = Scenario("gemm", "all_gather", 1, "peer")
    slower = Together("base", 2.5, 1.0, 2.5, 33, 33)
    result = Result(scenario, 0.1, 1.0, 1.0, 1.0, 4, 33, together={"base": slower})
    assert result.ideal == 2
    assert result.share("base") == pytest.approx(0.8 - 1)  # negative values are shown
    tiny = dataclasses.replace(result, compute_seconds=0.04)
    assert tiny.share("base") is None
    assert mean_shares([result, tiny]) == {"peer": {"base": pytest.approx(-0.2)}}
    assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_the_grid_has_every_pair_and_all_ratios() -> None:
    found = grid(("a", "b"), ("x", "y"), {"peer": (1, 2), "dma": (3,)})
    assert len(found) == len(set(found)) == 12
    assert {one.ratio for one in found} == set(RATIOS)


# -- what is known -----------------------------------------------------------------------------------------------------


def test_what_is_learnt_predicts_what_was_held_out() -> None:
    exact = made()
    assert known.held_out(known.halves(exact, TRUTH.narrow)) < 0.02
    judged = judge(made(noise=0.02), TRUTH.narrow)
    assert judged["error"] < 0.08
    assert judged["of_best"] > 0.95
    assert judged["against_base"] > 0.98


def test_files_survive_and_damage_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path))
    assert known.load("cuda", 4, 33).source == "assumed"
    path = known.save(TRUTH, "cuda", 4)
    assert known.load("cuda", 4, 33) == TRUTH
    assert known.load("cuda", 4, 66).source == "assumed"  # learnt on another machine
    good = path.read_text()
    for damage in (
        "", "{", "[]", good.replace("undertow c3 1", "2"), good.replace("0.9", "-0.9"), good.replace("0.9", '"much"'),
        good.replace('"crowding"', '"crowd"'), good.replace('"multiprocessors": 33', '"multiprocessors": 0'),
        good.replace("0.9", "Infinity"), good.replace('"errors": {}', '"errors": [1]'),
        good.replace('"errors": {}', '"errors": {"peer:base": -1}'),
    ):  # fmt: skip
        assert damage != good
        path.write_text(damage)
        assert known.load("cuda", 4, 33).source == "assumed", damage[:40]


def test_parts_alone() -> None:
    assert TRUTH.computing(11, 0.0) == pytest.approx(3.0)
    assert TRUTH.computing(11, 1.0) == 1
    assert TRUTH.communicating(None) == 1
    assert TRUTH.communicating(2) == pytest.approx(3.8)
    assert TRUTH.communicating(6) == pytest.approx(1.65)
    assert TRUTH.communicating(33) == 1.1
    tables = Tables({}, {"a": {0: 1.0, 8: 2.0}, "b": {0: 1.0, 8: 0.5}})
    assert known.narrowness(tables) == ((8, 1.0),)


# -- advice ------------------------------------------------------------------------------------------------------------


def test_the_shortest_prediction_is_taken() -> None:
    side = Side({"peer": 1e-3, "dma": 1.05e-3}, nbytes=1 << 26, ctas=32)
    found = advise(Side(1e-3, 0.1, ctas=1024), side, place=RANK, knowledge=TRUTH)
    assert found.strategy.name == "dma"
    assert found.predicted["dma:dma"] == min(found.predicted.values())
    assert found.speedup > 1.8
    assert found.baselines["launch order"] == "priority:peer"
    assert found.baselines["size threshold"] == "dma:dma"
    assert found.baselines["two tables"].startswith("partition:peer with ")
    assert "dma:dma" in found.explain()
    assert json.loads(json.dumps(found.to_json()))["strategy"] == "dma"
    slow = advise(Side(1e-3, 0.1), Side({"peer": 1e-4, "dma": 5e-2}), place=RANK, knowledge=TRUTH)
    assert slow.strategy.lane == "peer"


def test_serial_where_nothing_beats_it() -> None:
    hostile = Knowledge(Interference(33, tuple((f"peer:{name}", Effect(5.0, 0, 50.0)) for name in STRATEGIES)))
    found = advise(1e-3, 1e-3, place=Place("cuda", 33, {"peer": ""}), knowledge=hostile)
    assert found.strategy.name == "serial"


def test_a_gain_that_is_smaller_than_the_models_error_is_none() -> None:
    predicted = {"base:peer": 1.0, "priority:peer": 0.95, "partition:peer": 0.9, "serial:peer": 0.97}
    sure = Knowledge(Interference(33, ()))
    assert preferred(predicted, sure) == "partition:peer"
    doubtful = dataclasses.replace(sure, errors=(("peer:base", 0.02), ("peer:partition", 0.2)))
    assert preferred(predicted, doubtful) == "priority:peer"
    in_doubt = dataclasses.replace(sure, errors=(("peer:base", 0.3),))
    assert preferred(predicted, in_doubt) == "base:peer"
    without = {name: took for name, took in predicted.items() if not name.startswith("base")}
    assert preferred(without, in_doubt) == "partition:peer"


def test_errors_are_learnt_and_kept() -> None:
    exact, noisy = known.learn(made()), known.learn(made(noise=0.1))
    assert exact.error("base", "dma") < 0.01 < 0.05 < noisy.error("base", "dma") < 0.15
    assert exact.error("both", "dma") == 0.0
    assert Knowledge.from_json(json.loads(json.dumps(noisy.to_json()))).errors == noisy.errors
    older = {name: value for name, value in noisy.to_json().items() if name != "errors"}
    assert Knowledge.from_json(older).errors == ()
    assert known.merged(exact, noisy).error("base", "dma") == exact.error("base", "dma")


def test_the_papers_rules() -> None:
    wide = advise(Side(1e-3, ctas=8), Side(1e-3, nbytes=1 << 20, ctas=32), place=RANK, knowledge=TRUTH)
    assert wide.baselines["launch order"] == "base:peer"
    assert wide.baselines["size threshold"] == "base:peer"  # too small for copy engines
    memory = advise(Side(1e-3, 0.9), Side(1e-3, nbytes=1 << 26), place=RANK, knowledge=TRUTH)
    assert memory.baselines["size threshold"] == "dma+fewer:dma"


def test_advice_takes_less_than_a_millisecond() -> None:
    side, other = Side(1e-3, 0.3), Side({"peer": 1e-3, "dma": 2e-3}, nbytes=1 << 26)
    times = []
    found: Advice | None = None
    for _ in range(30):
        began = time.perf_counter()
        found = advise(side, other, place=CARD, knowledge=TRUTH)
        times.append(time.perf_counter() - began)
    assert found is not None
    assert min(times) < 1e-3


@pytest.mark.parametrize(
    ("compute", "collective", "said"),
    [
        (Side(-1.0), Side(1.0), "compute.seconds is -1.0"),
        (Side(float("nan")), Side(1.0), "compute.seconds is nan"),
        (Side(1.0, memory=2.0), Side(1.0), "compute.memory is 2.0"),
        (Side(1.0), Side({}), "collective.seconds is {}"),
        (Side(1.0), Side({"moon": 1.0}), "known for one of the lanes"),
        (Side({"peer": 1.0}), Side(1.0), "one number"),
    ],
)
def test_bad_questions_are_refused(compute: Side, collective: Side, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        advise(compute, collective, place=RANK, knowledge=TRUTH)
    assert said in str(caught.value)


# -- for people --------------------------------------------------------------------------------------------------------


def test_tables_and_the_picture() -> None:
    results = made()
    assert scenario_table(results, "title").row_count == len(results)
    assert mean_table(results).row_count == 5
    drawn = picture(results, "a < b")
    assert drawn.count("<circle") > len(results)
    assert "a &lt; b" in drawn
