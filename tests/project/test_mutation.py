"""The mutants of ``make mutants``: enough of everything, sound Python, and explained only where they exist."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from mutation.explained import EXPLAINED
from mutation.mutants import Mutant, make_mutants
from mutation.uses import Uses

ROOT = Path(__file__).parents[2]


@functools.cache
def mutants() -> list[Mutant]:
    return make_mutants(ROOT)


@functools.cache
def uses() -> Uses:
    return Uses(ROOT)


def named(name: str) -> Mutant:
    (mutant,) = [mutant for mutant in mutants() if mutant.name == name]
    return mutant


@pytest.mark.parametrize(
    "change",
    [
        "no signal(", "no signal_each(", "no wait(", "no wait_each(", "no tl.debug_barrier()", "no thread_barrier()",
        "no fence_", "no mbarrier.wait(", "no mbarrier.arrive(", "no producer_acquire(", "no producer_commit(",
        "no consumer_wait(", "no consumer_release(", "release -> relaxed", "acquire -> relaxed", "acq_rel -> relaxed",
        "sys -> gpu", "no cache_modifier='.cg'", "no volatile=True", "ld.acquire. -> ld.relaxed.",
        "+ 1 -> ", "^ 1 -> ", "always the first", "fence.proxy.async; -> nothing",
        "griddepcontrol.wait; -> nothing", "copies.wait_value(",
    ],
)  # fmt: skip
def test_there_are_mutants_of_every_kind(change: str) -> None:
    assert any(change in mutant.change for mutant in mutants())


def test_every_use_of_a_pipeline_is_left_out_once() -> None:
    """Also where a kernel would use what the call returns."""
    uses = ("producer_acquire", "producer_commit", "consumer_wait", "consumer_release")
    calls = [
        (str(path.relative_to(ROOT)), node.lineno, f"no {ast.unparse(node)}")
        for path in ROOT.glob("kernels/**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in uses
    ]
    left_out = [(mutant.path, mutant.line, mutant.change.partition(" #")[0]) for mutant in mutants()]
    assert len(calls) > 20
    assert sorted(calls) == sorted(one for one in left_out if one[2].partition("(")[0][3:] in uses)


def test_each_is_another_program_of_as_many_lines() -> None:
    programs = set()
    for mutant in mutants():
        source = (ROOT / mutant.path).read_bytes()
        changed = mutant.apply(source)
        assert changed != source
        assert changed.count(b"\n") == source.count(b"\n")
        ast.parse(changed)
        programs.add((mutant.path, changed))
    assert len(programs) == len(mutants()) == len({mutant.name for mutant in mutants()})
    assert len(mutants()) > 250


def test_explanations_are_of_mutants_that_there_are() -> None:
    assert not EXPLAINED.keys() - {mutant.name for mutant in mutants()}
    assert all(EXPLAINED.values())


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        (
            "kernels/gemm_reduce_scatter/hopper/warp_specialized.py::_collect: no fence_before_descriptor_loads()",
            [("gemm_all_reduce", "hopper/warp_specialized"), ("gemm_reduce_scatter", "hopper/warp_specialized")],
        ),
        (
            "kernels/gemm_all_scatter/portable/fused_sequential_stream_k.py::send_tile: "
            "no signal_chunk_to_all(peers, count_of_chunk(tile == 0, tiles), TILE.WORLD_SIZE)",
            [("gemm_all_scatter", "portable/fused_sequential_stream_k")],
        ),
        (
            "kernels/gemm_reduce_scatter/portable/workgroup_specialized.py::gemm_reduce_scatter_workgroup_specialized: "
            "no finish_call(peers, epoch, tl.num_programs(0), TILE.WORLD_SIZE)",
            [(family, "portable/workgroup_specialized") for family in ("gemm_all_reduce", "gemm_reduce_scatter")],
        ),
        (
            "kernels/all_gather_gemm/copies.py::queue: no copies.current_waits()",
            [("all_gather_gemm", name) for name in ("copies", "hopper/copy_engine", "portable/copy_engine")],
        ),
    ],
)
def test_a_mutant_is_run_by_the_variants_that_it_is_in(name: str, variants: list[tuple[str, str]]) -> None:
    mutant = named(name)
    assert uses().variants(mutant.path, mutant.function) == variants


def test_what_every_kernel_uses_is_in_every_variant() -> None:
    found = uses().variants("iris_core/device/sync.py", "signal")
    assert {(family, "portable/workgroup_specialized") for family, _ in found} <= set(found)
    assert len(found) > 25
