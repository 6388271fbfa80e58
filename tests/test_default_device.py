"""`torch.set_default_device` and `set_default_dtype` are the user's: no tensor of the library's own follows them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import default_device_targets as targets
import undertow as ut

SOURCE = Path(ut.__file__).parent
MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "normal", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices", "triu_indices",
    "zeros",
}  # fmt: skip


def unsaid(text: str) -> Iterator[int]:
    """Lines that make a tensor without saying where."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func.value) == "torch" and node.func.attr in MAKERS:
            said = {one.arg for one in node.keywords}
            if not said & {"device", None}:  # None: **options
                yield node.lineno


def test_whatever_makes_a_tensor_says_where() -> None:
    """Also what only a GPU runs."""
    found = [f"{path.relative_to(SOURCE)}:{line}" for path in SOURCE.rglob("*.py") for line in unsaid(path.read_text())]
    assert not found


def test_one_that_does_not_say_is_found() -> None:
    assert list(unsaid("import torch\nx = torch.zeros(3)\ny = torch.zeros(3, device='cpu')\n")) == [2]


@pytest.mark.parametrize("ranks", [2])
def test_nothing_follows_torchs_defaults(ranks: int) -> None:
    assert all(ut.launch(targets.nothing_follows_torchs_defaults, ranks, device="cpu"))
