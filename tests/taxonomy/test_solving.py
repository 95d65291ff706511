"""A constant of the cost model solved for from one measured time, as a calibration does."""

from __future__ import annotations

import pytest

from overlap_taxonomy import MACHINES
from overlap_taxonomy.fit import solved
from overlap_taxonomy.machine import Machine

H200 = MACHINES["h200x4"]


def test_a_constant_is_solved_for_within_ten_times_of_what_it_was() -> None:
    def us(machine: Machine) -> float:
        """So many bytes, or what else takes at least 4 us; then something in proportion."""
        return max(1e6 / machine.link_gbps / 1e3, 4.0) + machine.hop_us

    start = H200.with_constants({"link_gbps": 100.0, "hop_us": 2.0})
    for measured_us, name, value in ((22.0, "link_gbps", 50.0), (11.0, "hop_us", 1.0), (6.0, "link_gbps", 250.0)):
        assert solved(start, name, us, measured_us) == pytest.approx(value, rel=1e-6)
    for measured_us, name in ((5.9, "link_gbps"), (103.0, "link_gbps"), (10.1, "hop_us"), (31.0, "hop_us")):
        with pytest.raises(ValueError, match=f"{measured_us:g} us were measured; with {name} from .* the model has"):
            solved(start, name, us, measured_us)
    with pytest.raises(ValueError, match="12 us were measured"):  # whatever the constant
        solved(start, "boost_tflops", us, 12.0)
    shares = H200.with_constants({"portable_rate": 0.5})
    with pytest.raises(ValueError, match=r"from 0\.05 to 1 the model"):
        solved(shares, "portable_rate", lambda machine: 1 / machine.portable_rate, 0.5)


@pytest.mark.parametrize(("measured_us", "share"), [(1.0, 1.0), (0.97, 1.0), (1.25, 0.8)])
def test_a_share_is_one_at_most(measured_us: float, share: float) -> None:
    """A GPU that is hot may seem to be a little faster than it is."""
    found = solved(H200, "hot_share", lambda machine: 1 / machine.hot_share, measured_us)
    assert found == pytest.approx(share, rel=1e-6)
