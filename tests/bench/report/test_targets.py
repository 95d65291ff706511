"""Targets are judged by their figures."""

from __future__ import annotations

import math

from iris_bench.report.targets import judged


def test_a_figure_counts_before_it_is_rounded() -> None:
    assert judged(1.1, least=1.1) == "1.10 met"
    assert judged(1.0999, least=1.1) == "1.10 **missed**"
    assert judged(15.04, ".0f", most=15.0) == "15 **missed**"
    assert judged(0.9, ".0%", least=0.9) == "90% met"
    assert judged(math.nan, least=1.1) == ""
