"""What an operator would launch on a GPU that is not there, to be compiled for it (compiled_kernel.py).

An operator is made on a stub of a context, its launches are caught before they reach a driver, and each kernel is
compiled from the very arguments it was given, specialised as Triton specialises them.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import triton
from compiled_kernel import Compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.runtime.jit import DependenciesFinder, JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from iris_core.backends.hip import HipBackend
from iris_core.device.context import encode
from iris_core.device.sync import WATCHDOG_WORDS
from iris_core.heap.heap import SymmetricHeap
from iris_core.heap.tensor_factories import TensorFactories
from iris_kernels.common import call
from iris_kernels.common.hopper import host as hopper
from iris_kernels.common.portable.row_norm import RmsNorm
from overlap_taxonomy import Agent, get_variant

MORE_LATER = 0 if triton.__version__.startswith("3.6.") else 8  # bytes that kernels may spill with Triton 3.7


_update_hash = DependenciesFinder._update_hash


def _hash_callee_first(self: DependenciesFinder, callee: Any) -> None:
    _ = callee.cache_key
    _update_hash(self, callee)


# Triton takes over which global values a callee uses before it looks for them, unless the process has hashed it before:
# a kernel's key would depend on which kernels came earlier, and each worker would compile it anew.
DependenciesFinder._update_hash = _hash_callee_first


@dataclass(frozen=True)
class Target:
    """A GPU to compile for, and how much shared memory (LDS) a program may have there."""

    gpu: GPUTarget
    num_sms: int
    shared_bytes: int

    @property
    def is_nvidia(self) -> bool:
        return self.gpu.backend == "cuda"


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 108, 163 << 10),
    "sm_89": Target(GPUTarget("cuda", 89, 32), 142, 99 << 10),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 132, 227 << 10),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 148, 227 << 10),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 188, 99 << 10),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 304, 64 << 10),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 256, 160 << 10),
}


# What a wait's acquire looks like in PTX; {} is its scope. A wait that is compiled once has so many: ahead of its loop,
# as it enters it, and within.
NVIDIA_ACQUIRE = r"\bld\.acquire\.{}\.global"
LOADS_OF_A_WAIT = 3

# How Triton's GPU dialect says that a load goes past the L1 cache: the latter in 3.6 to 3.8.
PAST_L1 = r"\b(?:cache_modifier|cacheModifier) = cg\b"

DESCRIPTORS = (TensorDescriptor, GluonTensorDescriptor)
HEAP_SIZE = 3 << 30  # bytes per rank; addresses only
NO_RESERVE = 0x4000  # mmap(2): MAP_NORESERVE


@dataclass(frozen=True)
class Case:
    """An operator and where it runs; `layout` is how B lies in memory: "kn" by rows, "nk" by columns.

    `given` is A's dtype where that is quantised to `dtype`; `rows` is the call's M where that is not the operator's.
    """

    variant: str
    target: str
    rank: int = 0
    dtype: torch.dtype = torch.bfloat16
    layout: str = "nk"
    family: str = "gemm_all_scatter"
    world_size: int = 4
    size: int = 8192
    pointers: bool = False
    k_chunks: int = 1
    splits: int = 1
    pingpong: bool = False
    epilogue: tuple[str, ...] = ()
    out_dtype: torch.dtype | None = None
    scales: tuple[str, ...] = ()
    use_fast_accum: bool = False
    norm: RmsNorm | None = None
    given: torch.dtype | None = None
    block_n: int = 0
    rows: int = 0

    def __str__(self) -> str:
        parts = [self.family, self.variant, self.target, f"rank{self.rank}", str(self.dtype)[6:], self.layout]
        parts += [str(self.size)] + ["pointers"] * self.pointers
        parts += (
            ["chunks"] * (self.k_chunks > 1) + [f"team{self.splits}"] * (self.splits > 1) + ["pingpong"] * self.pingpong
        )
        parts += self.epilogue
        parts += [f"to-{str(self.out_dtype)[6:]}"] if self.out_dtype else []
        parts += [*self.scales, *["fast"] * self.use_fast_accum]
        parts += [f"from-{str(self.given)[6:]}"] if self.given else []
        parts += [f"{self.block_n}wide"] * (self.block_n > 0)
        parts += [f"{self.rows}rows"] * (self.rows > 0)
        parts += [f"normed-{str(self.norm.dtype)[6:]}" if self.norm.dtype else "normed"] if self.norm else []
        return "-".join(parts)

    @property
    def announces_itself(self) -> bool:
        """Whether programs announce their data themselves: what the last one collects it does not release to peers."""
        if self.family == "all_gather_gemm":
            return get_variant(self.family, self.variant).agent in (Agent.COMM_KERNEL, Agent.COMM_PROGRAMS)
        return self.family == "gemm_reduce_scatter" and not self.variant.startswith("bulk_synchronous:")


class StubContext(TensorFactories):
    """As much of a context as making and calling an operator takes: no peers, no GPU, memory that nobody touches."""

    def __init__(self, case: Case, heap_size: int = HEAP_SIZE, reserve_sms: int = 0) -> None:
        self._case = case
        self.reserve_sms = reserve_sms
        self.control_plane = mock.Mock(rank=case.rank, world_size=case.world_size)
        self.collective_section = self.collective_allocation = lambda _: contextlib.nullcontext()
        self.recovery = mock.Mock()
        self.profiler_range = None
        self.backend = mock.Mock(
            device=torch.device("cpu"),
            open_window=lambda control_plane, size: size,
            map=lambda control_plane, find, place: (0, 0),
            window=lambda: self._window(heap_size),
            is_capturing=lambda: False,
            streams_need_a_unit=not TARGETS[case.target].is_nvidia,
            is_fully_connected=not TARGETS[case.target].is_nvidia,
            storages_are_whole=not TARGETS[case.target].is_nvidia and HipBackend.storages_are_whole,
        )
        self.heap = SymmetricHeap(self.control_plane, self.backend, heap_size, mock.Mock())
        self.watchdog = mock.Mock(words=self.zeros(WATCHDOG_WORDS.value, dtype=torch.int64))
        self.peer_view = self.heap.peer_view
        self.operators: dict[Any, Any] = {}
        self.kept: dict[Any, Any] = {}
        self.debug_mode = False
        self.ranks_on_device = 1

    def _window(self, size: int) -> torch.Tensor:
        smallest = 0 if TARGETS[self._case.target].is_nvidia else HipBackend.reserved_bytes
        memory = mmap.mmap(-1, max(size * self._case.world_size, smallest), flags=mmap.MAP_PRIVATE | NO_RESERVE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _allocate(self, shape: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return self.heap.allocate(shape, dtype)

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        return self.heap.contains(tensor)

    def free(self, buffer: torch.Tensor) -> None:
        self.heap.free(buffer)

    def zeros(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
        return self.empty(*size, dtype=dtype)

    def get_rank(self) -> int:
        return self._case.rank

    def get_num_ranks(self) -> int:
        return self._case.world_size

    def get_device(self) -> torch.device:
        return self.backend.device

    def get_cu_count(self) -> int:
        return TARGETS[self._case.target].num_sms - self.reserve_sms

    def get_arch(self) -> str:
        return self._case.target

    def get_heap_bases(self) -> torch.Tensor:
        return self.heap.bases

    def get_watchdog(self) -> torch.Tensor:
        return self.watchdog.words

    def get_device_context(self) -> torch.Tensor:
        return encode(self.get_rank(), self.heap.bases, self.watchdog.words.data_ptr())

    def is_interpreted(self) -> bool:
        return False

    def agree(self, what: str, value: Any) -> None:
        pass

    def barrier(self) -> None:
        pass

    def check(self) -> None:
        pass

    def make_stream(self) -> Any:
        return mock.MagicMock()


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[tuple[JITFunction, dict[str, Any]]]]:
    """Launch nothing, and multiply nothing by torch; yield the list that kernels and their arguments go to."""
    launches: list[tuple[JITFunction, dict[str, Any]]] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, dict(zip(self.arg_names, args, strict=False)) | kwargs))

    with mock.patch.object(JITFunction, "run", record), mock.patch.object(call, "multiply_with_torch"):
        yield launches


def compile_case(case: Case) -> list[Compiled]:
    """Make the operator, call it once, and return every kernel it launched, to be compiled."""
    with (
        recorded_launches() as launches,
        mock.patch.object(hopper, "machine_reason", return_value=None),
        mock.patch.object(torch, "zeros", torch.empty),  # gigabytes that nothing will read
    ):
        build = get_variant(case.family, case.variant).build
        ctx = StubContext(case)
        operator = build(ctx, make_problem(case))
        if case.pointers or case.pingpong or case.k_chunks > 1 or case.splits > 1 or case.block_n:
            config = replace(operator.config, descriptors=not case.pointers)
            if case.block_n:
                config = hopper.with_columns(config, case.block_n)
            if case.k_chunks > 1 or case.splits > 1:
                config = replace(config, k_chunks=case.k_chunks, splits=case.splits)
            if case.pingpong:
                config = replace(config, pingpong=True, block_n=128, num_stages=hopper.STAGES[128], splits=1)
            ctx = StubContext(case)
            operator = build(ctx, make_problem(case), config)
        problem = operator.problem.with_rows(case.rows or case.size)
        operator(*_operands(problem, case), m=problem.m, **_epilogue_operands(problem, case))
    return [
        replace(
            compile_kernel(kernel, arguments, case.target, config=operator.ran_config),
            descriptors_on_heap=_descriptors_on(ctx.heap, arguments),
        )
        for kernel, arguments in launches
    ]


def _descriptors_on(heap: SymmetricHeap, arguments: dict[str, Any]) -> frozenset[str]:
    begin = heap.window.data_ptr()
    found = {name: value.base.data_ptr() for name, value in arguments.items() if isinstance(value, DESCRIPTORS)}
    return frozenset(name for name, address in found.items() if begin <= address < begin + heap.window.nbytes)


def make_problem(case: Case) -> Any:
    """Return the problem that a case's operator is made for."""
    family = importlib.import_module(f"iris_kernels.{case.family}")
    sizes = case.size, case.size, case.size
    more = {"scales": case.scales, "use_fast_accum": case.use_fast_accum, "norm": case.norm, "a_dtype": case.given}
    return family.Problem(*sizes, case.world_size, case.dtype, case.epilogue, case.out_dtype, **more)


