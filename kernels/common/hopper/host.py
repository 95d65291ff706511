"""What the warp-specialised variants share on the host: what they support, their tensor descriptors, their launch."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from iris_core.device import interpretation
from overlap_taxonomy.gemm_cost import PIECE_LINES

from ..call import Call, Device
from ..config import GemmConfig, is_fp8
from ..device.arguments import Gemm
from ..device.epilogue import reads_columns_alone
from ..portable.gemm import DESCRIPTORS_B_KN, DESCRIPTORS_B_NK
from ..portable.operands import describable, padded
from ..problem import Problem
from ..variants.implementation import valid_config
from ..workspace import Buffer, local_flags
from .arguments import Sizes, SplitWorkspace, WarpTile
from .plan import (
    BLOCK_M,
    COSTS,
    PINGPONG_COLUMNS,
    ROW_BYTES,
    SUBTILE_ROWS,
    Promotion,
    Tiling,
    fastest_tiling,
    num_subtiles,
    rates_of,
    whole_waves,
)
from .roles import GROUP_WARPS

# Of operands, and of C and partial sums.
OPERAND_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DTYPES_OF_GLUON = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
STAGES = {
    256: 3,
    128: 5,
    64: 6,
}  # by the width of the tile: as many as fit beside a finished tile, and no more than help

SHARED_BYTES = 227 << 10  # of an SM, for one program
BARRIER_BYTES = 1 << 10  # more than the barriers take
NUM_WARPS = 8  # that multiply: two warp groups, of 64 rows each or, with pingpong, of a tile each


def machine_reason() -> str | None:
    """Return why kernels for Hopper cannot run in this process, or None."""
    if interpretation.is_enabled():
        return "warp-specialised kernels are in Gluon, which is not interpreted; they run on NVIDIA Hopper GPUs (sm_90)"
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "warp-specialised kernels need NVIDIA Hopper GPUs (sm_90)"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"warp-specialised kernels are for sm_90, this is sm_{major}{minor}"


def supports(problem: Problem, config: GemmConfig | None, *, can_split: bool = True) -> str | None:
    """Return why a warp-specialised variant, which can split tiles or not, cannot do a problem here, or None.

    Without a configuration it is for the plan.
    """
    if reason := machine_reason():
        return reason
    for dtype in (problem.dtype, problem.b_dtype):
        if dtype not in OPERAND_DTYPES:
            return f"warp-specialised kernels multiply {', '.join(map(str, OPERAND_DTYPES))}, not {dtype}"
    if problem.out_dtype not in DTYPES:
        return f"warp-specialised kernels store C as {' or '.join(map(str, DTYPES))}, not {problem.out_dtype}"
    if problem.dtype_of_partials != problem.out_dtype:
        has = f"partial_dtype is {problem.partial_dtype}, C is {problem.out_dtype}"
        return f"warp-specialised kernels keep sums among the partials, in one dtype: {has}"
    if config and (reason := valid_config(problem, config) or config_reason(problem, config, can_split=can_split)):
        return reason
    empty = [rank for rank in range(problem.world_size) if problem.a_shape(rank)[1] == 0]
    return f"rank {empty[0]}'s A has no columns; TMA moves rows that are not empty" if empty else None


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


def with_columns(config: GemmConfig, block_n: int) -> GemmConfig:
    """Return a configuration with tiles of so many columns."""
    return replace(config, block_n=block_n, num_stages=STAGES[block_n])


def wide_enough(problem: Problem, config: GemmConfig) -> GemmConfig:
    """Return a configuration whose tiles are whole subtiles once the epilogue has made them narrower."""
    if problem.narrowing == 1:
        return config
    return with_columns(replace(config, splits=1), max(config.block_n, problem.narrowing * subtile_columns(problem)))


def plan(
    problem: Problem,
    device: Device,
    *,
    peers: int,
    shards: int = 1,
    splits: tuple[int, ...] = (1,),
    pingpong: bool = False,
) -> GemmConfig:
    """Return what to start from for the rank that has most to multiply.

    Args:
        problem: what to do.
        device: what it runs on.
        peers: how many ranks the last tiles are sent to.
        shards: into how many parts of rows the output is cut, each of which has tiles of its own.
        splits: how many programs may split each of the last tiles.
        pingpong: whether warp groups may multiply in turns.
    """
    tiling = fastest_tiling(
        problem.m,
        problem.b_shape(0)[1],
        k_of_costs(problem),
        num_programs=device.num_sms,
        peers=peers * problem.out_dtype.itemsize // 2,  # which take twice as long for elements twice as large
        splits=splits,
        shards=shards,
        pingpong=pingpong and not problem.is_promoted,
        widest=widest(problem),
        promotion=promotion_of(problem),
    )
    return config_of(problem, tiling, device)


def k_of_costs(problem: Problem) -> int:
    """Return the k of two-byte operands whose multiplication takes as long: fp8 is multiplied twice as fast."""
    return -(-problem.a_shape(0)[1] * problem.dtype.itemsize // 2)


def widest(problem: Problem) -> int:
    """Return how many columns a tile has at most."""
    is_large = problem.out_dtype.itemsize > 2  # beside a finished tile of 256 columns two stages fit shared memory
    return 128 if is_large else max(COSTS.rates)


def config_of(problem: Problem, tiling: Tiling, device: Device) -> GemmConfig:
    """Return the configuration with this tiling, on all SMs."""
    return GemmConfig(
        BLOCK_M,
        tiling.block_n,
        step_k(problem.dtype),
        num_warps=NUM_WARPS,
        num_stages=STAGES[tiling.block_n],
        num_sms=device.num_sms,
        comm_rows=SUBTILE_ROWS,
        splits=tiling.splits,
        pingpong=tiling.pingpong,
    )


def num_warps(config: GemmConfig) -> int:
    """Return how many warps a kernel is launched with: those of the first role."""
    return GROUP_WARPS.value if config.pingpong else config.num_warps


def split_buffers(call: Call[Any], num_programs: int, sizes: Sizes, shards: int = 1) -> dict[str, Buffer]:
    """Return the buffers where programs that split tiles exchange partial sums; none if they split none.

    Args:
        call: the call.
        num_programs: that compute.
        sizes, shards: the tiles, of so many shards of these sizes.
    """
    config = call.config
    if config.splits == 1:
        return {}
    num_tiles = call.num_tiles(sizes.m, sizes.n) * shards
    left = num_tiles - whole_waves(num_tiles, num_programs) * num_programs
    partial_tiles = max(1, -(-left // (num_programs // config.splits)) * num_programs)

    def name(word: int) -> str:
        return f"{word // num_programs}, the partial tile of program {word % num_programs}"

    return {
        "partial_tiles": Buffer((partial_tiles * config.block_m * config.block_n,), torch.float32),
        "partial_flags": local_flags(partial_tiles, "wave of split tiles", name=name),
    }


def split_workspace(call: Call[Any]) -> SplitWorkspace | None:
    """Return where programs that split tiles exchange partial sums, as kernels take it; None if they split none."""
    if call.config.splits == 1:
        return None
    return SplitWorkspace(call.memory["partial_tiles"], call.memory["partial_flags"])


def operands(
    call: Call[Any], a: torch.Tensor, b: torch.Tensor, scheduler: JITFunction[Any], *, sum_ranks: int = 1
) -> dict[str, Any]:
    """Return the operands' descriptors, and the compile-time shape of the work.

    Args:
        call: the call.
        a, b: its operands.
        scheduler: says what an index of the kernel's tiles stands for.
        sum_ranks: how many ranks a sum of partials is sent to.
    """
    a, b = call.readable(a, b)
    has_pieces = b.shape[1] % call.config.block_n != 0
    if not b.numel():  # a rank without columns computes nothing; its kernel takes a descriptor all the same
        b = a.t()
    b_rows, b_columns = _rows(b), _rows(b.t())
    is_by_columns = describable(b_columns)
    if is_fp8(b.dtype) and not is_by_columns:
        raise ValueError(
            f"B {tuple(b.shape)} of {b.dtype} lies by rows, with strides {b.stride()}; the tensor cores of sm_90 take "
            "fp8 by columns: give it as weight.t() of a contiguous weight (n, k), or take a variant's :portable"
        )
    loads, b_lines = (DESCRIPTORS_B_NK.value, b_columns) if is_by_columns else (DESCRIPTORS_B_KN.value, b_rows)
    config = call.config
    step = config.block_k
    b_block = (PIECE_LINES if has_pieces else config.block_n, step) if is_by_columns else (step, config.block_n)
    tile = WarpTile(
        config.block_m,
        config.block_n,
        config.block_k,
        config.group_m,
        loads,
        config.num_stages,
        config.comm_rows,
        subtile_columns(call.problem),
        num_subtiles(config.block_n // call.problem.narrowing, config.comm_rows, call.problem.out_dtype.itemsize),
        config.splits,
        config.pingpong,
        EPILOGUE=call.ops,
        FETCHES=reads_columns_alone(call.problem.epilogue),
        NARROWING=call.problem.narrowing,
        SCHEDULER=scheduler,
        SCALES=call.scaling,
        IS_PROMOTED=call.problem.is_promoted,
        SUM_RANKS=sum_ranks,
        WORLD_SIZE=call.world_size,
    )
    # Rows that no tiles divide come with any call, such columns with the weight.
    return {"a": descriptor(_rows(a), (PIECE_LINES, step)), "b": descriptor(b_lines, b_block), "TILE": tile}


def scales_of(call: Call[Any], a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor | None = None) -> Gemm | None:
    """Return where the operands' scales are, as `Call.gemm` does; None without scales."""
    return call.gemm(a, b, a_scale) if call.problem.scales else None


