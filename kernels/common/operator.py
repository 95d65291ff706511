"""An operator: one variant of a family, bound to a context and a problem, with its buffers, flags and call number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, replace
from typing import Any, Generic, TypeVar

import torch

from iris_core import Context

from .arguments import Gemm, Peers, Tile
from .config import GemmConfig, default_config, invalid_reason, is_hopper_or_later
from .gemm import POINTERS
from .handshake import call_of_state, describe_state, number_of_call, state_words
from .launching import Calls, SideStream
from .operands import descriptor_of, loads_of
from .problem import Problem

P = TypeVar("P", bound=Problem)


class Operator(ABC, Generic[P]):
    """Call it with this rank's A and B; it queues the work on the current stream and returns this rank's output.

    Making one is collective: all ranks must ask for the same thing. The output belongs to the operator and is
    overwritten by its next call, which peers start without asking: read it, in stream order, before calling again.

    Args:
        ctx: the context; the output and the flags are allocated on its heap.
        problem: sizes, dtype and number of ranks.
        config: tunables; None for the defaults of this device.

    Attributes:
        config: the configuration.
        ran_config: what the last call ran with, where its operands did not allow for all of it.
        chosen_by: the variant that was asked for, where that one chose this.

    Raises:
        ValueError: the ranks ask for different things, or for what the variant cannot do.
        HeapExhausted: the heap has no room for the output.
    """

    family: str
    variant: str
    chosen_by = ""
    options: tuple[str, ...] = ()  # attributes that are the caller's, beside the problem; the same on all ranks

    def __init__(self, ctx: Context, problem: P, config: GemmConfig | None = None) -> None:
        self.ctx = ctx
        self.problem = problem
        self.rank = ctx.get_rank()
        with ctx.together(f"make {self}"):
            if problem.world_size != ctx.get_num_ranks():
                raise ValueError(
                    f"the problem is for {problem.world_size} ranks, the context has {ctx.get_num_ranks()}"
                )
            self.config = config or self.default_config()
            reason = self.unsupported_reason(problem, self.config)
            if reason:
                raise ValueError(f"{self} cannot do this: {reason}")
        asked = {name: str(value) for name, value in asdict(problem).items()}
        asked |= {name: str(getattr(self, name)) for name in self.options}
        ctx.agree("what the ranks ask for", {"operator": str(self), **asked, "config": str(self.config)})
        with ctx.all_or_nothing(f"make {self}"):
            self._open()
        self.ran_config = self.config
        ctx.barrier()

    @classmethod
    def unsupported_reason(cls, problem: P, config: GemmConfig | None) -> str | None:
        """Return why this variant cannot do a problem with a configuration (None: the defaults), or None if it can."""
        return invalid_reason(config) if config else None

    @abstractmethod
    def default_config(self) -> GemmConfig | None:
        """Return the configuration to use where the caller gives none; None if there is nothing to configure."""

    @abstractmethod
    def _open(self) -> None:
        """Allocate what the calls need."""

    @abstractmethod
    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Queue one call; return this rank's output."""

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Queue one call on the current stream.

        Args:
            a, b: this rank's operands, of the shapes the problem gives, its dtype, and on the context's device; any
                strides. They need not be on the heap.

        Returns:
            This rank's output, complete when the stream gets there.

        Raises:
            ValueError: an operand does not fit the problem.
            TimeoutError, PeerError: an earlier call waited in vain for a peer, on whatever rank; `Context.check`.
        """
        self.ctx.check()
        if self.ctx.debug:
            self.ctx.agree("the operators the ranks call", f"{self} for {self.problem}")
            with self.ctx.together(f"call {self}"):
                self._check_operands(a, b)
        else:
            self._check_operands(a, b)
        return self._launch(a, b)

    def as_matrix(self, output: torch.Tensor) -> torch.Tensor:
        """Return an output of this operator as the matrix the family defines; a copy where the layout differs."""
        return output

    def close(self) -> None:
        """Give the buffers back; collective. The output must not be used after this."""

    def describe_config(self) -> str:
        """Return what the last call ran with, for a table; behind the variant's name where that was chosen."""
        config = str(self.ran_config or "")
        return f"{self.chosen_by}: {self.variant} {config}".rstrip() if self.chosen_by else config

    def __str__(self) -> str:
        chosen = f" (chosen by {self.chosen_by})" if self.chosen_by else ""
        return f"{self.family}/{self.variant}{chosen}"

    def _check_operands(self, a: torch.Tensor, b: torch.Tensor) -> None:
        problem, device = self.problem, self.ctx.get_device()
        if a.ndim == 2 and b.ndim == 2 and a.shape[1] != b.shape[0]:
            raise ValueError(f"{self}: A is {tuple(a.shape)} and B is {tuple(b.shape)}; A's columns must be B's rows")
        for name, tensor, shape in (("A", a, problem.a_shape(self.rank)), ("B", b, problem.b_shape(self.rank))):
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{self}: {name} is {tuple(tensor.shape)} on rank {self.rank}; the operator was made for {shape} "
                    f"(M={problem.m}, N={problem.n}, K={problem.k} on {problem.world_size} ranks)"
                )
            if tensor.dtype != problem.dtype:
                raise ValueError(f"{self}: {name} is {tensor.dtype}; the operator was made for {problem.dtype}")
            if tensor.device != device:
                raise ValueError(f"{self}: {name} is on {tensor.device}; it must be on {device}")


