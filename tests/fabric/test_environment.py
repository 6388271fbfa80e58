"""What is stored beside a measurement."""

from __future__ import annotations

import json
import platform
import socket
from datetime import datetime
from pathlib import Path

import pytest

from undertow.fabric.environment import commit, cpu_model, driver_version, environment, source

HASH = "0123456789abcdef0123456789abcdef01234567"


def test_environment_names_versions_and_machine_but_not_the_host() -> None:
    facts = environment({"ranks": 8, "link": "pinned host memory"})
    assert facts["python"] == platform.python_version()
    assert facts["ranks"] == 8
    assert facts["link"] == "pinned host memory"
    assert facts["cores"] >= 1
    assert facts["undertow"]
    assert datetime.fromisoformat(facts["date"]).utcoffset() is not None
    assert "hostname" not in facts
    assert socket.gethostname() not in [value for value in facts.values() if isinstance(value, str)]
    json.dumps(facts)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "src" / "undertow"
    folder.mkdir(parents=True)
    return folder


def test_the_source_is_told_by_its_contents(package: Path) -> None:
    (package / "one.py").write_text("1")
    before = source(package)
    assert before == source(package)
    (package / "one.py").write_text("2")
    assert source(package) != before


def test_commit_of_a_loose_reference(package: Path) -> None:
    git = package.parents[1] / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit(package) is None, "a checkout without commits"
    (git / "refs/heads/main").write_text(HASH + "\n")
    assert commit(package) == HASH


def test_commit_of_a_packed_reference_and_of_a_detached_head(package: Path) -> None:
    git = package.parents[1] / ".git"
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{'f' * 40} refs/heads/other\n{HASH} refs/heads/main\n")
    assert commit(package) == HASH
    (git / "HEAD").write_text("a" * 40 + "\n")
    assert commit(package) == "a" * 40


def test_commit_of_a_worktree(package: Path, tmp_path: Path) -> None:
    main = tmp_path / "main.git"
    (main / "refs/heads").mkdir(parents=True)
    (main / "refs/heads/topic").write_text(HASH + "\n")
    tree = main / "worktrees" / "checkout"
    tree.mkdir(parents=True)
    (tree / "HEAD").write_text("ref: refs/heads/topic\n")
    (tree / "commondir").write_text("../..\n")
    (package.parents[1] / ".git").write_text(f"gitdir: {tree}\n")
    assert commit(package) == HASH


def test_an_installed_package_has_no_commit_even_inside_a_checkout(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text(HASH)
    package = tmp_path / "site-packages" / "undertow"
    package.mkdir(parents=True)
    assert commit(package) is None


def test_cpu_model_and_driver_are_read_from_the_kernel(tmp_path: Path) -> None:
    information = tmp_path / "cpuinfo"
    information.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_model(information) == "Some CPU @ 2 GHz"
    assert cpu_model(tmp_path / "absent") == platform.machine()
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    assert driver_version(version) == "580.95.05"
