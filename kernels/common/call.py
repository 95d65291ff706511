"""A call of an operator: what it multiplies, with what memory, and how its kernels are queued."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from typing_extensions import Self

from iris_core import Context
from iris_core.backends.base import Stream, round_up

from .config import LEAST_TILE, GemmConfig, is_hopper_or_later
from .device.arguments import Block, Epilogue, Gemm, Peers, Tile
from .device.epilogue import epilogue_arguments, epilogue_ops, finish_with_torch
from .device.scaling import BLOCK_SUMS, NO_SCALES, WHOLE_SUMS
from .fp8.scales import SCALE_BLOCK, scale_strides
from .launch.channel import Channel
from .launch.traced_tensor import TracedTensor
from .portable.gemm import POINTERS
from .portable.operands import descriptor_of, fill_rows, loads_of
from .portable.quantise import QUANTISE_WARPS, quantise_arguments, quantise_rows
from .portable.row_norm import NORM_WARPS, NOTHING, NormedRows, norm_rows, shape_of_norm
from .problem import Problem
from .torch_product import multiply_with_torch
from .workspace import Buffer

P = TypeVar("P", bound=Problem)
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Device:
    """What a plan may depend on beside the problem; the same on all ranks.

    Args:
        arch: "cpu", "sm_90", "gfx942", ….
        num_sms: SMs or compute units that a grid may fill.
        ranks: that share it.
        streams_need_a_unit: whether what a stream does beside copies takes an SM.
        reserved_sms: those that grids leave free, which are not among `num_sms`.
        is_fully_connected: whether each peer is behind a link of its own: only what goes to all of them at once has the
            rate of all links. Otherwise all share one, and what goes to one peer at a time has that rate.
    """

    arch: str
    num_sms: int
    ranks: int = 1
    streams_need_a_unit: bool = False
    reserved_sms: int = 0
    is_fully_connected: bool = False

    @classmethod
    def of(cls, ctx: Context) -> Self:
        """Return a context's device."""
        return cls(
            ctx.get_arch(),
            ctx.get_cu_count(),
            ctx.ranks_on_device,
            ctx.backend.streams_need_a_unit,
            ctx.reserve_sms,
            ctx.backend.is_fully_connected,
        )


