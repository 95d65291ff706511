"""Four processes, which tests of a file share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from meshes import calls_on


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., Any]]:
    with calls_on("cpu") as call:
        yield call
