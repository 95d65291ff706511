"""An operator that runs our kernels: buffers and flags on the heap, launches, what every family's kernels take."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import increment_version

from iris_core.backends.base import round_up
from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from .arguments import Gemm, Peers, Tile
from .config import LEAST_TILE, GemmConfig, default_config, is_hopper_or_later
from .gemm import POINTERS
from .handshake import call_of_state, describe_state, number_of_call, state_words
from .launching import Calls, SideStream
from .operands import OperandCopies, describable, descriptor_of, fill_rows, loads_of
from .operator import Operator, P


class FusedOperator(Operator[P]):
    """An operator that runs our kernels: what peers write is on the heap, its calls are numbered (handshake.py)."""

    config: GemmConfig
    comm_share = 0.0  # the part of the SMs that only communicates
    can_trace = True

    @classmethod
    def as_variant(cls, *, arrangement: Arrangement, agent: Agent, sync: Sync, summary: str) -> Variant:
        """Return the registry's entry for these operators."""
        return Variant(cls.family, cls.variant, arrangement, agent, sync, summary, cls, cls.unsupported_reason)

    @abstractmethod
    def default_config(self) -> GemmConfig: ...

    def _call(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        output = self._queue(a, b)
        # Kernels wrote, and peers' did, which autograd does not see: what it kept of an earlier call is overwritten.
        increment_version(self.outputs())
        return output

    def _queue(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._operand_copies.made = ()
        if self.ctx.debug_mode or not self._calls.are_prepared:
            return super()._call(a, b)
        self._check_open()
        self._check_kinds(a, b)
        call = self._calls.find(a, b)
        if call is None:
            self._check_operands(a, b)
            with self._calls.preparing(a, b) as call:
                self._launch(a, b)
            call.config, call.copied = self.ran_config, self._operand_copies.made
        self.ran_config, self._operand_copies.made = call.config, call.copied
        self._calls.queue(call, a)
        return self._output  # past the check of `Overwritten`: every call comes here

    def compile_kernels(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compile what a call on operands that lie as these do launches, and queue nothing (compile_ahead.py).

        Where calls are not prepared it does nothing: kernels are compiled as they are launched.
        """
        if self.ctx.debug_mode or not self._calls.are_prepared:
            return
        with self._calls.compiling():
            self._launch(a, b)

    def describe_config(self) -> str:
        copied = self._operand_copies.made
        return super().describe_config() + (f" copied={','.join(copied)}" if copied else "")

    def _open(self) -> None:
        world_size = self.problem.world_size
        num_sms = self.ctx.get_cu_count()
        if self.config.num_sms > num_sms and self.ctx.get_arch() != "cpu":
            raise ValueError(
                f"{self}: num_sms is {self.config.num_sms}; programs wait for each other, and this GPU has room for "
                f"{num_sms} at once: num_sms={num_sms}"
            )
        self._calls = Calls(self.ctx.backend)
        self._operand_copies = OperandCopies(str(self), self._run, self._can_describe)
        self._trace: torch.Tensor | None = None
        self._buffers: list[torch.Tensor] = []  # on the heap
        self._watched: list[torch.Tensor] = []  # elsewhere
        self._state = self._on_heap((state_words(world_size),), torch.int64)
        self._open_buffers()
        self.ctx.watchdog.watch(
            self._state,
            lambda word, _: f"{self._sized}: {describe_state(world_size, word)}",
            lambda word, expected: call_of_state(world_size, word, expected, self._chunks_a_call()),
        )

    @property
    def _sized(self) -> str:
        """What reports of waits call this operator: of one variant a model has many."""
        return f"{self} of {self.problem.m}x{self.problem.n}x{self.problem.k}"

    @abstractmethod
    def _open_buffers(self) -> None:
        """Make `output`, and whatever else the calls need."""

    def close(self) -> None:
        self.ctx.barrier()
        for flags in self._watched:
            self.ctx.watchdog.unwatch(flags)
        for buffer in self._buffers:
            self.ctx.free(buffer)
        self._buffers, self._watched = [], []
        self._calls.clear()
        self._operand_copies.clear()
        super().close()

    def _chunks_a_call(self) -> int:
        """Return in how many chunks a call signals its data to a peer."""
        return 1

    def _config_for(self, m: int, n: int) -> GemmConfig:
        """Return what to start from for an (m, n) output of a rank's GEMM; the same on all ranks."""
        return default_config(
            self.ctx.get_arch(),
            self.ctx.get_cu_count(),
            m=m,
            n=n,
            dtype=self.problem.dtype,
            comm_share=self.comm_share,
        )

    def _on_heap(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed heap buffer that ends with this operator."""
        self._buffers.append(self.ctx.zeros(shape, dtype=dtype))
        return self._buffers[-1]

    @property
    def _num_warps(self) -> int:
        """Return how many warps a compute kernel is launched with."""
        return self.config.num_warps

    def _run(
        self, kernel: Any, num_programs: int, *, num_warps: int | None = None, early: bool = False, **arguments: Any
    ) -> None:
        """Queue a kernel; `num_warps` where it is not the compute kernels'.

        With `early` it may be launched before what precedes it in the stream is done, where GPUs can do that: it
        calls `gdc_wait`.
        """
        options = {"num_warps": num_warps or self._num_warps, "num_stages": self.config.num_stages}
        if early and is_hopper_or_later(self.ctx.get_arch()):
            options["launch_pdl"] = True
        self._calls.launch(kernel, num_programs, arguments, options)

    def trace_to(self, trace: torch.Tensor | None) -> None:
        """Have later calls write down what their programs do (trace.py), or no longer.

        Raises:
            ValueError: this variant's kernels cannot.
        """
        if trace is not None and not self.can_trace:
            raise ValueError(f"{self}: its kernels do not write traces; those of other variants do")
        self._trace = trace
        self._calls.clear()

    def _side_stream(self) -> SideStream:
        """Return a queue of work beside the current stream, of high priority."""
        return SideStream(self._calls, self.ctx.make_stream())

    def _local_flags(
        self, count: int, what: str, dtype: torch.dtype = torch.int64, name: Callable[[int], str] = str
    ) -> torch.Tensor:
        """Return zeroed words that only this rank's kernels use, named in the report of a failed wait: `what`, `name`.

        int64 words hold call numbers; others count within a call.
        """
        flags = torch.zeros(max(count, 1), dtype=dtype, device=self.ctx.get_device())
        call_of = number_of_call if dtype == torch.int64 else None
        self.ctx.watchdog.watch(flags, lambda word, _: f"{self._sized}: {what} {name(word)} of this rank", call_of)
        self._watched.append(flags)
        return flags

    def _flags_by_source(self, count: int, what: str, whose: str, *, a_call: int | None = 1) -> torch.Tensor:
        """Return zeroed int64 words on the heap, (world_size, count), that the rank of the first index sets here.

        The report of a failed wait names one as `what` so-and-so of a rank's `whose`. They grow by `a_call` a call;
        None: they are set, and zeroed again, in every call.
        """
        flags = self._on_heap((self.problem.world_size, count), torch.int64)
        self.ctx.watchdog.watch(
            flags,
            lambda word, _: f"{self._sized}: {what} {word % count} of rank {word // count}'s {whose}",
            (lambda word, expected: -(-expected // a_call)) if a_call else None,
        )
        return flags

    def _peers(self) -> Peers:
        """Return what kernels that talk to peers take."""
        return Peers(self._state, self.rank, self.ctx.get_heap_bases(), self.ctx.watchdog.words, self._trace)

    def _tile(self, loads: int = POINTERS.value, config: GemmConfig | None = None) -> Tile:
        """Return the compile-time shape of the work on a tile."""
        config = config or self.config
        return Tile(config.block_m, config.block_n, config.block_k, config.group_m, loads, config.epilogue_subtiles)

    def _width(self, columns: int) -> int:
        """Return how long rows of products are: longer than `columns` of B where that puts them on 16 bytes.

        Descriptors read zeroes past B's columns; pointers would read what is there. No row is so much longer that it
        reaches into another tile, of which the narrowest have 16 columns.
        """
        is_long_enough = not self.config.descriptors or fill_rows(columns, self.problem.dtype)
        return columns if is_long_enough else round_up(columns, LEAST_TILE)

    def _can_describe(self, matrix: torch.Tensor) -> bool:
        """Return whether this operator's descriptors can name a matrix, by rows."""
        return describable(matrix)

    def _main_loop(self, a: torch.Tensor, b: torch.Tensor, gathered: torch.Tensor | None = None) -> dict[str, Any]:
        """Return what the main loop takes: operands as descriptors where the configuration says so, else as pointers.

        `gathered` is a second A of the same width, for kernels that read from two places. An empty operand has no
        descriptor: with one, all are pointers.
        """
        config = self.config
        if config.descriptors:
            a, b = self._operand_copies.readable(a, b)
        operands = {"a": a, "b": b} | ({} if gathered is None else {"gathered": gathered})
        loads = loads_of(operands) if config.descriptors else POINTERS.value
        if loads != POINTERS.value:
            operands = {name: descriptor_of(name, matrix, loads, config) for name, matrix in operands.items()}
        else:  # addresses take registers that the epilogue of a wide tile then lacks
            subtiles = 2 if config.block_n > 128 else config.epilogue_subtiles
            config = replace(config, descriptors=False, epilogue_subtiles=subtiles)
        self.ran_config = config
        gemm = Gemm(a.shape[1], a.stride(0), a.stride(1), b.stride(0), b.stride(1))
        return {**operands, "gemm": gemm, "TILE": self._tile(loads, config)}
