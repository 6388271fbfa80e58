"""The table of settings in the docs says what the code says, for every variable that the code reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import undertow
from undertow import settings

PACKAGE = Path(undertow.__file__).parent
PAGE = PACKAGE.parents[1] / "docs" / "settings.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the docs lie beside a checkout only")
def test_the_page_lists_every_setting_with_its_default_and_meaning() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `UNDERTOW_")]
    wanted = [
        f"| `{one.name}` | {f'`{one.default}`' if one.default else '(unset)'} | {one.meaning} |" for one in settings.ALL
    ]
    assert rows == wanted


def test_no_variable_is_read_that_the_table_does_not_know() -> None:
    known = {one.name for one in settings.ALL}
    named = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r"\bUNDERTOW_[A-Z_]+\b", path.read_text())}
    assert named <= known


def test_names_are_unique_and_values_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({one.name for one in settings.ALL}) == len(settings.ALL)
    monkeypatch.setenv(settings.CHECK.name, "1")
    assert settings.CHECK.is_on()
    monkeypatch.setenv(settings.CHECK.name, " off ")
    assert not settings.CHECK.is_on()
    monkeypatch.delenv(settings.CHECK.name)
    assert settings.CHECK.get() == settings.CHECK.default