class FusedOperator(Operator[P]):
    """An operator that runs our kernels: what peers write is on the heap, its calls are numbered (handshake.py)."""

    config: GemmConfig
    output: torch.Tensor
    comm_share = 0.0  # the part of the SMs that only communicates
    can_trace = True

    @abstractmethod
    def default_config(self) -> GemmConfig: ...

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.ctx.debug or not self._calls.are_prepared:
            return super().__call__(a, b)
        self.ctx.check()
        call = self._calls.find(a, b)
        if call is None:
            self._check_operands(a, b)
            with self._calls.preparing(a, b) as call:
                self._launch(a, b)
            call.config = self.ran_config
        self.ran_config = call.config
        self._calls.queue(call, a)
        return self.output

    def _open(self) -> None:
        world_size = self.problem.world_size
        self._calls = Calls(self.ctx.backend)
        self._trace: torch.Tensor | None = None
        self._buffers: list[torch.Tensor] = []  # on the heap
        self._watched: list[torch.Tensor] = []  # elsewhere
        self._state = self._on_heap((state_words(world_size),), torch.int64)
        self._open_buffers()
        self.ctx.watchdog.watch(
            self._state,
            lambda word: f"{self}: {describe_state(world_size, word)}",
            lambda word, expected: call_of_state(world_size, word, expected, self._parts()),
        )

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

    def _parts(self) -> int:
        """Return in how many parts a call announces its data to a peer."""
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

    def _run(
        self, kernel: Any, num_programs: int, *, num_warps: int | None = None, early: bool = False, **arguments: Any
    ) -> None:
        """Queue a kernel; `num_warps` where it is not the compute kernels'.

        With `early` it may be launched before what is ahead of it in the stream is done, where GPUs can do that: it
        calls `wait_for_earlier_kernels`.
        """
        options = {"num_warps": num_warps or self.config.num_warps, "num_stages": self.config.num_stages}
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

    def _local_flags(self, count: int, what: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return zeroed words that only this rank's kernels use, named in the report of a failed wait.

        int64 words hold call numbers; others count within a call.
        """
        flags = torch.zeros(max(count, 1), dtype=dtype, device=self.ctx.get_device())
        call_of = number_of_call if dtype == torch.int64 else None
        self.ctx.watchdog.watch(flags, lambda word: f"{self}: {what} {word} of this rank", call_of)
        self._watched.append(flags)
        return flags

    def _flags_by_sender(self, count: int, what: str, whose: str, *, a_call: int | None = 1) -> torch.Tensor:
        """Return zeroed int64 words on the heap, (world_size, count), that the rank of the first index sets here.

        The report of a failed wait names one as `what` so-and-so of a rank's `whose`. They grow by `a_call` a call;
        None: they are set, and zeroed again, in every call.
        """
        flags = self._on_heap((self.problem.world_size, count), torch.int64)
        self.ctx.watchdog.watch(
            flags,
            lambda word: f"{self}: {what} {word % count} of rank {word // count}'s {whose}",
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

    def _main_loop(self, a: torch.Tensor, b: torch.Tensor, gathered: torch.Tensor | None = None) -> dict[str, Any]:
        """Return what the main loop takes: operands as descriptors if all of them can be, else as pointers.

        `gathered` is a second A of the same width, for kernels that read from two places.
        """
        config = self.config
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
