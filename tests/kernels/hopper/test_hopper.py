"""The host's part of the warp-specialised variants: what they refuse, and what they hand to their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Case, StubContext, recorded_launches
from families import make_problem, name

from iris_kernels.common.config import GemmConfig
from iris_kernels.common.hopper import host as hopper
from iris_kernels.gemm_all_reduce.hopper.warp_specialized import is_cut_by_columns
from overlap_taxonomy import Mainloop, Variant, get_variant, list_variants

VARIANTS = [variant for variant in list_variants() if variant.mainloop is Mainloop.SM90]
ALL_SCATTER, ALL_GATHER, REDUCE_SCATTER = (
    next(variant for variant in VARIANTS if variant.family == family)
    for family in ("gemm_all_scatter", "all_gather_gemm", "gemm_reduce_scatter")
)
CONFIG = GemmConfig(128, 256, 64, num_stages=3, comm_rows=32)
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=name)


@pytest.fixture
def on_hopper() -> Iterator[None]:
    """Refusals are those of a machine with Hopper GPUs."""
    with mock.patch.object(hopper, "machine_reason", return_value=None):
        yield


def arguments_of(operator: Any) -> dict[str, Any]:
    """Return what a call hands to its main kernel."""
    problem, rank = operator.problem, operator.rank
    operands = (torch.zeros(shape, dtype=problem.dtype) for shape in (problem.a_shape(rank), problem.b_shape(rank)))
    with recorded_launches() as launches:
        operator(*operands)
    return next(arguments for kernel, arguments in launches if "out" in arguments)


def reason(
    variant: Variant,
    m: int,
    n: int,
    k: int,
    *,
    world_size: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
) -> str | None:
    problem = make_problem(variant.family, m, n, k, world_size, dtype)
    return variant.unsupported_reason(problem, config)


@each_variant
def test_without_hopper_it_is_refused(variant: Variant) -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert "Hopper" in (reason(variant, 64, 64, 64) or "")


@pytest.mark.parametrize(("capability", "runs"), [((8, 0), False), ((9, 0), True), ((10, 0), False)])
def test_only_one_generation_of_gpus_runs_it(capability: tuple[int, int], runs: bool) -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(hopper.interpretation, "is_enabled", return_value=False),
    ):
        assert (hopper.machine_reason() is None) == runs


@pytest.mark.usefixtures("on_hopper")
@each_variant
def test_any_sizes_but_none_will_do(variant: Variant) -> None:
    assert reason(variant, 4091 * 4, 5120, 1024) is None
    assert reason(variant, 1, 8192, 8192) is None
    assert reason(variant, 301, 318, 1088) is None
    assert reason(variant, 33, 37, 41, world_size=1) is None
    assert "not torch.float32" in (reason(variant, 64, 64, 64, dtype=torch.float32) or "")


@pytest.mark.usefixtures("on_hopper")
def test_sizes_that_one_family_refuses() -> None:
    assert "start at 75" in (reason(ALL_SCATTER, 64, 300, 64) or "")
    assert reason(ALL_SCATTER, 64, 300, 64, world_size=1) is None
    assert reason(ALL_GATHER, 64, 300, 64) is None
    assert "rank 3's A has no columns" in (reason(REDUCE_SCATTER, 64, 64, 3) or "")


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_m": 64}, "block_m 64"),
        ({"num_warps": 4}, "num_warps is 4"),
        ({"block_n": 512}, "128x512x64"),
        ({"block_k": 32}, "128x256x32"),
        ({"num_stages": 4}, "4 stages"),
        ({"comm_rows": 4}, "comm_rows is 4"),
        ({"descriptors": False}, "descriptors"),
        ({"epilogue_subtiles": 2}, "epilogue_subtiles"),
        ({"group_m": 0}, "group_m is 0"),
        ({"splits": 3}, "splits is 3"),
        ({"splits": 32}, "32 programs split a tile of 16 subtiles"),
        ({"pingpong": True}, "block_n 256"),
        ({"pingpong": True, "block_n": 128, "splits": 2}, "splits 2"),
    ],
    ids=str,
)
@each_variant
def test_a_configuration_that_cannot_run_is_refused(variant: Variant, change: dict[str, Any], said: str) -> None:
    assert reason(variant, 8192, 8192, 8192, config=CONFIG) is None
    assert said in (reason(variant, 8192, 8192, 8192, config=replace(CONFIG, **change)) or "")


@pytest.mark.usefixtures("on_hopper")
def test_splits_that_a_problem_has_no_use_for_are_refused() -> None:
    variant = ALL_SCATTER
    assert reason(variant, 8192, 8192, 256, config=replace(CONFIG, splits=4)) is None
    assert "k is 192" in (reason(variant, 8192, 8192, 192, config=replace(CONFIG, splits=4)) or "")
    assert "only 4" in (reason(variant, 8192, 8192, 256, config=replace(CONFIG, splits=4, num_sms=4, comm_sms=1)) or "")
    for other in (ALL_GATHER, REDUCE_SCATTER):
        assert "splits no tiles" in (reason(other, 8192, 8192, 8192, config=replace(CONFIG, splits=2)) or "")


@pytest.mark.usefixtures("on_hopper")
@each_variant
def test_a_default_configuration_is_one_that_runs(variant: Variant) -> None:
    for size in (64, 256, 1024, 8192):
        operator = make_operator(variant, size)
        assert reason(variant, size, size, size, config=operator.config) is None


def make_operator(variant: Variant, size: int = 256, *, rank: int = 2) -> Any:
    context = StubContext(Case(variant.name, "sm_90", rank=rank, family=variant.family))
    return variant.build(context, make_problem(variant.family, size, size, size, 4, torch.bfloat16))


def operands(operator: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a_shape, (k, n) = operator.problem.a_shape(operator.rank), operator.problem.b_shape(operator.rank)
    return torch.empty(a_shape, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16).t()


@pytest.mark.usefixtures("on_hopper")
@each_variant
def test_of_a_single_row_no_distance_is_asked(variant: Variant) -> None:
    context = StubContext(Case(variant.name, "sm_90", rank=0, family=variant.family))
    operator = variant.build(context, make_problem(variant.family, 1, 256, 256, 4, torch.bfloat16))
    a, b = operands(operator)
    lying_apart = torch.empty(1, a.shape[1] + 1, dtype=a.dtype)[:, : a.shape[1]]
    with recorded_launches():
        operator(lying_apart, b)
        assert "copied" not in operator.describe_config()


@pytest.mark.usefixtures("on_hopper")
@each_variant
def test_stores_stop_at_the_edges_of_what_the_rank_writes(variant: Variant) -> None:
    """The descriptor that subtiles are stored through: which rows and columns of which rank."""
    context = StubContext(Case(variant.name, "sm_90", rank=3, family=variant.family))
    problem = make_problem(variant.family, 301, 318, 1088, 4, torch.bfloat16)
    operator: Any = variant.build(context, problem)
    launched = arguments_of(operator)
    out, stride = launched["out"], context.heap.stride // 2
    output = operator.output
    if variant.family == "gemm_all_scatter":  # columns 240 to 318 of every rank's C
        assert out.shape == [4, 301, 78]
        assert out.strides == [stride, 320, 1]
        assert out.base.data_ptr() == output.data_ptr() - 3 * context.heap.stride + 240 * 2
    elif variant.family == "all_gather_gemm":  # the rows of each shard, of which the last is shorter, in room for all
        assert out.shape == [4, 76, 128]
        assert out.strides == [76 * 128, 128, 1]
        assert output.shape == (301, 78)
    else:  # this rank's shard at every rank
        assert out.shape == [4, 76, 318]
        assert out.strides == [stride, 320, 1]
        sums = launched["reduced"]
        if variant.family == "gemm_reduce_scatter":  # sums go to this rank's C alone
            assert (sums.shape, sums.strides[1:]) == ([1, 73, 318], [320, 1])
            assert sums.base.data_ptr() == output.data_ptr()
            assert output.shape == (73, 318)
        else:  # sums go to rows 228 and on of every rank's C, in room for as many as others have
            assert (sums.shape, sums.strides) == ([4, 73, 320], out.strides)
            assert sums.base.data_ptr() == output.data_ptr() - 3 * context.heap.stride + 228 * 320 * 2
            assert output.shape == (301, 318)
        assert sums.shape[0] == launched["TILE"].SUM_RANKS


@pytest.mark.usefixtures("on_hopper")
def test_all_reduce_is_cut_by_columns_where_that_makes_fewer_tiles() -> None:
    """Of 200 rows a quarter each would fill a tile of 128 by half: twice the tiles."""
    context = StubContext(Case("warp_specialized:sm90", "sm_90", rank=3, family="gemm_all_reduce"))
    problem = make_problem("gemm_all_reduce", 200, 1100, 1088, 4, torch.bfloat16)
    operator: Any = get_variant("gemm_all_reduce", "warp_specialized:sm90").build(context, problem)
    launched = arguments_of(operator)
    out, shards = launched["out"], launched["shards"]
    block_n, tiles = operator.config.block_n, shards.tiles
    assert tiles == 2 * -(-320 // block_n)  # 275 columns, not on 16 bytes, so a line's end
    assert shards.flags_ptr.shape == (4, tiles)
    assert (shards.rows_apart, shards.cols_apart) == (0, 320)
    stride = context.heap.stride // 2
    assert (out.shape, out.strides) == ([4, 200, 320], [stride, 320, 1])
    sums, output = launched["reduced"], operator.output
    assert (sums.shape, sums.strides) == ([4, 200, 1152 - 3 * 320], [stride, 1152, 1])
    assert sums.base.data_ptr() == output.data_ptr() - 3 * context.heap.stride + 3 * 320 * 2
    assert (output.shape, output.stride()) == ((200, 1100), (1152, 1))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("m", "n", "by_columns"), [(512, 512, False), (511, 512, False), (384, 512, True)])
def test_all_reduce_is_cut_by_rows_where_columns_make_as_many_tiles(m: int, n: int, by_columns: bool) -> None:
    context = StubContext(Case("warp_specialized:sm90", "sm_90", rank=3, family="gemm_all_reduce"))
    problem = make_problem("gemm_all_reduce", m, n, 1088, 4, torch.bfloat16)
    config = replace(CONFIG, block_n=128, num_stages=5)
    operator: Any = get_variant("gemm_all_reduce", "warp_specialized:sm90").build(context, problem, config)
    assert is_cut_by_columns(operator.last_call) == by_columns
