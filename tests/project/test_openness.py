"""A variant, and a family, from another distribution: one file and an entry point, and all commands know it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefork import Template

Run = Callable[..., str]

A_VARIANT = """
from dataclasses import replace

from iris_kernels.common.variants.implementation import Implementation, default_plan
from iris_kernels.common.variants.entry import variant_of
from iris_kernels.gemm_all_scatter import host
from iris_kernels.gemm_all_scatter.portable import workgroup_specialized as existing
from overlap_taxonomy import Agent, Arrangement, Sync, register


def plan(problem, device):
    return replace(default_plan(problem, device), block_m=16, comm_sms=1)


register(
    variant_of(
        Implementation(
            host.FAMILY,
            "low_tiles",
            plan,
            host.workspace_with_flags,
            existing.launch,
            host.outputs,
            place=(Arrangement.FUSED_KERNEL, Agent.COMM_PROGRAMS, Sync.TILE_FLAG),
            summary="as workgroup_specialized, in low tiles",
        )
    )
)
"""
A_FAMILY = """
from dataclasses import dataclass

from iris_kernels.common.choice.auto import auto_variant
from iris_kernels.common.variants.implementation import Implementation, default_plan
from iris_kernels.common.variants.library import library_variant
from iris_kernels.common.variants.entry import variant_of
from iris_kernels.gemm_all_scatter import host, library
from iris_kernels.gemm_all_scatter.portable import fused_sequential as existing
from iris_kernels.gemm_all_scatter.problem import GemmAllScatterProblem
from overlap_taxonomy import Agent, Arrangement, Sync, register

FAMILY = "gemm_everywhere"


@dataclass(frozen=True)
class Problem(GemmAllScatterProblem):
    pass


register(
    library_variant(
        FAMILY,
        "library",
        library.launch_layout,
        workspace=library.layout_workspace,
        outputs=library.matrix_of,
        predict=lambda machine, work: 8e-6 * work.m * work.n,
        summary="torch.mm, then all_gather_into_tensor",
    )
)
register(
    variant_of(
        Implementation(
            FAMILY,
            "tile_by_tile",
            existing.plan,
            host.workspace,
            existing.launch,
            host.outputs,
            predict=lambda machine, work: 2e-6 * work.m * work.n,
            place=(Arrangement.FUSED_KERNEL, Agent.COMPUTING_PROGRAM, Sync.NONE),
            summary="programs store their tiles to every rank",
        )
    )
)
register(auto_variant(FAMILY))
"""
CHOICE = """
import sys

import torch

from iris_bench.measure.families import FAMILIES
from iris_kernels.common.choice.knowledge import Knowledge
from iris_kernels.common.choice.measured import Measured, key_of
from iris_kernels.common.choice.ranking import Ranking

family, baseline, name = sys.argv[1:]
problem = FAMILIES[family].problem(m=64, n=64, k=64, world_size=2, dtype=torch.bfloat16)
table = {key_of(family, problem): Measured({baseline: 9.0, name: 3.0})}
print(Ranking(Knowledge("", table, {}), family, problem, [baseline, name]).choices().of(64).variant)
"""
BENCH = """
from iris_bench.__main__ import main

if __name__ == "__main__":  # ranks import this, too
    main()
"""


@dataclass(frozen=True)
class Theirs:
    """A module of another distribution: its entry point and source, a variant that it registers, the library's beside.

    Args:
        entry_point, source: its.
        family, variant: a variant that it registers.
        baseline: the library's, which that family's `auto` compares others with.
    """

    entry_point: str
    source: str
    family: str
    variant: str
    baseline: str


VARIANT = Theirs("their_variant", A_VARIANT, "gemm_all_scatter", "low_tiles:portable", "library_layout")
FAMILY = Theirs("gemm_everywhere", A_FAMILY, "gemm_everywhere", "tile_by_tile:portable", "library")
each = pytest.mark.parametrize("theirs", [VARIANT, FAMILY], ids=["variant", "family"])


@pytest.fixture
def installed(tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch) -> Callable[[Theirs], Run]:
    """Return what installs a distribution with a module, and gives what runs Python there and returns what is printed.

    In a fork of what has imported all of this, which looks for others' modules only then.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def install(theirs: Theirs) -> Run:
        site = install_in(tmp_path / "site", theirs)

        def run(code: str, *arguments: object) -> str:
            program = site / "program.py"
            program.write_text(code)
            status, shown = template.run(program, list(map(str, arguments)), timeout_s=240)
            assert status == 0, shown
            return shown

        return run

    return install


def install_in(site: Path, theirs: Theirs) -> Path:
    """Install a distribution with a module in a new folder, which is returned."""
    info = site / "their_module-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "their_module.py").write_text(theirs.source)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-module\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[iris_overlap.families]\n{theirs.entry_point} = their_module\n")
    return site


@each
def test_it_is_listed(tmp_path: Path, theirs: Theirs) -> None:
    """From a fresh start, as users start it."""
    path = os.pathsep.join([str(install_in(tmp_path / "site", theirs)), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "iris_bench", "list"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert theirs.variant in done.stdout


@each
def test_it_is_checked_for_races(installed: Callable[[Theirs], Run], theirs: Theirs) -> None:
    options = ["--family", theirs.family, "--variant", theirs.variant, "--shapes", "40x70x33", "--schedules", 2]
    assert theirs.variant in installed(theirs)(BENCH, "check", *options)


@each
def test_it_is_measured(installed: Callable[[Theirs], Run], theirs: Theirs, tmp_path: Path) -> None:
    options = ["--family", theirs.family, "--variant", f"{theirs.variant},auto", "--shapes", "40x70x33"]
    outputs = ["--device", "cpu", "--world-size", 2, "--out", tmp_path / "rows.csv", "--plot", tmp_path / "rows.png"]
    installed(theirs)(BENCH, "run", *options, *outputs)
    with (tmp_path / "rows.csv").open() as file:
        rows = {row["variant"]: row["status"] for row in csv.DictReader(file)}
    assert rows[theirs.variant] == rows["auto"] == "ok"
    assert (tmp_path / "rows.png").exists()


@each
def test_it_is_chosen_where_it_was_measured_to_be_the_fastest(
    installed: Callable[[Theirs], Run], theirs: Theirs
) -> None:
    said = installed(theirs)(CHOICE, theirs.family, theirs.baseline, theirs.variant)
    assert said.strip() == theirs.variant


def test_it_is_chosen_where_it_is_predicted_to_be_the_fastest(installed: Callable[[Theirs], Run]) -> None:
    said = installed(FAMILY)(BENCH, "explain", "512x512x512", "--family", FAMILY.family, "--gpu", "H100")
    assert f"auto takes {FAMILY.variant}" in " ".join(said.split())
