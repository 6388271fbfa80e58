"""The wheel: complete, and working where there is nothing else."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_is_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    kinds = ("*.py", "*.toml", "*.css", "*.js")  # what the package reads of itself, too
    found = [path for kind in kinds for path in (ROOT / "src" / "undertow").rglob(kind)]
    assert {str(path.relative_to(ROOT / "src")) for path in found} <= names
    assert "undertow/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "undertow = undertow.cli:main" in entry_points
    assert "License-Expression: Apache-2.0" in metadata
    for extra in ("gpu", "hf", "torchrec", "dev"):
        assert f"Provides-Extra: {extra}" in metadata


@pytest.mark.nightly
def test_wheel_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Outside the checkout, nothing of it on the path."""
    home = tmp_path / "empty"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(install, check=True, timeout=900)
    where = subprocess.run(
        [python, "-c", "import undertow; print(undertow.__file__)"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    ).stdout
    assert str(home) in where
    done = subprocess.run(
        [home / "bin" / "undertow", "demo", "--quick"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Every result equals the reference exactly" in done.stdout
