"""Names that others have replaced, in results, tables of measured times and tuning caches: of fields, of variants."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from checking import fault, make_data
from families import make_problem
from ranks import Ranks, context, raised
from torch_compiling import FUNCTIONS, sizes_of

from iris_bench.records.csv_rows import append_records
from iris_bench.records.record import YARDSTICKS, read_records
from iris_kernels.common.choice.measured import from_json
from iris_kernels.common.config import GemmConfig, current_fields, parse_config
from overlap_taxonomy import list_variants, registry

RESULTS = Path(__file__).parents[3] / "results"
CONFIG = GemmConfig(128, 64, 32, num_sms=78, row_chunks=2, k_chunks=3, splits=4)
KEY = {"family": "all_gather_gemm", "m": 1, "n": 2, "k": 3, "world_size": 2, "dtype": "bfloat16"}
FORMER = "16x64x128 group=8 warps=4 stages=6 subtiles=2 sms=132 comm_sms=7 comm_rows=1 comm_warps=16 "


def table(config: dict[str, object]) -> str:
    entry = {**KEY, "times_us": {"one_shot": 1.0}, "configs": {"one_shot": config}}
    return json.dumps({"format": 1, "entries": [entry]})


def read(config: dict[str, object]) -> GemmConfig:
    (measured,) = from_json(table(config), {"format": 1}).values()
    return measured.configs["fused_sequential:portable:stream_k"]


@pytest.mark.parametrize("changes", [{}, {"descriptors": False}, {"pingpong": True}])
def test_the_text_of_a_configuration_gives_it_again(changes: dict[str, bool]) -> None:
    config = replace(CONFIG, **changes)
    assert parse_config(str(config)) == config
    assert parse_config(f"{config} copied=A") == config
    assert read(asdict(config)) == config


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("panels=3 team=2 splits=1 chunks=5 queues=2 descriptors", {"row_chunks": 3, "splits": 2, "k_chunks": 5}),
        ("panels=1 team=1 splits=6 pointers", {"row_chunks": 1, "splits": 6, "descriptors": False}),
        ("panels=4 team=1 ahead=-12 descriptors pingpong", {"pingpong": True}),
    ],
)
def test_former_texts_are_understood(text: str, changes: dict[str, int]) -> None:
    config = GemmConfig(16, 64, 128, num_warps=4, num_stages=6, epilogue_subtiles=2, comm_sms=7, comm_rows=1)
    assert parse_config(FORMER + text) == replace(config, **changes)


def test_all_results_are_understood() -> None:
    texts = set()
    for file in RESULTS.rglob("*.csv"):
        with file.open(newline="") as rows:
            texts |= {row.get("config") or "" for row in csv.DictReader(rows)}
    texts = {text for text in texts if " group=" in text and text[0].isdigit()}
    assert len(texts) > 500
    for text in texts:
        parse_config(text)


def test_tables_and_caches_are_read_under_former_names() -> None:
    former = {"block_m": 128, "block_n": 64, "block_k": 32, "num_sms": 78}
    assert read({**former, "panels": 2, "chunks": 3, "team": 1, "splits": 4, "queues": 1}) == CONFIG
    assert read({**former, "panels": 2, "chunks": 3, "team": 4, "splits": 1}) == CONFIG
    for wrong in ({"tiles": 2}, {"panels": True}, {"team": "2"}, {"queues": 1.5}):
        with pytest.raises(ValueError, match=r"entry 0"):
            read({**former, **wrong})


def test_present_names_stay() -> None:
    assert current_fields(asdict(CONFIG)) == asdict(CONFIG)


@pytest.mark.parametrize(
    ("family", "former", "present"),
    [
        ("all_gather_gemm", "copy_engine", "copy_engine:portable"),
        ("all_gather_gemm", "warp_specialized_copies", "copy_engine:sm90"),
        ("all_gather_gemm", "warp_specialized", "workgroup_specialized:sm90"),
        ("gemm_reduce_scatter", "warp_specialized", "warp_specialized:sm90"),
        ("gemm_all_reduce", "one_shot", "fused_sequential:portable:stream_k"),
        ("gemm_all_scatter", "copy_engine:portable", "copy_engine:portable"),
        ("gemm_all_scatter", "library_layout", "library_layout"),
    ],
)
def test_variants_are_read_under_former_names(family: str, former: str, present: str, tmp_path: Path) -> None:
    """A pattern by itself stood for its portable implementation, whatever it would take on this machine."""
    entry = {**KEY, "family": family, "times_us": {former: 1.0}}
    (measured,) = from_json(json.dumps({"format": 1, "entries": [entry]}), {"format": 1}).values()
    assert measured.times_us == {present: 1.0}
    row = read_records(RESULTS / "2026-11-22-h200x4/large-bf16.csv")[0]
    append_records(tmp_path / "former.csv", [replace(row, family=family, variant=former)])
    assert former in (tmp_path / "former.csv").read_text()
    assert [one.variant for one in read_records(tmp_path / "former.csv")] == [present]


@pytest.mark.parametrize(
    ("family", "full", "former"),
    [(one.family, *names) for one in list_variants() for names in one.retired.items()],
)
def test_results_of_what_is_no_more_are_read_and_chosen_by_no_table(
    family: str, full: str, former: str, tmp_path: Path
) -> None:
    entry = {**KEY, "family": family, "times_us": {former: 1.0, full: 1.0, "library": 2.0}, "configs": {}}
    (measured,) = from_json(json.dumps({"format": 1, "entries": [entry]}), {"format": 1}).values()
    assert measured.times_us == {"library": 2.0}
    row = read_records(RESULTS / "2026-11-22-h200x4/large-bf16.csv")[0]
    append_records(tmp_path / "former.csv", [replace(row, family=family, variant=former)])
    assert [one.variant for one in read_records(tmp_path / "former.csv")] == [full]


def call_by_former_names(rank: int, world_size: int, family: str) -> list[str]:
    """Call a family's function, twice by each name of older versions; return what was wrong."""
    registry._warn_of_former_name.cache_clear()
    ctx, faults = context(), []
    problem = make_problem(family, 18, 34, 16, world_size, torch.float32)
    data = make_data(family, problem, rank, 0, ctx.get_device())
    for one in list_variants(family):
        if not one.has_kernels or not (name := one.former_name):
            continue
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", FutureWarning)
            for _ in range(2):
                call = partial(FUNCTIONS[family], ctx, data.a, data.b, variant=name, **sizes_of(family, 18, 34, 16))
                if reason := one.unsupported_reason(problem, None):
                    if reason not in raised(call)[1]:
                        faults.append(f"{name} does not say {reason}")
                elif wrong := fault(call(), data, problem.dtype):
                    faults.append(f"{name}: {wrong}")
        messages = [str(warning.message) for warning in said if warning.category is FutureWarning]
        if len(messages) != 1 or f"is called {one.name!r} now" not in messages[0]:
            faults.append(f"{name} warns by {messages}")
    return faults


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("family", FUNCTIONS)
def test_functions_take_former_names_with_one_warning(ranks: Callable[[int], Ranks], family: str) -> None:
    assert ranks(2).call(call_by_former_names, family) == [[]] * 2


@pytest.mark.parametrize(
    "file", sorted(RESULTS.glob("2026-*-h200x4/*-bf16.csv")), ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_all_results_are_of_variants_that_there_are(file: Path) -> None:
    known = {(one.family, name) for one in list_variants() for name in (one.name, *one.retired)}
    named = {(row.family, row.variant) for row in read_records(file) if row.variant not in YARDSTICKS}
    assert named
    assert named <= known
