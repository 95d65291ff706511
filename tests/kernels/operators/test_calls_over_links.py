"""Where each peer is behind a link of its own, streams and the order of tiles are others, and the outputs the same.

The backend of AMD GPUs says so of them; here it is said of the checker's ranks, which also finds races.
"""

from __future__ import annotations

import pytest

from iris_bench.correctness.check.cases import Case, make_cases, run_case
from iris_core.backends.shm import ShmBackend
from overlap_taxonomy import Agent

CASES = [
    case
    for case in make_cases("all", "all", world_size=3, dtype="bf16", shapes="41x38x27")
    if "portable" in case.variant.name
    if "stream_k" not in case.variant.name
    if case.variant.agent is Agent.COPY_ENGINES or case.variant.family != "gemm_all_scatter"
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.variant.family}-{case.variant.name}")
def test_calls_over_links_of_their_own_are_right(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShmBackend, "is_fully_connected", True)
    report = run_case(case, schedules=1, seed=0, calls=2)
    assert report.ok, report
