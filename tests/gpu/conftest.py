"""GPU tests run the same checks as the CPU ones; they live beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

for folder in (Path(__file__).parent, *(Path(__file__).parent.parent / one for one in ("fabric", "nn", "ops"))):
    sys.path.insert(0, str(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:  # of the whole session: only those of this folder are meant
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
