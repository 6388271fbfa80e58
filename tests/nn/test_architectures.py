"""`parallelize` on decoders of transformers 5 that it was not written for: right, or refused in a sentence."""

from __future__ import annotations

from typing import Any

import architecture_targets as targets
import pytest
from architectures import BY_OTHERS, REFUSED, RIGHT

import undertow as ut
from undertow.nn.styles import Style

VOCABULARY: dict[str, Style] = {**ut.nn.TRANSFORMER, **ut.nn.VOCABULARY}
SOME = ("deepseek_v3", "gemma3_text", "gpt_oss", "hunyuan_v1_dense", "mixtral", "olmo2", "phi3", "qwen3_next")
LINEAR_ATTENTION = 1e-3  # whose gradients differ as much by rounding alone


def _right(which: list[tuple[str, dict[str, Any], dict[str, Style]]], ranks: int) -> None:
    names = [name for name, _, _ in which]
    for found in ut.launch(targets.surveyed, ranks, device="cpu", args=(which,), deadline=300):
        assert list(found) == names
        for name, errors in found.items():
            assert isinstance(errors, dict), (name, errors)
            close = LINEAR_ATTENTION if name.startswith(("qwen3_5", "qwen3_next")) else 1e-4
            wrong = {what: error for what, error in errors.items() if not error < close}  # NaN, too
            assert not wrong, (name, wrong)


def test_some_are_right() -> None:
    _right([(name, RIGHT[name], VOCABULARY) for name in SOME], 2)


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "plan"), [(2, dict(ut.nn.TRANSFORMER)), (2, VOCABULARY), (3, VOCABULARY)])
def test_all_are_right(ranks: int, plan: dict[str, Style]) -> None:
    _right([(name, options, plan) for name, options in RIGHT.items()], ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3])
def test_plans_of_ones_own(ranks: int) -> None:
    _right([(name, options, dict(plan)) for name, (options, plan) in BY_OTHERS.items()], ranks)


@pytest.mark.nightly
def test_others_are_refused() -> None:
    which = [(name, options, dict(ut.nn.TRANSFORMER)) for name, (options, _) in REFUSED.items()]
    for found in ut.launch(targets.surveyed, 2, device="cpu", args=(which,)):
        for name, (_, sentence) in REFUSED.items():
            said = found[name]
            assert isinstance(said, str), (name, said)
            assert sentence in said
