"""Fixtures: ranks on the CPU, and on GPUs where a test is marked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import Pools, Ranks


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """All pools of ranks of this session."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Run a test without a GPU, and where GPUs are asked for also on them."""
    return request.param


@pytest.fixture
def ranks(pools: Pools, device: str) -> Callable[[int], Ranks]:
    """``ranks(world_size)`` gives that many ranks on the test's device."""

    def of(world_size: int) -> Ranks:
        if device == "cuda" and torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs; there are {torch.cuda.device_count()}")
        return pools.ranks(world_size, device)

    return of
