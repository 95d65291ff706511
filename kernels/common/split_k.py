"""What the `one_shot` variants share: tiles whose inner dimension is cut into splits, so that every SM streams weights.

A unit is one split of one tile. A program stores the partial sum of its unit to a workspace on its own GPU and counts
it; the program that counts a tile's last one adds all of them in the order of the splits and goes on with the tile. So
the sum has the same bits in every run, whoever is last. Counts grow over all calls and are never reset.

A kernel of units is launched before the one ahead of it in the stream is done, where GPUs can do that, and waits for it
(`wait_for_earlier_kernels`): its programs are there when the last tile of that one is.

All ranks have the same units, those of the rank with the most columns: what a smaller one lacks is masked. Every
program has a unit, so a call is over when its tiles are: programs that were not a tile's last are not counted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from iris_core import let_next_kernel_start

from .arguments import Block
from .config import GemmConfig, is_hopper_or_later, warps_of
from .gemm import matmul_steps
from .operator import FusedOperator
from .trace import SUM, trace_span, trace_time

MOST_SPLITS = 32
# A model of an H200, in µs and bytes, fitted to 181 cuts of 42 problems on two of them (mean error 4 %; the cut that it
# chooses is 1 % slower than the best in the mean, 10 % at most).
_SM_BYTES_US = 121e3  # operands into an SM from the L2 cache
_SM_WEIGHTS_US = 64e3  # and weights from memory
_MEMORY_BYTES_US = 4.1e6  # into all of them
_SM_FLOPS_US = 6.2e6
_TILE_RATES = {
    (128, 256): 1.0,
    (128, 128): 0.85,
    (64, 128): 0.78,
    (128, 64): 0.48,
    (64, 64): 0.46,
    (32, 128): 0.39,
    (32, 64): 0.21,
    (16, 128): 0.2,
    (16, 64): 0.14,
}
_LEAST_RATE = 0.1
_UNIT_US = 2.0  # from a unit's first load to its first multiplication, and its last to its stored tile
_SUM_US = 0.9  # to meet the other splits
_SUM_BYTES_US = 9e3  # at which a partial sum leaves its SM


class Split(NamedTuple):
    """Where the splits of a tile meet, on this rank.

    `sums_ptr` points at fp32 (tiles, splits, BLOCK_M, BLOCK_N), `counts_ptr` at (tiles,) int64.
    """

    sums_ptr: Any
    counts_ptr: Any


class Cut(NamedTuple):
    """How an output is cut into units."""

    block_m: int
    block_n: int
    splits: int


def best_cut(m: int, n: int, k: int, *, num_sms: int, block_k: int, element_bytes: int, largest: int = 256) -> Cut:
    """Return the cut of an (m, n) output over k whose units are predicted to be done first.

    Args:
        m, n, k: of the GEMM of the rank with the most to do.
        num_sms: programs, of which each takes a unit at a time.
        block_k: a step of k.
        element_bytes: of an operand's element.
        largest: rows and columns of a tile, at most. One of 256 columns is not cut: its sums would fill the registers.
    """
    heights = tuple(h for h in (64, 128) if h <= largest) if m > 64 else (max(16, triton.next_power_of_2(m)),)
    steps = max(1, -(-k // block_k))
    tiles = [(block_m, block_n) for block_m in heights for block_n in (128, 64) if block_n <= largest]
    cuts = [Cut(*tile, splits) for tile in tiles for splits in range(1, min(steps, MOST_SPLITS) + 1)]
    if largest == 256 and heights[-1] == 128:
        cuts.append(Cut(128, 256, 1))
    return min(cuts, key=lambda cut: cut_us(cut, m, n, k, num_sms, block_k, element_bytes))


def cut_us(cut: Cut, m: int, n: int, k: int, num_sms: int, block_k: int, element_bytes: int) -> float:
    """Return the predicted time of a cut, in µs: waves of units, and what it takes a unit to leave its sum."""
    block_m, block_n, splits = cut
    rows = -(-m // block_m)
    units = rows * -(-n // block_n) * splits
    waves = -(-units // num_sms)
    steps = -(-max(1, -(-k // block_k)) // splits)
    rate = max(_LEAST_RATE, _TILE_RATES.get((block_m, block_n), 0.0)) / (1 if element_bytes == 2 else 16)
    weight_bytes = block_n * block_k * element_bytes / rows  # rows of tiles share the weights in the L2 cache
    step_us = max(
        (block_m + block_n) * block_k * element_bytes / _SM_BYTES_US,
        weight_bytes / _SM_WEIGHTS_US,
        weight_bytes * min(units, num_sms) / _MEMORY_BYTES_US,
        2.0 * block_m * block_n * block_k / (_SM_FLOPS_US * rate),
    )
    leave_us = _SUM_US + 4.0 * block_m * block_n / _SUM_BYTES_US if splits > 1 else 0.0
    return waves * (steps * step_us + _UNIT_US + leave_us)


def default_split_config(arch: str, num_sms: int, *, m: int, n: int, k: int, dtype: torch.dtype) -> GemmConfig:
    """Return what to start from for an (m, n) output over k of one rank's GEMM; arguments as `default_config`'s."""
    if arch == "cpu":
        return GemmConfig(32, 32, 32, group_m=2, num_warps=4, num_sms=num_sms, comm_sms=1, splits=2, descriptors=False)
    is_amd = arch.startswith("gfx")
    is_exact = dtype == torch.float32
    block_k = 16 if is_exact else 64
    # Exact products run on the ordinary cores: small tiles, in registers.
    largest = 64 if is_exact else 128 if is_amd else 256
    cut = best_cut(m, n, k, num_sms=num_sms, block_k=block_k, element_bytes=dtype.itemsize, largest=largest)
    if not (is_amd or is_exact) and cut.block_m <= 64:
        block_k = 128
    if is_amd:
        stages = 2
    elif is_exact:
        stages = 4
    else:
        stages = 4 if cut.block_m >= 64 else 6
    return GemmConfig(
        cut.block_m,
        cut.block_n,
        block_k,
        num_warps=warps_of(cut.block_m, cut.block_n),
        num_stages=stages,
        epilogue_subtiles=2 if cut.block_n == 256 else 1,
        num_sms=num_sms,
        comm_rows=4 if m > 16 else 1,  # a piece of A is 8 KB, or the part of a row that a program loads at once
        splits=cut.splits,
        descriptors=not is_exact and is_hopper_or_later(arch),
    )


class Splitting(FusedOperator[Any]):
    """Mixed into an operator whose kernel is one of units: its configuration, and where the splits of a tile meet."""

    def _config_for(self, m: int, n: int) -> GemmConfig:
        ctx, k = self.ctx, self.problem.a_shape(0)[1]
        return default_split_config(ctx.get_arch(), ctx.get_cu_count(), m=m, n=n, k=k, dtype=self.problem.dtype)

    def _open_splits(self) -> None:
        """Allocate what the splits of all tiles need; before anything asks for the number of tiles."""
        config = self.config
        units = self._all_tiles * config.splits
        size = units * config.block_m * config.block_n if config.splits > 1 else 1
        self._sums = torch.empty(size, dtype=torch.float32, device=self.ctx.get_device())
        self._counts = self._local_flags(self._all_tiles, "the splits of tile")

    @property
    def _columns(self) -> int:
        """Columns of the rank with the most."""
        return int(self.problem.b_shape(0)[1])

    @property
    def _all_tiles(self) -> int:
        return -(-self.problem.m // self.config.block_m) * -(-self._columns // self.config.block_n)

    @property
    def _num_programs(self) -> int:
        return min(self.config.num_sms, self._all_tiles * self.config.splits)

    def _split_arguments(self) -> dict[str, Any]:
        """Return what a kernel of units takes beside its operands."""
        return {
            "splits": Split(self._sums, self._counts),
            "peers": self._peers(),
            "SPLITS": self.config.splits,
            "WORLD_SIZE": self.problem.world_size,
        }


@triton.jit
def end_early(unit, units):
    """After a unit is multiplied: if it was this program's last, let the next kernel's programs take free SMs."""
    if unit + tl.num_programs(0) >= units:
        let_next_kernel_start()


@triton.jit
def first_step(gemm, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Return where a split of k begins; the splits differ by a step at most."""
    return tl.cdiv(gemm.k, TILE.BLOCK_K) * split // SPLITS * TILE.BLOCK_K


