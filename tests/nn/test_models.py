"""Hugging Face models over ranks: they answer and learn as on one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import model_targets as targets
import pytest
import torch

import undertow as ut


@pytest.mark.parametrize(
    ("architecture", "dtype", "close", "ranks"),
    [
        ("llama", torch.float32, 1e-5, 2),
        ("qwen3", torch.bfloat16, 3e-2, 2),
        ("mixtral", torch.float32, 1e-5, 2),
        ("qwen3_moe", torch.float32, 1e-5, 3),
        pytest.param("mixtral", torch.bfloat16, 3e-2, 2, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", torch.bfloat16, 3e-2, 2, marks=pytest.mark.nightly),
        pytest.param("mixtral", torch.float32, 1e-5, 3, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", torch.float32, 1e-5, 2, marks=pytest.mark.nightly),
        pytest.param("qwen2", torch.float32, 1e-5, 2, marks=pytest.mark.nightly),
        pytest.param("mistral", torch.float32, 1e-5, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_model_answers_as_on_one_rank(architecture: str, dtype: torch.dtype, close: float, ranks: int) -> None:
    for found in ut.launch(targets.same_as_one_rank, ranks, device="cpu", args=(architecture, dtype)):
        assert found["error"] < close
        assert found["layers"] == (12 if architecture in targets.EXPERTS else 16)
        assert found["share"] < 0.8
        if dtype == torch.float32:
            assert found["same tokens"]


@pytest.mark.parametrize(
    ("architecture", "dtype", "implementation", "close", "ranks"),
    [
        ("mixtral", torch.float64, "eager", 1e-5, 2),
        ("qwen3_moe", torch.float32, "grouped_mm", 1e-4, 2),
        pytest.param("mixtral", torch.float32, "grouped_mm", 1e-4, 3, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", torch.float64, "eager", 1e-5, 3, marks=pytest.mark.nightly),
        pytest.param("mixtral", torch.float32, "batched_mm", 1e-4, 2, marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_those_of_one_rank(
    architecture: str, dtype: torch.dtype, implementation: str, close: float, ranks: int
) -> None:
    for found in ut.launch(targets.gradients, ranks, device="cpu", args=(architecture, dtype, implementation)):
        assert all(value < close for value in found.values()), found  # NaN, too


@pytest.mark.parametrize(
    "architecture",
    ["mixtral", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("llama", "qwen3", "qwen3_moe"))],
)
def test_files_of_transformers(architecture: str, tmp_path: Path) -> None:
    for found in ut.launch(targets.files, 2, device="cpu", args=(architecture, str(tmp_path))):
        assert found["files"] > 1
        assert found["error"] < 3e-2
        assert found["read again"]
        assert found["alike"]


@pytest.mark.parametrize(("architecture", "steps"), [("llama", 50), ("qwen3", 5), ("mixtral", 5)])
def test_a_model_learns_as_on_one_rank(architecture: str, steps: int) -> None:
    """Qwen3 has norms of single heads: whole on every rank, with the gradient of its own heads only, unless summed."""
    for want, got, apart in ut.launch(targets.trained, 2, device="cpu", args=(architecture, steps, "chunked:peer")):
        assert len(want) == steps
        assert want[-1] < want[0] / (10 if steps == 50 else 1)
        assert all(abs(one - other) < 1e-5 for one, other in zip(want, got, strict=True))
        assert apart < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mixtral", "qwen3_moe", "gpt_oss"])
def test_the_example(architecture: str) -> None:
    script = Path(__file__).parents[2] / "examples" / "tensor_parallel_llama.py"
    command = [sys.executable, "-c", "from undertow.cli import main; main()", "run", "-n", "2", "--device", "cpu"]
    done = subprocess.run([*command, script, architecture], capture_output=True, text=True, timeout=120, check=True)
    tokens = done.stdout.partition("]")[0].strip(" [").split(", ")
    assert tokens[:4] == ["1", "2", "3", "4"]
    assert len(tokens) == 16
