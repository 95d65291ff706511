"""What an operator would launch on a GPU that is not there, compiled for it, and what the machine code says.

An operator is made on a stub of a context, its launches are caught before they reach a driver, and each kernel is
compiled from the very arguments it was given, specialised as Triton specialises them.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from iris_core import Context
from overlap_taxonomy import get_variant
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature


@dataclass(frozen=True)
class Target:
    """A GPU to compile for."""

    gpu: GPUTarget
    num_sms: int

    @property
    def is_nvidia(self) -> bool:
        return self.gpu.backend == "cuda"


TARGETS = {
    "sm_90": Target(GPUTarget("cuda", 90, 32), 132),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 148),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 304),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 256),
}


@dataclass(frozen=True)
class Case:
    """An operator and where it runs; `layout` is how B lies in memory: "kn" by rows, "nk" by columns."""

    variant: str
    target: str
    rank: int = 0
    dtype: torch.dtype = torch.bfloat16
    layout: str = "nk"
    family: str = "gemm_all_scatter"
    world_size: int = 4
    size: int = 8192
    pointers: bool = False

    def __str__(self) -> str:
        parts = [self.family, self.variant, self.target, f"rank{self.rank}", str(self.dtype)[6:], self.layout]
        return "-".join(parts + ["pointers"] * self.pointers)


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Args:
        name: the kernel's.
        code: the assembly (PTX or AMD's).
        ttgir: Triton's GPU dialect.
        shared_bytes: shared memory (LDS) of a program.
        registers, stack_bytes, spills: of a thread, as the assembler allotted them; a spill needs stack.
        num_stages, tile: of the configuration.
    """

    name: str
    code: str
    ttgir: str
    shared_bytes: int
    registers: int
    stack_bytes: int
    spills: int
    num_stages: int
    tile: tuple[int, int, int]
    descriptors: bool


class StubContext:
    """As much of a context as making and calling an operator takes: no peers, no GPU, tensors that nobody touches."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.group = mock.Mock(together=lambda what: contextlib.nullcontext())
        self.watchdog = mock.Mock()
        self.backend = mock.Mock()
        self.operators: dict[Any, Any] = {}
        self.debug = False
        self.agree = self.barrier = self.free = lambda *_: None
        self.make_stream = mock.MagicMock()

    def get_rank(self) -> int:
        return self._case.rank

    def get_num_ranks(self) -> int:
        return self._case.world_size

    def get_device(self) -> torch.device:
        return torch.device("cpu")

    def get_cu_count(self) -> int:
        return TARGETS[self._case.target].num_sms

    def is_interpreted(self) -> bool:
        return False

    def get_heap_bases(self) -> torch.Tensor:
        return torch.empty(self._case.world_size, dtype=torch.uint64)

    def get_watchdog(self) -> torch.Tensor:
        return torch.empty(3, dtype=torch.int64)

    def zeros(self, *size: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype)

    empty = zeros

    def peer_view(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(self._case.world_size, *tensor.shape)


@contextlib.contextmanager
def _pretend(target: Target) -> Iterator[list[tuple[JITFunction, dict[str, Any]]]]:
    """Let host code believe that this GPU is here; yield the list that launches go to."""
    launches: list[tuple[JITFunction, dict[str, Any]]] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, dict(zip(self.arg_names, args, strict=False)) | kwargs))

    arch = target.gpu.arch
    capability = (arch // 10, arch % 10) if target.is_nvidia else (9, 4)
    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
        mock.patch.object(torch.version, "hip", None if target.is_nvidia else "7.0"),
    ):
        yield launches


def compile_case(case: Case) -> list[Compiled]:
    """Make the operator, call it once, and return every kernel it launched, compiled."""
    target = TARGETS[case.target]
    ctx = StubContext(case)
    assert {name for name in dir(StubContext) if not name.startswith("_")} <= set(dir(Context))
    variant = get_variant(case.family, case.variant)
    import iris_kernels.gemm_all_scatter as family  # the family's problem; a table once there are more

    with _pretend(target) as launches:
        problem = family.Problem(case.size, case.size, case.size, case.world_size, case.dtype)
        operator = variant.build(ctx, problem)
        a = torch.empty(problem.a_shape(case.rank), dtype=case.dtype)
        k, n = problem.b_shape(case.rank)
        b = torch.empty(n, k, dtype=case.dtype).t() if case.layout == "nk" else torch.empty(k, n, dtype=case.dtype)
        if case.pointers:
            from dataclasses import replace

            operator.config = replace(operator.config, descriptors=False)
        operator(a, b)
    config = operator.config
    return [_compile(kernel, arguments, target, config) for kernel, arguments in launches]


def _compile(kernel: JITFunction, arguments: dict[str, Any], target: Target, config: Any) -> Compiled:
    backend = make_backend(target.gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**arguments, debug=False)
    parsed, signature, constexprs, attrs = kernel._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(kernel, signature, constexprs, attrs)
    built = triton.compile(source, target=target.gpu, options=dict(parsed.__dict__))
    code = built.asm["ptx" if target.is_nvidia else "amdgcn"]
    registers, stack, spills = (
        _nvidia_resources(built.asm["cubin"], code) if target.is_nvidia else _amd_resources(code)
    )
    return Compiled(
        name=kernel.fn.__name__,
        code=code,
        ttgir=built.asm["ttgir"],
        shared_bytes=built.metadata.shared,
        registers=registers,
        stack_bytes=stack,
        spills=spills,
        num_stages=arguments["num_stages"],
        tile=(config.block_m, config.block_n, config.block_k),
        descriptors=config.descriptors,
    )