def _operands(problem: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.empty(problem.a_shape(case.rank), dtype=problem.a_dtype)
    k, n = problem.b_shape(case.rank)
    if case.layout == "nk":
        return a, torch.empty(n, k, dtype=case.dtype).t()
    return a, torch.empty(k, n, dtype=case.dtype)


def _epilogue_operands(problem: Any, case: Case) -> dict[str, torch.Tensor]:
    shapes = problem.operand_shapes(case.rank)
    return {name: torch.empty(shape, dtype=problem.operand_dtype(name)) for name, shape in shapes.items()}


def check_system_edges(kernel: Compiled, target: str) -> None:
    """Check that a kernel releases and acquires, and over the system alone."""
    if TARGETS[target].is_nvidia:
        assert kernel.count(r"\batom\.global\.sys\.release\.exch")
        assert kernel.count(NVIDIA_ACQUIRE.format("sys"))
        assert not kernel.count(r"\b(?:gpu|cta)\.(?:release|acquire)|(?:release|acquire)\.(?:gpu|cta)\b")
    else:
        assert kernel.count(r"buffer_wbl2 sc0 sc1\n")
        assert kernel.count(r"buffer_inv sc0 sc1\n")
        assert not kernel.count(r"buffer_(?:wbl2|inv) sc[01]\n")


def compile_kernel(kernel: JITFunction, arguments: dict[str, Any], target_name: str, *, config: Any = None) -> Compiled:
    """Return a kernel to be compiled for these arguments, options such as ``num_warps`` among them."""
    target = TARGETS[target_name]
    backend = make_backend(target.gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**arguments, debug=False)
    parsed, signature, constexprs, attrs = kernel._pack_args(backend, options, bound, specialization, options)
    make_source = GluonASTSource if kernel.is_gluon() else ASTSource
    return Compiled(
        name=kernel.fn.__name__,
        arguments=frozenset(arguments),
        source=make_source(kernel, signature, constexprs, attrs),
        gpu=target.gpu,
        options=parsed,
        threads=parsed.num_warps * target.gpu.warp_size,
        config=config,
        constants={param.name: arguments[param.name] for param in kernel.params if param.is_constexpr},
    )
