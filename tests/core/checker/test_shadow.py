"""What was last done to each byte, of accesses that reach over several pages of the record, in any order."""

from __future__ import annotations

import numpy as np
import pytest

from iris_core.checker.clocks import WEAK, Clocks
from iris_core.checker.shadow import Access, Shadow


@pytest.mark.parametrize("is_sorted", [True, False])
def test_each_byte_keeps_its_own_lane(is_sorted: bool) -> None:
    """A program's later write races but where the lane is the same, and only where it writes."""
    clocks = Clocks()
    program, shadow = clocks.add_program(0, "a program"), Shadow(clocks)
    chance = np.random.default_rng(0)
    addresses = 7 * np.arange(30_000)  # in four pages
    if not is_sorted:
        chance.shuffle(addresses)
    lanes = np.arange(len(addresses))

    def write(at: np.ndarray, lanes: np.ndarray, site: int) -> list[int]:
        access = Access(program, clocks.stamp(program), site, WEAK, True, lanes)
        return [conflict.address for conflict in shadow.access(at, access)]

    assert write(addresses, lanes, 1) == []
    assert write(addresses, lanes, 2) == []
    chosen = chance.choice(len(addresses), 8, replace=False)
    others = lanes[chosen].copy()
    others[3] += 1
    assert write(addresses[chosen], others, 3) == [addresses[chosen[3]]]
    assert write(addresses[chosen] + 1, others, 4) == []