def run(
    call: Call[Any],
    kernel: JITFunction[Any],
    a: torch.Tensor,
    b: torch.Tensor,
    scheduler: JITFunction[Any],
    *,
    first_row: int = 0,
    sum_ranks: int = 1,
    **arguments: Any,
) -> None:
    """Queue a kernel that is all of a call, and so is launched early.

    Args:
        call, a, b: the call.
        kernel: takes `arguments`, and what all these kernels do.
        scheduler: says what an index of its tiles stands for.
        first_row: of this rank's C, that row 0 of A belongs to.
        sum_ranks: as in `operands`.
        arguments: by name.
    """
    call.run(
        kernel,
        call.config.num_sms,
        num_warps=num_warps(call.config),
        early=True,
        **operands(call, a, b, scheduler, sum_ranks=sum_ranks),
        epilogue=call.epilogue(first_row),
        peers=call.peers(),
        **arguments,
    )


def _rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix; one of a single row, between whose rows there is no distance, with one that TMA takes."""
    if matrix.shape[0] != 1:
        return matrix
    return matrix.as_strided(matrix.shape, (padded(matrix.shape[1], matrix.dtype), matrix.stride(1)))


def can_describe(matrix: torch.Tensor) -> bool:
    """Return whether the descriptors can name a matrix, by rows."""
    return describable(_rows(matrix))


def subtiles_of(call: Call[Any], out: torch.Tensor) -> TensorDescriptor:
    """Return the descriptor of a (rank, row, column) tensor that subtiles of tiles are sent to."""
    return descriptor(out, (1, call.config.comm_rows, subtile_columns(call.problem)))


def tile_columns_of(call: Call[Any], partials: torch.Tensor) -> TensorDescriptor:
    """Return the descriptor of a (rank, row, column) tensor that tiles are loaded from, a subtile's columns at once."""
    return descriptor(partials, (1, call.config.block_m, subtile_columns(call.problem)))


def descriptor(tensor: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """Return a tensor's descriptor for blocks of this shape."""
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), list(block), _layout(block, tensor.dtype)
    )


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES_OF_GLUON[dtype])
