"""Shards, sizes and configurations: the arithmetic that every operator stands on."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace

import pytest
import torch
from compiling import TARGETS
from families import FAMILIES, make_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_kernels.common.config import GemmConfig, default_config, invalid_reason
from iris_kernels.common.problem import shard_bounds
from overlap_taxonomy import list_families

SIZES = st.integers(1, 5000)
FEW = st.integers(1, 20)
WORLDS = st.integers(1, 17)
UNTIMED = settings(deadline=None, print_blob=True)


@UNTIMED
@given(SIZES, WORLDS)
def test_shards_partition_a_dimension_as_torch_chunk_does(size: int, world_size: int) -> None:
    bounds = [shard_bounds(size, world_size, rank) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    chunks = [chunk.numel() for chunk in torch.empty(size, device="meta").chunk(world_size)]
    chunks += [0] * (world_size - len(chunks))  # torch leaves the empty ones out
    assert [stop - start for start, stop in bounds] == chunks


@pytest.mark.parametrize("family", list_families())
@UNTIMED
@given(m=SIZES, n=SIZES, k=SIZES, world_size=WORLDS)
def test_operands_of_all_ranks_make_up_the_whole(family: str, m: int, n: int, k: int, world_size: int) -> None:
    problem = make_problem(family, m, n, k, world_size, torch.bfloat16)
    a, b, product = (torch.empty(shape, device="meta") for shape in ((m, k), (k, n), (m, n)))
    for rank in range(world_size):
        assert FAMILIES[family].own_a(problem, rank, a).shape == problem.a_shape(rank)
        assert FAMILIES[family].own_b(problem, rank, b).shape == problem.b_shape(rank)
        assert FAMILIES[family].own_output(problem, rank, product).shape == problem.c_shape(rank)
    assert problem.flops * world_size >= 2 * m * n * k
    assert (problem.wire_bytes == 0) == (world_size == 1)


@pytest.mark.parametrize("family", list_families())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@UNTIMED
@given(m=FEW, n=FEW, k=FEW, world_size=WORLDS, seed=st.integers(0, 1000))
def test_shards_and_reference_are_parts_of_the_whole(
    family: str, dtype: torch.dtype, m: int, n: int, k: int, world_size: int, seed: int
) -> None:
    problem = make_problem(family, m, n, k, world_size, dtype)
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
    rounding = 2 * k * (torch.finfo(torch.float64).eps / 2) * (a.double().abs() @ b.double().abs())  # of both sums
    parts = FAMILIES[family]
    reference = importlib.import_module(f"iris_kernels.{family}").reference
    for rank in range(world_size):
        own_a, own_b = problem.shards(rank, a, b)
        assert torch.equal(own_a, parts.own_a(problem, rank, a))
        assert torch.equal(own_b, parts.own_b(problem, rank, b))
        assert own_a.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        expected = parts.own_output(problem, rank, a.double() @ b.double())
        found = reference(problem, rank, a, b)
        assert found.shape == expected.shape
        assert (found - expected).abs().le(parts.own_output(problem, rank, rounding)).all()


def test_bytes_on_the_wire_and_ideal_time_of_all_scatter() -> None:
    problem = make_problem("gemm_all_scatter", 8192, 8192, 4096, 4, torch.bfloat16)
    assert problem.flops == 2 * 8192 * 2048 * 4096
    assert problem.wire_bytes == 3 * 8192 * 2048 * 2
    assert problem.ideal_us(gemm_us=300.0, link_gbps=400.0) == 300.0
    assert problem.ideal_us(gemm_us=200.0, link_gbps=400.0) == pytest.approx(251.66, abs=0.01)


@pytest.mark.parametrize("family", list_families())
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"m": 0}, "m is 0"),
        ({"n": -1}, "n is -1"),
        ({"k": 2.0}, "k is 2.0"),
        ({"world_size": 0}, "world_size is 0"),
        ({"dtype": torch.int32}, "torch.int32 is not supported; supported: .*bfloat16"),
        ({"dtype": torch.float64}, "torch.float64 is not supported"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(family: str, change: dict[str, object], said: str) -> None:
    problem = make_problem(family, 4, 4, 4, 2, torch.float16)
    with pytest.raises(ValueError, match=said):
        replace(problem, **change)


GOOD = GemmConfig(64, 64, 32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"block_m": 48}, "block_m is 48; it takes a power of two"),
        ({"block_k": 0}, "block_k is 0"),
        ({"num_warps": 3}, "num_warps is 3"),
        ({"comm_warps": 6}, "comm_warps is 6"),
        ({"comm_rows": -16}, "comm_rows is -16"),
        ({"block_k": 8}, "the tile is 64x64x8; no side may be under 16"),
        ({"block_n": 1 << 20}, "the tile is 64x1048576x32; no side may be over 1024"),
        ({"epilogue_subtiles": 3}, "epilogue_subtiles is 3; it takes 1 or 2"),
        ({"comm_rows": 128}, "comm_rows is 128; a tile has only 64 rows"),
        ({"group_m": 0}, "group_m is 0; it takes at least 1"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"row_chunks": 0}, "row_chunks is 0"),
        ({"comm_sms": 0}, "comm_sms is 0"),
        ({"num_sms": 8, "comm_sms": 8}, "comm_sms is 8 of 8 programs; at least one must compute"),
    ],
)
def test_a_configuration_is_valid_or_says_why_not(change: dict[str, int], said: str | None) -> None:
    reason = invalid_reason(replace(GOOD, **change))
    assert reason is None if said is None else reason is not None and reason.startswith(said)


@UNTIMED
@given(m=SIZES, n=st.integers(0, 5000), dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
@pytest.mark.parametrize("comm_share", [0.0, 1 / 11, 0.2])
@pytest.mark.parametrize(
    ("arch", "num_sms"), [("cpu", 4), *((arch, target.num_sms) for arch, target in TARGETS.items())]
)
def test_the_default_configuration_is_valid(
    arch: str, num_sms: int, comm_share: float, m: int, n: int, dtype: torch.dtype
) -> None:
    config = default_config(arch, num_sms, m=m, n=n, dtype=dtype, comm_share=comm_share)
    assert invalid_reason(config) is None
    assert config.num_sms == num_sms
    if arch != "cpu":  # a communicating thread moves 16 bytes at least, as one store
        warp_size = TARGETS[arch].gpu.warp_size
        assert config.comm_rows * config.block_n * dtype.itemsize >= 16 * config.comm_warps * warp_size


@pytest.mark.parametrize(("shard_rows", "tile"), [(None, (128, 128)), (777, (128, 128)), (389, (128, 256))])
def test_the_default_tile_is_the_fastest_of_shards(shard_rows: int | None, tile: tuple[int, int]) -> None:
    """777 rows have 7 tiles of 128, and two shards of them 8: three waves over 132 SMs, or four."""
    config = default_config("sm_90", 132, m=777, n=7168, dtype=torch.bfloat16, shard_rows=shard_rows)
    assert (config.block_m, config.block_n) == tile
