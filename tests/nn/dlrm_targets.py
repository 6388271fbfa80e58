"""The DLRM example, trained inside the ranks of a test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "dlrm.py"


def train(**options: Any) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("dlrm_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dlrm_example"] = module
    spec.loader.exec_module(module)
    return module.train(module.Options(**options))  # type: ignore[no-any-return]
