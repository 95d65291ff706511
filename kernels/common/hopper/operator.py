"""What the warp-specialised variants share on the host: what they support, their tensor descriptors, their launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris_core.device import interpretation

from ..config import GemmConfig
from ..fused_operator import FusedOperator
from ..gemm import DESCRIPTORS_B_KN, DESCRIPTORS_B_NK
from ..operands import describable, padded
from ..problem import Problem
from .arguments import Sizes, Team, WarpTile
from .plan import (
    BLOCK_M,
    PIECE_ROWS,
    PINGPONG_COLUMNS,
    STEP_K,
    WIDTHS,
    Cut,
    pieces_of,
    quickest_cut,
    whole_turns,
)
from .positions import PIECE_COLS
from .roles import GROUP_WARPS

P = TypeVar("P", bound=Problem)

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
SHARED_BYTES = 227 << 10  # of an SM, for one program
BARRIER_BYTES = 1 << 10  # more than the barriers take
NUM_WARPS = 8  # that multiply: two warp groups, of 64 rows each or, with pingpong, of a tile each
STAGES = {256: 3, 128: 5, 64: 6}  # by the width of the tile: as many as fit beside the outbox, and no more than help
_MOST_DESCRIPTORS = 64


def machine_reason() -> str | None:
    """Return why kernels for Hopper cannot run in this process, or None."""
    if interpretation.is_enabled() or not torch.cuda.is_available() or torch.version.cuda is None:
        return "warp-specialised kernels need NVIDIA Hopper GPUs (sm_90)"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"warp-specialised kernels are for sm_90, this is sm_{major}{minor}"


def config_reason(config: GemmConfig) -> str | None:
    """Return why the warp-specialised kernels cannot run with a configuration, or None."""
    if config.num_warps != NUM_WARPS or config.block_m != 128:
        has = f"num_warps is {config.num_warps} and block_m {config.block_m}"
        return f"two warp groups multiply tiles of 128 rows: {has}"
    if config.block_n not in WIDTHS or config.block_k != STEP_K:
        tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
        return f"the tile is {tile}; it takes 128x256x64, 128x128x64 or 128x64x64"
    if config.pingpong and (config.block_n > PINGPONG_COLUMNS or config.team > 1):
        has = f"block_n {config.block_n}, team {config.team}"
        return f"a warp group alone multiplies {PINGPONG_COLUMNS} columns at most, and in no team; pingpong has {has}"
    if config.comm_rows < 8:
        return f"comm_rows is {config.comm_rows}; pieces have 8 rows or more"
    pieces = pieces_of(config.block_n, config.comm_rows)
    if config.team > pieces:
        return f"{config.team} programs share a tile of {pieces} pieces; each keeps one or more"
    if config.num_sms <= config.team:
        return f"{config.team} programs make a team; there are only {config.num_sms}"
    if config.epilogue_subtiles != 1 or not config.descriptors:
        return "tiles are read by descriptors and stored whole: descriptors=True, epilogue_subtiles=1"
    stage_bytes = 2 * (config.block_m + config.block_n) * config.block_k
    shared_bytes = config.num_stages * stage_bytes + 2 * config.block_m * config.block_n + BARRIER_BYTES
    if shared_bytes > SHARED_BYTES:
        return f"{config.num_stages} stages and a finished tile take {shared_bytes} bytes of {SHARED_BYTES}"
    return None


@dataclass(frozen=True)
class _Address:
    """Stands for a tensor in a descriptor, which then does not keep the tensor's memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class WarpSpecializedOperator(FusedOperator[P]):
    """An operator whose kernel gives warps roles. Its operands and outputs are moved by TMA: see `_operands`."""

    variant = "warp_specialized"
    teams: tuple[int, ...] = (1,)  # sizes that a default configuration may have
    pingpong = False  # whether in one warp groups may take turns
    cuts_shards = True  # whether every rank's rows are cut into tiles of their own

    @classmethod
    def unsupported_reason(cls, problem: P, config: GemmConfig | None) -> str | None:
        if reason := machine_reason():
            return reason
        if problem.dtype not in DTYPES:
            return f"warp-specialised kernels multiply bfloat16 and float16, not {problem.dtype}"
        if reason := super().unsupported_reason(problem, config):
            return reason
        return (cls._config_reason(problem, config) if config else None) or cls._sizes_reason(problem)

    @classmethod
    def _config_reason(cls, problem: P, config: GemmConfig) -> str | None:
        """Return why this variant cannot do the problem with a configuration, or None."""
        if reason := config_reason(config):
            return reason
        k = problem.a_shape(0)[1]
        if config.team > 1 and k < config.team * config.block_k:
            return f"{config.team} programs share a tile whose k is {k}; each takes {config.block_k} or more"
        return None

    @classmethod
    def _sizes_reason(cls, problem: P) -> str | None:
        """Return why TMA cannot move this problem's matrices, or None."""
        empty = [rank for rank in range(problem.world_size) if problem.a_shape(rank)[1] == 0]
        return f"rank {empty[0]}'s A has no columns; TMA moves rows that are not empty" if empty else None

    def _config_for(self, m: int, n: int) -> GemmConfig:
        num_sms = self.ctx.get_cu_count()
        k = self.problem.a_shape(0)[1]
        peers = self._peers_of_a_tile()
        if self.cuts_shards:
            ranks = self.problem.world_size
            m = ranks * -(-m // (ranks * BLOCK_M)) * BLOCK_M
        cut = quickest_cut(m, n, k, num_programs=num_sms, peers=peers, teams=self.teams, pingpong=self.pingpong)
        return self._config_of(cut)

    def _config_of(self, cut: Cut) -> GemmConfig:
        """Return the configuration with these tiles and teams, on all SMs."""
        return GemmConfig(
            BLOCK_M,
            cut.block_n,
            STEP_K,
            num_warps=NUM_WARPS,
            num_stages=STAGES[cut.block_n],
            num_sms=self.ctx.get_cu_count(),
            comm_rows=PIECE_ROWS,
            team=cut.team,
            pingpong=cut.pingpong,
        )

    @property
    def _num_warps(self) -> int:
        return GROUP_WARPS.value if self.config.pingpong else self.config.num_warps

    @property
    def _operands_arrive(self) -> bool:
        """Whether steps of a tile are loaded while operands of later ones are still on their way to this rank."""
        return False

    def _peers_of_a_tile(self) -> int:
        """Return how many peers the last tiles are sent to."""
        return 0

    def trace_to(self, trace: torch.Tensor | None) -> None:
        if trace is not None and self.config.pingpong:
            raise ValueError(f"{self}: nothing is traced of two warp groups in turns; trace with pingpong=False")
        super().trace_to(trace)

    def _open_team(self, num_programs: int, sizes: Sizes, shards: int = 1) -> Team | None:
        """Return where programs that share tiles exchange sums; None if they share none.

        Args:
            num_programs: that compute.
            sizes, shards: the tiles, of so many shards of these sizes.
        """
        config = self.config
        if config.team == 1:
            return None
        num_tiles = -(-sizes.m // config.block_m) * -(-sizes.n // config.block_n) * shards
        left = num_tiles - whole_turns(num_tiles, num_programs) * num_programs
        slots = -(-left // (num_programs // config.team)) * num_programs
        elements = max(slots, 1) * config.block_m * config.block_n
        sums = torch.empty(elements, dtype=torch.float32, device=self.ctx.get_device())

        def name(word: int) -> str:
            return f"{word // num_programs}, the sums of program {word % num_programs}"

        return Team(sums, self._local_flags(slots, "round", name=name))

    def _operands(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
        """Return the operands' descriptors, and the compile-time shape of the work."""
        a, b = self._operand_copies.readable(a, b)
        if not b.numel():  # a rank without columns computes nothing; its kernel takes a descriptor all the same
            b = a.t()
        b_rows, b_columns = self._rows(b), self._rows(b.t())
        is_by_columns = describable(b_columns)
        loads, b_lines = (DESCRIPTORS_B_NK.value, b_columns) if is_by_columns else (DESCRIPTORS_B_KN.value, b_rows)
        config = self.config
        b_block = (config.block_n, 64) if loads == DESCRIPTORS_B_NK.value else (64, config.block_n)
        tile = WarpTile(
            config.block_m,
            config.block_n,
            config.block_k,
            config.group_m,
            loads,
            config.num_stages,
            config.comm_rows,
            pieces_of(config.block_n, config.comm_rows),
            config.team,
            self._operands_arrive,
            config.pingpong,
        )
        return {
            "a": self._descriptor(self._rows(a), (config.block_m, 64)),
            "b": self._descriptor(b_lines, b_block),
            "TILE": tile,
        }

    def _rows(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a matrix; one of a single row, between whose rows there is no distance, with one that TMA takes."""
        if matrix.shape[0] != 1:
            return matrix
        return matrix.as_strided(matrix.shape, (padded(matrix.shape[1], matrix.dtype), matrix.stride(1)))

    def _can_describe(self, matrix: torch.Tensor) -> bool:
        return describable(self._rows(matrix))

    def _pieces_of(self, out: torch.Tensor) -> TensorDescriptor:
        """Return the descriptor of a (rank, row, column) tensor that pieces of tiles are sent to."""
        return self._descriptor(out, (1, self.config.comm_rows, PIECE_COLS.value))

    def _descriptor(self, tensor: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
        """Return a tensor's descriptor for blocks of this shape; made once for an address and strides."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), block)
        descriptors: dict[Any, TensorDescriptor] = self.__dict__.setdefault("_descriptors", {})
        if key not in descriptors:
            if len(descriptors) == _MOST_DESCRIPTORS:
                descriptors.clear()
            dtype = self.problem.dtype
            layout = gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])
            base = _Address(tensor.data_ptr(), dtype)
            descriptors[key] = TensorDescriptor(base, list(tensor.shape), list(tensor.stride()), list(block), layout)
        return descriptors[key]
