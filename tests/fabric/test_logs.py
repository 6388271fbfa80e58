"""The logger: rank in every line, heard without set-up, never twice."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from undertow.errors import InvalidArgument
from undertow.fabric import logs


@pytest.fixture(autouse=True)
def clean_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    logger = logging.getLogger("undertow")
    level = logger.level
    yield
    logger.setLevel(level)
    for handler in logger.handlers:
        if hasattr(handler, "always"):
            handler.always = False
    logs._said.clear()


@contextmanager
def no_logging_set_up() -> Iterator[None]:
    """Pytest puts handlers on the root logger for the time of a test, as a program that sets up logging does."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:] = handlers


def test_warnings_are_heard_with_the_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("undertow").setLevel("WARNING")
    monkeypatch.setenv("RANK", "2")
    with no_logging_set_up():
        logs.logger.warning("no peer access, staging through %s", "host memory")
        logs.logger.info("not at this level")
        monkeypatch.delenv("RANK")
        logs.get_logger().error("alone")
    expected = "[undertow rank 2] WARNING no peer access, staging through host memory\n[undertow rank -] ERROR alone\n"
    assert capsys.readouterr().err == expected


def test_once_says_each_key_once(capsys: pytest.CaptureFixture[str]) -> None:
    with no_logging_set_up():
        for _ in range(3):
            logs.once("staged", "staging")
        logs.once("other", "other")
    assert capsys.readouterr().err == "[undertow rank -] WARNING staging\n[undertow rank -] WARNING other\n"


def test_a_program_with_handlers_gets_the_records_alone(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    logs.logger.warning("told")
    assert [record.message for record in caplog.records] == ["told"]
    assert caplog.records[0].__dict__["rank"] == "3"
    assert capsys.readouterr().err == ""


def test_configure_prints_at_its_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug")
    logs.logger.debug("detail")
    assert capsys.readouterr().err == "[undertow rank -] DEBUG detail\n"
    with pytest.raises(InvalidArgument, match="log level is 'loud'"):
        logs.configure("loud")


def test_making_the_logger_again_adds_nothing() -> None:
    before = list(logs.get_logger().handlers)
    assert logs.get_logger().handlers == before


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        ("INFO", ["[undertow rank 1] INFO hello"]),
        ("ERROR", []),
        ("shout", ["[undertow rank 1] WARNING UNDERTOW_LOG is 'SHOUT', but must be one of"]),
    ],
)
def test_the_environment_sets_the_level(level: str, lines: list[str]) -> None:
    code = "from undertow.fabric.logs import logger; logger.info('hello')"
    environment = {"UNDERTOW_LOG": level, "RANK": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=True
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("[undertow")]
    assert len(said) == len(lines)
    assert all(line.startswith(start) for line, start in zip(said, lines, strict=True))
