"""What `make test-quick` leaves out is marked by what a test needs, not by hand."""

from __future__ import annotations

import pytest
from ranks import Pools


def test_what_needs_ranks_is_slow(request: pytest.FixtureRequest, pools: Pools) -> None:
    assert request.node.get_closest_marker("slow")


def test_what_needs_neither_ranks_nor_a_compiler_is_quick(request: pytest.FixtureRequest) -> None:
    assert not request.node.get_closest_marker("slow")
