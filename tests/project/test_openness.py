"""A variant from another distribution: one file and an entry point, and all commands know it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAME = "low_tiles:portable"
VARIANT = """
from dataclasses import replace

from iris_kernels.common.implementation import Implementation
from iris_kernels.common.variants import variant_of
from iris_kernels.gemm_all_scatter import host
from iris_kernels.gemm_all_scatter.portable import workgroup_specialized as existing
from overlap_taxonomy import Agent, Arrangement, Sync, register


def plan(problem, device):
    return replace(host.plan(problem, device), block_m=16, comm_sms=1)


register(
    variant_of(
        Implementation(host.FAMILY, "low_tiles", plan, existing.workspace, existing.launch, host.outputs),
        arrangement=Arrangement.FUSED_KERNEL,
        agent=Agent.COMM_PROGRAMS,
        sync=Sync.TILE_FLAG,
        summary="as workgroup_specialized, in low tiles",
    )
)
"""
CHOICE = """
from iris_kernels.common.choice.knowledge import Knowledge
from iris_kernels.common.choice.measured import Measured, key_of
from iris_kernels.common.choice.ranking import Ranking
from iris_kernels.gemm_all_scatter import Problem
import torch

problem = Problem(64, 64, 64, 2, torch.bfloat16)
table = {key_of("gemm_all_scatter", problem): Measured({"library_layout": 9.0, "low_tiles:portable": 3.0})}
candidates = ["library_layout", "low_tiles:portable"]
print(Ranking(Knowledge("", table, {}), "gemm_all_scatter", problem, candidates).choices().of(64).variant)
"""


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which a distribution with the variant is installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "their_variant.py").write_text(VARIANT)
    info = folder / "their_variant-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-variant\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[iris_overlap.families]\ntheir_variant = their_variant\n")
    return folder


def run(distribution: Path, *arguments: object) -> str:
    """Run Python where the distribution is installed; return what it prints."""
    path = os.pathsep.join([str(distribution), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_listed(distribution: Path) -> None:
    assert NAME in run(distribution, "-m", "iris_bench", "list")


def test_it_is_checked_for_races(distribution: Path) -> None:
    options = ["--family", "gemm_all_scatter", "--variant", NAME, "--shapes", "40x70x33", "--schedules", 2]
    assert NAME in run(distribution, "-m", "iris_bench", "check", *options)


def test_it_is_measured(distribution: Path, tmp_path: Path) -> None:
    options = ["--family", "gemm_all_scatter", "--variant", NAME, "--shapes", "40x70x33", "--world-size", 2]
    outputs = ["--device", "cpu", "--out", tmp_path / "rows.csv", "--plot", tmp_path / "rows.png"]
    run(distribution, "-m", "iris_bench", "run", *options, *outputs)
    with (tmp_path / "rows.csv").open() as file:
        rows = {row["variant"]: row["status"] for row in csv.DictReader(file)}
    assert rows[NAME] == "ok"
    assert (tmp_path / "rows.png").exists()


def test_it_is_chosen_where_it_is_the_fastest(distribution: Path) -> None:
    assert run(distribution, "-c", CHOICE).strip() == NAME
