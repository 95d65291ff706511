"""Which configurations the warp-specialised kernels take."""

from __future__ import annotations

import torch

from ..config import GemmConfig
from ..problem import Problem
from .plan import PINGPONG_COLUMNS, ROW_BYTES, Promotion, num_subtiles, rates_of

SHARED_BYTES = 227 << 10  # of an SM, for one program
BARRIER_BYTES = 1 << 10  # more than the barriers take
NUM_WARPS = 8  # that multiply: two warp groups, of 64 rows each or, with pingpong, of a tile each


def step_k(dtype: torch.dtype) -> int:
    """Return the k of a step of operands of this dtype: the widest row of a swizzled tile."""
    return ROW_BYTES // dtype.itemsize


def subtile_columns(problem: Problem) -> int:
    """Return how many columns of C a subtile has: the widest row of a swizzled tile."""
    return ROW_BYTES // problem.out_dtype.itemsize


def promotion_of(problem: Problem) -> Promotion:
    """Return which sums are promoted."""
    if "block" in problem.scales:
        return Promotion.BLOCK_SUMS
    return Promotion.WHOLE_SUMS if problem.is_promoted else Promotion.NONE


def config_reason(problem: Problem, config: GemmConfig, *, can_split: bool = True) -> str | None:
    """Return why warp-specialised kernels, which can split tiles or not, cannot run with a configuration, or None."""
    if config.splits & (config.splits - 1):
        return f"splits is {config.splits}; it takes a power of two"
    if config.num_warps != NUM_WARPS or config.block_m != 128:
        has = f"num_warps is {config.num_warps} and block_m {config.block_m}"
        return f"two warp groups multiply tiles of 128 rows: {has}"
    widths = rates_of(promotion_of(problem))
    if config.block_n not in widths or config.block_k != step_k(problem.dtype):
        tile, k = f"{config.block_m}x{config.block_n}x{config.block_k}", step_k(problem.dtype)
        return f"the tile is {tile}; it takes {' or '.join(f'128x{columns}x{k}' for columns in widths)}"
    if problem.is_promoted and (config.pingpong or config.splits > 1):
        has = f"pingpong {config.pingpong}, splits {config.splits}"
        return f"tiles of promoted sums are neither multiplied with pingpong nor split: {has}"
    if config.pingpong and (config.block_n > PINGPONG_COLUMNS or config.splits > 1):
        has = f"block_n {config.block_n}, splits {config.splits}"
        return f"with pingpong tiles have {PINGPONG_COLUMNS} columns at most and are not split: {has}"
    if config.comm_rows < 8:
        return f"comm_rows is {config.comm_rows}; subtiles have 8 rows or more"
    subtiles = num_subtiles(config.block_n, config.comm_rows, problem.out_dtype.itemsize)
    if config.splits > subtiles:
        return f"{config.splits} programs split a tile of {subtiles} subtiles; each keeps one or more"
    if config.num_sms <= config.splits:
        return f"{config.splits} programs split a tile; there are only {config.num_sms}"
    if config.epilogue_subtiles != 1 or not config.descriptors:
        return "tiles are read by descriptors and stored whole: descriptors=True, epilogue_subtiles=1"
    stage_bytes = problem.dtype.itemsize * (config.block_m + config.block_n) * config.block_k
    tile_bytes = problem.out_dtype.itemsize * config.block_m * config.block_n
    shared_bytes = config.num_stages * stage_bytes + tile_bytes + BARRIER_BYTES
    if shared_bytes > SHARED_BYTES:
        return f"{config.num_stages} stages and a finished tile take {shared_bytes} bytes of {SHARED_BYTES}"
    least = problem.narrowing * subtile_columns(problem)
    if problem.narrowing > 1 and (config.block_n < least or config.splits > 1):
        has = f"block_n {config.block_n}, splits {config.splits}"
        return f"with {problem.epilogue[-1]} tiles have {least} columns or more and are not split: {has}"
    k = problem.a_shape(0)[1]
    if config.splits > 1 and k < config.splits * config.block_k:
        return f"{config.splits} programs split a tile whose k is {k}; each takes {config.block_k} or more"
    if config.splits > 1 and not can_split:
        return f"splits is {config.splits}; this variant splits no tiles"
    return None
