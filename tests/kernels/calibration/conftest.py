"""Calibrations of a test are kept in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
