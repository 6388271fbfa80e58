"""For all tests: plans and machine files go to a folder of their own, and none of the user's are found."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("UNDERTOW_CACHE_DIR")
    os.environ["UNDERTOW_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["UNDERTOW_CACHE_DIR"]
    else:
        os.environ["UNDERTOW_CACHE_DIR"] = before
