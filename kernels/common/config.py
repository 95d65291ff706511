"""Configurations of the GEMM kernels: what can be tuned, which choices are valid, and what to start from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from overlap_taxonomy.gemm_cost import fastest_tile, portable_tiles
from overlap_taxonomy.machines import H200X4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of C, and of operands
# Open compute formats, and those of gfx942, which have no infinities and no negative zero.
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
OPERAND_DTYPES = (*DTYPES, *FP8_DTYPES)
LEAST_TILE = 16  # rows or columns of the smallest tile
_MOST_TILE = 1024  # two such sides make the largest tensor that Triton takes

# The copy engines' chunks are at least so large: each costs the host a wait and a copy, about 30 µs together.
LEAST_CHUNK_BYTES = 8 << 20
MOST_SPLITS = 32


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
        comm_warps: warps of a kernel that only communicates.
        row_chunks: into how many chunks of rows what is sent is cut, in the variants that send chunks.
        k_chunks: into how many chunks along k each row chunk of the shard that is used last is cut, where copy engines
            send shards to the sm90 main loop; with two or more, the other shards are sent whole.
        splits: programs that split each tile of the last, unfilled wave along k, in the variants that can. In the
            warp-specialised ones a power of two; where fewer tiles are left than that makes groups of programs, each
            tile has as many programs as there are for it. With stream-K so many in the mean, or fewer.
        descriptors: read operands by tensor descriptors (TMA) rather than pointers.
        pingpong: two warp groups multiply a tile each, in turns, rather than one together, in the warp-specialised
            variants: the epilogue of a tile then overlaps the multiplication of the next one. It cannot be traced.
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
    comm_warps: int = 16
    row_chunks: int = 4
    k_chunks: int = 1
    splits: int = 1
    descriptors: bool = True
    pingpong: bool = False

    def __str__(self) -> str:
        loads = ("descriptors" if self.descriptors else "pointers") + (" pingpong" if self.pingpong else "")
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k} group={self.group_m} warps={self.num_warps} "
            f"stages={self.num_stages} subtiles={self.epilogue_subtiles} sms={self.num_sms} comm_sms={self.comm_sms} "
            f"comm_rows={self.comm_rows} comm_warps={self.comm_warps} row_chunks={self.row_chunks} "
            f"k_chunks={self.k_chunks} splits={self.splits} {loads}"
        )


# What an earlier version called a field, in tables, caches and the `config` column of results. Of two old fields that
# became one, at most one was not 1.
_FORMER_FIELDS = {"panels": "row_chunks", "chunks": "k_chunks", "team": "splits"}
_FORMER_TUNABLES = ("ahead", "chunk", "lag", "pace_ns", "queues")  # that are no more: what was chosen had none of them
# A field's name in the text of a configuration, where it is another.
_IN_TEXT = {
    "group": "group_m",
    "warps": "num_warps",
    "stages": "num_stages",
    "subtiles": "epilogue_subtiles",
    "sms": "num_sms",
}


def current_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's fields under their present names.

    Args:
        fields: by name, present or former.
    """
    current: dict[str, Any] = {}
    for name, value in fields.items():
        present = _FORMER_FIELDS.get(name, name)
        if name not in _FORMER_TUNABLES:
            current[present] = max(value, current[present]) if present in current else value
    return current


def parse_config(text: str) -> GemmConfig:
    """Return the configuration that ``str(config)`` gave, of any version; what follows it is ignored.

    Raises:
        ValueError: it is no configuration.
    """
    found = re.match(r"(\d+)x(\d+)x(\d+) ((?:\w+=-?\d+ )+)(descriptors|pointers)( pingpong)?\b", text)
    if not found:
        raise ValueError(f"{text!r} is no configuration")
    pairs = [pair.split("=") for pair in found[4].split()]
    tile = dict(zip(("block_m", "block_n", "block_k"), map(int, found.groups()[:3]), strict=True))
    named = current_fields({_IN_TEXT.get(name, name): int(value) for name, value in pairs})
    return GemmConfig(**tile, **named, descriptors=found[5] == "descriptors", pingpong=bool(found[6]))


def invalid_reason(config: GemmConfig) -> str | None:
    """Return why a configuration makes no sense, or None."""
    for name in ("block_m", "block_n", "block_k", "num_warps", "comm_rows", "comm_warps"):
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            return f"{name} is {value}; it takes a power of two"
    tile = (config.block_m, config.block_n, config.block_k)
    if min(tile) < LEAST_TILE or max(tile) > _MOST_TILE:
        limit = f"under {LEAST_TILE}" if min(tile) < LEAST_TILE else f"over {_MOST_TILE}"
        return f"the tile is {'x'.join(map(str, tile))}; no side may be {limit}"
    if config.epilogue_subtiles not in (1, 2):
        return f"epilogue_subtiles is {config.epilogue_subtiles}; it takes 1 or 2"
    if config.comm_rows > config.block_m:
        return f"comm_rows is {config.comm_rows}; a tile has only {config.block_m} rows"
    for name in ("group_m", "num_stages", "comm_sms", "row_chunks", "k_chunks", "splits"):
        if getattr(config, name) < 1:
            return f"{name} is {getattr(config, name)}; it takes at least 1"
    if config.splits > MOST_SPLITS:
        return f"splits is {config.splits}; {MOST_SPLITS} programs at most split a tile"
    if config.num_sms <= config.comm_sms:
        return f"comm_sms is {config.comm_sms} of {config.num_sms} programs; at least one must compute"
    return None


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether a dtype is an 8-bit floating-point format."""
    return dtype in FP8_DTYPES


def fp8_formats(arch: str) -> tuple[torch.dtype, ...]:
    """Return the fp8 formats that a device multiplies, or Triton's interpreter."""
    if arch == "gfx942":
        return FP8_DTYPES[2:]
    return FP8_DTYPES[:2] if arch in ("cpu", "gfx950") or _capability(arch) >= 89 else ()


