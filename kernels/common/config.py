"""Configurations of the GEMM kernels: what can be tuned, which choices are valid, and what to start from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from iris_core import Context

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Preferred tiles, large to small, for 2-byte dtypes. 128x256 with 8 warps runs at cuBLAS speed on Hopper; a smaller one
# is taken when there are too few large tiles to fill the SMs.
_TILES = ((128, 256), (128, 128), (64, 128), (64, 64))


@dataclass(frozen=True)
class GemmConfig:
    """The tunables of a fused GEMM.

    Args:
        block_m, block_n, block_k: the tile.
        group_m: rows of tiles that consecutive tiles share.
        num_warps, num_stages: of the compute kernel.
        epilogue_subtiles: 1, or 2 to store a tile in halves, through half the shared memory.
        num_sms: programs of the persistent grid, those that communicate included.
        comm_sms: how many of them communicate, in the variants that set some apart.
        comm_rows: rows of a tile that a communicating program moves at once.
        panels: into how many panels of rows the copy engines' work is cut.
        descriptors: read operands by tensor descriptors (TMA) rather than pointers.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    epilogue_subtiles: int = 1
    num_sms: int = 132
    comm_sms: int = 8
    comm_rows: int = 16
    panels: int = 4
    descriptors: bool = True

    def __str__(self) -> str:
        loads = "descriptors" if self.descriptors else "pointers"
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k} group={self.group_m} warps={self.num_warps} "
            f"stages={self.num_stages} subtiles={self.epilogue_subtiles} sms={self.num_sms} comm_sms={self.comm_sms} "
            f"comm_rows={self.comm_rows} panels={self.panels} {loads}"
        )


def invalid_reason(config: GemmConfig) -> str | None:
    """Return why a configuration makes no sense, or None."""
    for name in ("block_m", "block_n", "block_k", "num_warps", "comm_rows"):
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            return f"{name} is {value}; it takes a power of two"
    if min(config.block_m, config.block_n, config.block_k) < 16:
        return f"the tile is {config.block_m}x{config.block_n}x{config.block_k}; no side may be under 16"
    if config.epilogue_subtiles not in (1, 2):
        return f"epilogue_subtiles is {config.epilogue_subtiles}; it takes 1 or 2"
    if config.comm_rows > config.block_m:
        return f"comm_rows is {config.comm_rows}; a tile has only {config.block_m} rows"
    for name in ("group_m", "num_stages", "comm_sms", "panels"):
        if getattr(config, name) < 1:
            return f"{name} is {getattr(config, name)}; it takes at least 1"
    if config.num_sms <= config.comm_sms:
        return f"comm_sms is {config.comm_sms} of {config.num_sms} programs; at least one must compute"
    return None


def default_config(ctx: Context, *, m: int, n: int, dtype: torch.dtype) -> GemmConfig:
    """Return what to start from for an (m, n) output of one rank's GEMM on this context's device."""
    num_sms = ctx.get_cu_count()
    if ctx.is_interpreted():
        return GemmConfig(32, 32, 32, group_m=2, num_warps=4, num_sms=num_sms, comm_sms=1, panels=2, descriptors=False)
    if dtype == torch.float32:  # exact fp32 products run on the ordinary cores: small tiles, in registers
        return GemmConfig(64, 64, 16, num_warps=4, num_stages=3, num_sms=num_sms, comm_sms=16, descriptors=False)
    block_m, block_n = _TILES[-1]
    for tile_m, tile_n in _TILES:
        if -(-m // tile_m) * -(-n // tile_n) >= num_sms and (m >= tile_m or tile_m == 64):
            block_m, block_n = tile_m, tile_n
            break
    is_large = (block_m, block_n) == _TILES[0]
    if torch.version.hip:
        return GemmConfig(block_m, min(block_n, 128), 64, num_stages=2, num_sms=num_sms, comm_sms=16, descriptors=False)
    return GemmConfig(
        block_m,
        block_n,
        64,
        num_warps=8 if is_large else 4,
        num_stages=3 if is_large else 4,
        num_sms=num_sms,
        comm_sms=8,
        descriptors=torch.cuda.get_device_capability(ctx.get_device()) >= (9, 0),
    )
