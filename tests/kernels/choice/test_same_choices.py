"""What `auto` chooses changes on purpose alone.

choices.csv has problems of each kind, and what is chosen for them by the shipped times, the problem's own or those of
problems like it, and by the cost model alone. It changes with these times and the model.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from families import dtype_and_options, make_problem

from iris_kernels.common.choice.auto import baseline_of
from iris_kernels.common.choice.knowledge import Knowledge
from iris_kernels.common.choice.measured import shipped_tables
from iris_kernels.common.choice.ranking import Ranking
from iris_kernels.common.hopper import host as hopper
from overlap_taxonomy import list_families, list_variants

with Path(__file__).with_name("choices.csv").open(newline="") as _file:
    ROWS = list(csv.DictReader(_file))


@pytest.fixture(autouse=True)
def on_hopper() -> Iterator[None]:
    with mock.patch.object(hopper, "machine_reason", return_value=None):
        yield


@pytest.mark.parametrize("gpu", sorted({row["gpu"] for row in ROWS}))
@pytest.mark.parametrize("family", list_families())
def test_the_same_variant_is_chosen(gpu: str, family: str) -> None:
    rows = [row for row in ROWS if (row["gpu"], row["family"]) == (gpu, family)]
    assert len(rows) >= 5
    shipped = shipped_tables(gpu)
    for row in rows:
        sizes = (int(row[name]) for name in ("m", "n", "k", "world_size"))
        dtype, options = dtype_and_options(row["dtype"])
        problem = make_problem(family, *sizes, dtype, **options)
        ours = [
            one.name for one in list_variants(family) if one.has_kernels and not one.unsupported_reason(problem, None)
        ]
        for column, times in (("by_times", shipped), ("by_model", {})):
            choice = Ranking(Knowledge(gpu, {}, times), family, problem, [baseline_of(family), *ours]).of(problem.m)
            assert choice.variant == row[column], (row, choice)