class Call(Generic[P]):
    """What a variant's functions are given: a problem, its plan, a rank, and, to launch, memory and streams.

    Of a call that is traced (launch/trace.py) the rows are a number that is not known, and tensors are what stands for
    them.

    Args:
        problem: what this call multiplies.
        config: the plan.
        rank: this one.
        device: that all ranks have.
        options: the family's own.

    Attributes:
        channel, asked, memory, half_size: where it is queued, what the variant asked for of the workspace, the buffers,
            by name, and how many elements a half of one has room for; once it is bound.
        new: what outputs need, by name, for which each call has new memory.
        ran_config: what the last launch ran with, where its operands did not allow for all of `config`.
        operands: what the epilogue reads, by name; while it is launched.
        copied: of which operands it made copies, "A" or "B".
    """

    channel: Channel
    asked: Mapping[str, Buffer]
    memory: dict[str, torch.Tensor]
    half_size: Callable[[str], int]

    def __init__(
        self,
        problem: P,
        config: GemmConfig,
        rank: int,
        device: Device,
        options: Mapping[str, Any],
    ) -> None:
        self.problem = problem
        self.config = config
        self.rank = rank
        self.device = device
        self.options = options
        self.ran_config = config
        self.operands: dict[str, torch.Tensor] = {}
        self.copied: tuple[str, ...] = ()
        self.new: dict[str, Buffer] = {}
        self._kept: dict[Hashable, Any] = {}

    def bind(
        self,
        channel: Channel,
        asked: Mapping[str, Buffer],
        memory: dict[str, torch.Tensor],
        half_size: Callable[[str], int],
    ) -> None:
        """Give it what it takes to be launched."""
        self.channel, self.asked, self.memory, self.half_size = channel, asked, memory, half_size

    def take(self, operands: dict[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Have its epilogue read these, and these outputs be in its memory, until `give_back`."""
        self.operands = operands
        self.memory.update(outputs)

    def give_back(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Keep nothing of what it took."""
        self.operands = {}
        for name in outputs:
            del self.memory[name]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.problem.world_size

    def kept(self, name: str, make: Callable[[], Kept]) -> Kept:
        """Return what `make` gives, made once: the same whenever this call is made again."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    # What is queued --------------------------------------------------------------------------------------------------

    def run(
        self, kernel: Any, num_programs: int, *, num_warps: int | None = None, early: bool = False, **arguments: Any
    ) -> None:
        """Queue a kernel; `num_warps` where it is not the compute kernels'.

        With `early` it may be launched before what precedes it in the stream is done, where GPUs can do that: it
        calls `gdc_wait`.
        """
        options = {"num_warps": num_warps or self.config.num_warps, "num_stages": self.config.num_stages}
        if early and is_hopper_or_later(self.device.arch):
            options["launch_pdl"] = True
        self.channel.launch(kernel, num_programs, arguments, options)

    def copy(self, destination: torch.Tensor, name: str, operand: torch.Tensor) -> None:
        """Copy the operand of a name, before anything else that the call queues, unless it lies there."""
        if (destination.data_ptr(), destination.stride()) != (operand.data_ptr(), operand.stride()):
            self.channel.copy(destination, name, operand)

    def quantise(self, a: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Queue a kernel that quantises this rank's A to `rows`, and return these; `scales` are its scale from then on.

        Args:
            a: the operand, of a wider dtype.
            rows: of A's shape, fp8, contiguous each.
            scales: (rows, 1), fp32, contiguous.
        """
        self.operands = {**self.operands, "a_scale": scales}
        rows_of_a = a.shape[0]
        if rows_of_a:
            arguments = quantise_arguments(a, rows, scales)
            self.channel.launch(quantise_rows, rows_of_a, arguments, {"num_warps": QUANTISE_WARPS})
        return rows

    def stream(self, name: str) -> Stream:
        """Return the queue of work of this name beside the current stream, for this launch."""
        return self.channel.stream(name)

    def copy_streams(self) -> list[Stream]:
        """Return the streams of copies to peers: one, or one per peer where each is behind a link of its own.

        Of the peers in any order, copies to the one at place i go to stream i % len(streams).
        """
        others = range(1, self.world_size - 1) if self.device.is_fully_connected else ()
        return [self.stream("copies"), *(self.stream(f"copies {number}") for number in others)]

    def in_one(self, stream: Stream) -> AbstractContextManager[None]:
        """Within the block, all is queued on this stream, and is the same in every call: the host queues it as one.

        Waits for what the call's kernels count are allowed, of those queued before: this comes behind them.
        """
        return self.channel.in_one(stream)

    def peer_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's of a symmetric tensor; see `Context.peer_view`."""
        peer_view = self.channel.ctx.peer_view
        return tensor.of_peers(peer_view) if isinstance(tensor, TracedTensor) else peer_view(tensor)

    # What kernels take -----------------------------------------------------------------------------------------------

    def peers(self) -> Peers:
        """Return what kernels that talk to peers take."""
        return self.channel.peers

    def tile(self, loads: int = POINTERS.value, config: GemmConfig | None = None) -> Tile:
        """Return the compile-time shape of the work on a tile."""
        config = config or self.config
        shape = config.block_m, config.block_n, config.block_k, config.group_m
        subtiles, narrowing = config.epilogue_subtiles, self.problem.narrowing
        sums = self.scaling, self.most_imprecise(config)
        peers = self.world_size, self.device.is_fully_connected
        return Tile(*shape, loads, subtiles, self.ops, narrowing, *sums, *peers)

    @property
    def scaling(self) -> int:
        """What the scales of the operands multiply (device/scaling.py)."""
        kinds = self.problem.scales
        return (BLOCK_SUMS if "block" in kinds else WHOLE_SUMS if kinds else NO_SCALES).value

    def most_imprecise(self, config: GemmConfig) -> int | None:
        """Return of how many k products of fp8 are summed before the sum is promoted; None for all, or other products.

        As cuBLAS does, a step of k or 128, whichever is less.
        """
        return min(SCALE_BLOCK, config.block_k) if self.problem.is_promoted else None

    @property
    def ops(self) -> tuple[Any, ...]:
        """The jit functions of the problem's epilogue."""
        arch, dtype = self.device.arch, self.problem.out_dtype
        return tuple([op.applied(arch, dtype) for op in epilogue_ops(self.problem.epilogue)])

    def epilogue(self, first_row: int = 0) -> Epilogue:
        """Return what `ops` read; a kernel's row 0 is row `first_row` of this rank's C."""
        return epilogue_arguments(self.problem.epilogue, self.operands, first_row)

    def queue_product(
        self,
        c: torch.Tensor,
        *,
        is_output: bool = False,
        rows: tuple[int | None, int | None] = (None, None),
        is_partial: bool = False,
        a: torch.Tensor | None = None,
        a_scale: torch.Tensor | None = None,
    ) -> None:
        """Queue torch's product of this rank's A and B, where a call is recorded among kernels of ours.

        Args:
            c: where it goes: the call's first output, if it `is_output`, or else in the workspace.
            rows: which of the output's, from and without; None for its first, and its last.
            is_partial: whether it is a partial sum, and so not finished.
            a, a_scale: the gathered A and its scales, in the workspace; None for the rank's.
        """
        problem = self.problem
        if self.channel.recording is not None:
            problem = replace(problem, m=1)  # no product asks for that; the call's may be traced

        def multiply(
            operands: Mapping[str, torch.Tensor],
            outputs: Sequence[torch.Tensor],
            c: torch.Tensor | None,
            a: torch.Tensor | None,
            a_scale: torch.Tensor | None,
            rows: tuple[int | None, int | None],
        ) -> None:
            to, of = outputs[0][slice(*rows)] if c is None else c, operands["A"] if a is None else a
            multiply_with_torch(problem, operands, of, operands["B"], to, is_partial=is_partial, a_scale=a_scale)

        self.channel.call_torch(multiply, self.operands, (c,), None if is_output else c, a, a_scale, rows)

    def finish(self, c: torch.Tensor) -> None:
        """Do in place, with torch and in C's dtype, what the epilogue says: how who uses a library does it.

        Nothing where rows are normed: the kernel that does that reads the epilogue's operands, too.
        """
        if self.problem.epilogue and self.problem.norm is None:
            c.copy_(finish_with_torch(c, self.problem.epilogue, self.operands))

    # The norm of rows of C ------------------------------------------------------------------------------------------

    def normed(self) -> tuple[torch.Tensor, ...]:
        """Return what the problem's norm gives, as the call leaves it."""
        if self.problem.norm is None:
            return ()
        return tuple([self.memory[name] for name in self.problem.normed_shapes(self.rank)])

    def norm(self, num_warps: int | None = None) -> dict[str, Any]:
        """Return what a kernel takes that norms rows; `num_warps` where it is not the compute kernels'."""
        norm, n = self.problem.norm, self.problem.n
        if norm is None:
            return {"norm": (), "NORM": None}
        weight, memory = self.operands["norm_weight"], self.memory
        rows = NormedRows(weight, weight.stride(0), n, memory["normed"], memory.get("norm_scales"))
        return {"norm": rows, "NORM": shape_of_norm(norm, n, num_warps or self.config.num_warps)}

    def norm_rows(self, c: torch.Tensor, *, finishes: bool) -> None:
        """Queue a kernel that norms the rows of this rank's C, and first, if it `finishes`, does its epilogue in place.

        Without rows, nothing is queued.
        """
        rows, width = c.shape
        if rows:
            epilogue = self.epilogue() if finishes else NOTHING
            tile = Tile(1, 1, 1, 1, POINTERS.value, 1, self.ops if finishes else ())
            out = Block(c, rows, width, c.stride(0), epilogue)
            arguments = {"out": out, **self.norm(NORM_WARPS), "TILE": tile}
            self.channel.launch(norm_rows, rows, arguments, {"num_warps": NORM_WARPS})

    def width(self, columns: int) -> int:
        """Return how long rows of products are: longer than `columns` of B where that puts them on 16 bytes.

        Descriptors read zeroes past B's columns; pointers would read what is there. No row is so much longer that it
        reaches into another tile, of which the narrowest have 16 columns.
        """
        dtypes = {self.problem.out_dtype, self.problem.dtype_of_partials}
        is_long_enough = not self.config.descriptors or all(fill_rows(columns, dtype) for dtype in dtypes)
        return columns if is_long_enough else round_up(columns, LEAST_TILE)

    def needs_copy(self, name: str, matrix: torch.Tensor) -> bool:
        """Return whether an operand, "A" or "B", must be copied for descriptors to name it."""
        return self.channel.operand_copies.are_needed(name, matrix)

    def readable(
        self, a: torch.Tensor, b: torch.Tensor, *, room_of_a: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the operands as descriptors can name them: themselves, or copies, which are queued.

        Args:
            a, b: the call's.
            room_of_a: where A is copied to; None for room of the operator's own.
        """
        a, b, made = self.channel.operand_copies.readable(self.run, a, b, room_of_a)
        self.copied += made
        return a, b

    def gemm(self, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor | None = None) -> Gemm:
        """Return how these operands and their scales lie; A's are the call's, or others, of rows or of blocks."""
        gemm, kinds = Gemm(a.shape[1], a.stride(0), a.stride(1), b.stride(0), b.stride(1)), self.problem.scales
        if not kinds:
            return gemm
        of_a, of_b = kinds
        if a_scale is None:
            a_scale = self.operands["a_scale"]
        elif of_a == "tensor":
            of_a = "row"
        b_scale = self.operands["b_scale"]
        (stride_asm, stride_ask), (stride_bsk, stride_bsn) = scale_strides(a_scale, of_a), scale_strides(b_scale, of_b)
        return gemm._replace(
            a_scale_ptr=a_scale,
            stride_asm=stride_asm,
            stride_ask=stride_ask,
            b_scale_ptr=b_scale,
            stride_bsk=stride_bsk,
            stride_bsn=stride_bsn,
            rows=a.shape[0],
            columns=b.shape[1],
        )

    def main_loop(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        gathered: torch.Tensor | None = None,
        a_scale: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Return what the main loop takes: operands as descriptors where the configuration says so, else as pointers.

        `gathered` is a second A of the same width, for kernels that read from two places. An empty operand has no
        descriptor: with one, all are pointers. `a_scale` is A's, where that is not the call's (`gemm`).
        """
        config = self.config
        if config.descriptors:
            a, b = self.readable(a, b)
        operands = {"a": a, "b": b} | ({} if gathered is None else {"gathered": gathered})
        loads = loads_of(operands) if config.descriptors else POINTERS.value
        if loads != POINTERS.value:
            operands = {name: descriptor_of(name, matrix, loads, config) for name, matrix in operands.items()}
        else:  # addresses take registers that the epilogue of a wide tile then lacks
            subtiles = 2 if config.block_n > 128 else config.epilogue_subtiles
            config = replace(config, descriptors=False, epilogue_subtiles=subtiles)
        self.ran_config = config
        return {**operands, "gemm": self.gemm(a, b, a_scale), "TILE": self.tile(loads, config)}

    def num_tiles(self, m: int, n: int) -> int:
        """Return how many tiles an (m, n) has."""
        return -(-m // self.config.block_m) * -(-n // self.config.block_n)
