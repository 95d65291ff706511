"""Fixtures: ranks on the CPU, and on GPUs where a test is marked for them."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from prefork import Template, preforked
from ranks import Pools, Ranks, skip_where_ranks_share_a_gpu

from iris_core.utils.settings import ranks_per_gpu

# Inductor makes scalar code: to find which vectors this CPU has it would compile for ten seconds, in each new cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Files that take 15 s or more on two cores, the longest first, so that no worker is left with one of them when the
# others have nothing more to do.
LONG = (
    "test_codegen.py",
    "test_check_kernels.py",
    "test_over_hosts.py",
    "test_hopper_emulated.py",
    "test_codegen_hopper.py",
    "test_codegen_fp8.py",
    "test_codegen_epilogue.py",
    "test_codegen_other_gpus.py",
    "test_docs.py",
    "test_tensor_parallel_compiled.py",
    "test_report.py",
    "test_tensor_parallel_float8.py",
    "test_codegen_x.py",
    "test_codegen_device_api.py",
    "test_bootstrap.py",
    "test_codegen_norm.py",
    "test_stream_k.py",
    "test_scaled_operands.py",
    "test_litmus.py",
    "test_operators.py",
    "test_explain.py",
    "test_row_norm.py",
    "test_codegen_rows.py",
    "test_host_failures.py",
    "test_example_kernels.py",
    "test_trace.py",
    "test_stress.py",
)

# Files most of whose tests take seconds though their ranks are not the fixtures', and they compile nothing themselves.
SLOW = ("test_check_kernels.py", "test_hopper_emulated.py", "test_bootstrap.py", "test_optional.py", "test_sums.py")
SLOW += ("test_dead_peers.py", "test_stress.py", "test_properties.py", "test_bench_cli.py", "test_bench_layers_cli.py")
SLOW += ("test_races_of_x.py", "test_races_of_ccl.py", "test_openness.py")

ABOUT_STARTS = ("test_interrupts.py",)

# What a file of tests imports that starts ranks of its own or compiles kernels.
STARTS_OR_COMPILES = {"RankPool", "launch", "compile_case", "compile_kernel", "driven"}


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is left to the whole suite: it needs ranks or a compiler, or its file is slow."""
    assert isinstance(item, pytest.Function)
    needs_ranks = "pools" in item.fixturenames
    return needs_ranks or item.path.name in SLOW or not STARTS_OR_COMPILES.isdisjoint(vars(item.module))


@pytest.hookimpl(tryfirst=True)  # ahead of the choice by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow; begin with the long files."""
    for item in items:
        if is_slow(item):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where a test must not be skipped for what is not installed: `make test-models`."""
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Return the report of a test, of one that must not be skipped as of one that failed."""
    report = yield
    if report.skipped and item.config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spare the collector ten thousand tests, and all that was imported, each time it looks for garbage."""
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """All pools of ranks of this session."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Run a test without a GPU, and where GPUs are asked for also on them."""
    return request.param


@pytest.fixture
def ranks(pools: Pools, device: str) -> Callable[[int], Ranks]:
    """``ranks(world_size)`` gives that many ranks on the test's device."""

    def of(world_size: int) -> Ranks:
        if device == "cuda" and torch.cuda.device_count() * ranks_per_gpu() < world_size:
            pytest.skip(f"needs {world_size} GPUs; there are {torch.cuda.device_count()}")
        return pools.ranks(world_size, device)

    return of


@pytest.fixture
def gpu_a_rank(device: str) -> None:
    """For a test whose ranks, on GPUs, are in a process group of torch's."""
    if device == "cuda":
        skip_where_ranks_share_a_gpu()


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """What ranks on the CPU are forked of."""
    made = Template()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def ranks_start_soon(request: pytest.FixtureRequest, template: Template) -> Iterator[None]:
    """Fork ranks on the CPU, but for the files that are about how they start."""
    with contextlib.nullcontext() if request.path.name in ABOUT_STARTS else preforked(template):
        yield