def default_config(
    arch: str,
    num_sms: int,
    *,
    m: int,
    n: int,
    dtype: torch.dtype,
    shard_rows: int | None = None,
    comm_share: float = 0.0,
    is_promoted: bool = False,
) -> GemmConfig:
    """Return what to start from for an (m, n) output of one rank's GEMM.

    Args:
        arch: what `Context.get_arch` says: "cpu", "sm_90", "gfx942", ….
        num_sms: SMs or compute units of the device.
        m, n: the rank's output.
        dtype: of the operands.
        shard_rows: of a rank, where A or C is sharded by rows: no tile has rows of two shards; None where neither is.
        comm_share: the part of the SMs that the variant sets apart for communication.
        is_promoted: whether sums are promoted, as `Problem.is_promoted` says.
    """
    if arch == "cpu":
        return GemmConfig(
            32, 32, 32, group_m=2, num_warps=4, num_sms=num_sms, comm_sms=1, row_chunks=2, descriptors=False
        )
    comm_sms = max(1, round(num_sms * comm_share))
    is_amd = arch.startswith("gfx")
    if dtype == torch.float32:  # exact fp32 products run on the ordinary cores: small tiles, in registers
        config = GemmConfig(64, 64, 16, num_warps=4, num_sms=num_sms, comm_sms=comm_sms, descriptors=False)
        return replace(config, comm_warps=_comm_warps(config, dtype, is_amd))
    compute_sms = num_sms - comm_sms if comm_share else num_sms
    tiles = portable_tiles(H200X4, widest_tile(arch, is_promoted=is_promoted))
    shards = -(-m // shard_rows) if shard_rows else 1
    block_m, block_n = fastest_tile(m, n, compute_sms, tiles, shards)
    config = GemmConfig(
        block_m,
        block_n,
        128 // dtype.itemsize,
        num_warps=warps_of(block_m, block_n),
        num_stages=3 if block_n == 256 else 4,
        num_sms=num_sms,
        comm_sms=comm_sms,
        comm_rows=32,
    )
    config = replace(config, comm_warps=_comm_warps(config, dtype, is_amd))
    if is_amd:
        return replace(config, num_stages=2, descriptors=False)
    # From sm_100 on accumulators lie in tensor memory: read in halves, they and what is added to them fit registers.
    subtiles = 2 if _capability(arch) >= 100 else 1
    return replace(config, descriptors=is_hopper_or_later(arch), epilogue_subtiles=subtiles)


def _capability(arch: str) -> int:
    """Return an NVIDIA device's compute capability, 90 for 9.0; 0 for others."""
    return int(arch.removeprefix("sm_")) if arch.startswith("sm_") else 0


def is_hopper_or_later(arch: str) -> bool:
    """Whether a device has what came with sm_90: tensor descriptors, bulk copies, early launches."""
    return _capability(arch) >= 90


def _multiplies_from_shared_memory(arch: str) -> bool:
    """Whether operands go from shared memory to the tensor cores, and not through registers: sm_90 to sm_110."""
    return 90 <= _capability(arch) < 120


def widest_tile(arch: str, *, is_promoted: bool = False) -> int:
    """Return how many columns a tile of a narrow dtype has at most: with operands beside it, 256 fill the registers.

    With `is_promoted`, two accumulators do.
    """
    return 256 if _multiplies_from_shared_memory(arch) and not is_promoted else 128


def operand_room(arch: str) -> int:
    """Return how many bytes of shared memory operands may take of an NVIDIA GPU; 8.6, 8.9 and 12.0 have 99 KB."""
    return 220 << 10 if _multiplies_from_shared_memory(arch) else 96 << 10


def warps_of(block_m: int, block_n: int) -> int:
    """Return how many warps multiply a tile of a 2-byte dtype."""
    return 8 if block_m * block_n >= 128 * 128 else 4


def programs_beside_another(num_sms: int) -> int:
    """Return on how many SMs a kernel may run that leaves one to a kernel of a program."""
    return max(1, num_sms - 1)


def _comm_warps(config: GemmConfig, dtype: torch.dtype, is_amd: bool) -> int:
    """Return so many warps, 16 at most, that a thread moves 16 bytes of a chunk or more: narrower stores are slower."""
    warp_bytes = 16 * (64 if is_amd else 32)
    return max(1, min(16, config.comm_rows * config.block_n * dtype.itemsize // warp_bytes))