@triton.jit
def matmul_split(a, b, gemm, block, row, col, a_row, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Return a tile of A @ B summed over one split of k; see `matmul_tile`."""
    if SPLITS == 1:
        return matmul_steps(a, b, gemm, block, row, col, a_row, 0, gemm.k, TILE)
    else:
        first_k = first_step(gemm, split, SPLITS, TILE)
        stop_k = first_step(gemm, split + 1, SPLITS, TILE)
        return matmul_steps(a, b, gemm, block, row, col, a_row, first_k, stop_k, TILE)


@triton.jit
def meets_last(acc, splits, unit, epoch, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Keep a unit's partial sum where its tile's splits meet; return whether all of the tile's are there now.

    Edge: every split's stores happen before what follows in the program that is told so.
    """
    tl.store(splits.sums_ptr + _sum_offsets(unit, TILE), acc)
    tl.debug_barrier()  # the atomic is one thread's: every thread's stores must come before it
    # Acquire-release within the GPU: collects the other splits' stores, and their programs' reads of the call.
    count = tl.atomic_add(splits.counts_ptr + unit // SPLITS, 1, sem="acq_rel", scope="gpu") + 1
    return count == epoch * SPLITS


@triton.jit
def sum_splits(splits, tile, peers, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's sum over all splits, in their order; after `meets_last`."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    began = trace_time(peers)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for split in tl.range(0, SPLITS, num_stages=1, loop_unroll_factor=4):
        # .cg: another SM wrote it, this SM's L1 may hold an older call's.
        total += tl.load(splits.sums_ptr + _sum_offsets(tile * SPLITS + split, TILE), cache_modifier=".cg")
    trace_span(peers, SUM, tile, began)
    return total


@triton.jit
def _sum_offsets(unit, TILE: tl.constexpr):
    within = tl.arange(0, TILE.BLOCK_M)[:, None] * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)[None, :]
    return tl.cast(unit, tl.int64) * (TILE.BLOCK_M * TILE.BLOCK_N) + within


@triton.jit
def turn_of_call(epoch, BUFFERS: tl.constexpr):
    """Return which of the buffers that calls take in turn is this call's."""
    return epoch % BUFFERS


@triton.jit
def with_columns(block, columns):
    """Return a block as wide as that of the rank with the most columns: how all ranks cut theirs into tiles."""
    return Block(block.c_ptr, block.m, columns, block.stride_cm)
