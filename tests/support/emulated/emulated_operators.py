"""All ranks of an operator whose warp-specialised kernels are emulated (gluon_emulator.py), and its output checked.

Operators make their arguments as on a GPU; the handshake, which other tests cover, is a few dictionaries
(emulated_handshake.py).
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import compiling
import epilogues
import pytest
import torch
from checking import fault, make_data, poison
from emulated_handshake import World
from emulated_memory import Descriptor, Pointer, elements_from
from families import make_problem, stem
from gluon_emulator import Machine, emulated
from scaled import make_scaled_data
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris_core.tracing import Span, make_spans
from iris_kernels import all_gather_gemm, gemm_all_scatter, gemm_reduce_scatter
from iris_kernels.all_gather_gemm import copies as copies_module
from iris_kernels.all_gather_gemm.hopper import comm_programs
from iris_kernels.all_gather_gemm.host import keeps_gathered
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.device import epilogue as epilogue_ops
from iris_kernels.common.device import scaling
from iris_kernels.common.device import tile_scheduler as tile_order
from iris_kernels.common.fp8.scales import dequantised, quantise
from iris_kernels.common.hopper import (
    epilogue_load,
    epilogue_store,
    fixup,
    pipeline,
    promotion,
    tile_loop,
    waves,
)
from iris_kernels.common.hopper import host as hopper
from iris_kernels.gemm_reduce_scatter.hopper import tile_scheduler as reduce_scatter_schedule
from overlap_taxonomy import get_variant

COPIES = "copy_engine:sm90"
KERNELS = {
    ("all_gather_gemm", "workgroup_specialized:sm90"): all_gather_gemm.hopper.workgroup_specialized,
    ("all_gather_gemm", COPIES): all_gather_gemm.hopper.copy_engine,
    ("gemm_all_scatter", "warp_specialized:sm90"): gemm_all_scatter.hopper.warp_specialized,
    ("gemm_reduce_scatter", "warp_specialized:sm90"): gemm_reduce_scatter.hopper.warp_specialized,
    ("gemm_all_reduce", "warp_specialized:sm90"): gemm_reduce_scatter.hopper.warp_specialized,  # the same kernel
}
CALLS = 2


@dataclass(frozen=True)
class Case:
    """A problem, and what is awkward about it; tiles are 128 rows by `block_n` columns."""

    m: int
    n: int
    k: int
    why: str
    world_size: int = 4
    programs: int = 3
    block_n: int = 64
    layout: str = "nk"
    row_chunks: int = 1
    splits: int = 1
    k_chunks: int = 1
    pingpong: bool = False
    comm_rows: int = 32


class Context(compiling.StubContext):
    """A rank of a world whose ranks share one window."""

    def __init__(self, window: torch.Tensor, case: compiling.Case) -> None:
        self._memory = window
        super().__init__(case, window.nbytes // case.world_size)

    def _window(self, size: int) -> torch.Tensor:
        return self._memory


def call(machine: Machine, world: World, operator: Any, data: Any) -> None:
    """Make one call of one rank and wait for its end."""
    rank = operator.rank
    operands = epilogues.own_operands(operator.family, operator.problem, rank)
    if operator.problem.scales:
        operands = {name: data.scales[name] for name in operator.problem.operand_shapes(rank)}
    with compiling.recorded_launches() as launches:
        operator(data.a, data.b, **operands)
    named = {kernel.fn.__name__: (kernel, arguments) for kernel, arguments in launches}
    (kernel, arguments) = next(one for name, one in named.items() if name.endswith(f"_{stem(operator.variant)}"))
    _, copies = named.get("copy_operands_kernel", (None, {}))
    for copied in copies.values():
        if getattr(copied, "tiles", 0):
            copied.dst_ptr.copy_(copied.src_ptr)
    if "quantise_rows" in named:
        rows = named["quantise_rows"][1]["rows"]
        small, a_scale = quantise(rows.src_ptr, rows.dst_ptr.dtype, "row")
        rows.dst_ptr.copy_(small)
        rows.scales_ptr.copy_(a_scale)
        data = data._replace(a=small, scales={**data.scales, "a_scale": a_scale})  # as it is pushed
    num_programs = operator.config.num_sms
    beside = []
    if operator.variant == COPIES:
        is_barrier = copies_module.begins_with_barrier(operator.last_call)
        num_programs = copies_module.num_programs(num_programs, operator.last_call.device, has_barrier=is_barrier)
        beside = [machine.spawn("copies", partial(push, machine, world, operator, data), rank=rank)]
    options = ("num_warps", "num_stages", "launch_pdl")
    arguments = {name: value for name, value in arguments.items() if name not in options}
    for name, value in arguments.items():
        if isinstance(value, TensorDescriptor):
            arguments[name] = Descriptor(value)
    epilogue = arguments["epilogue"]
    read = tuple(one and one._replace(ptr=Pointer(elements_from(one.ptr))) for one in epilogue.operands)
    arguments["epilogue"] = epilogue._replace(operands=read)
    for name in ("scales", "own_scales", "sent_scales"):
        if found := arguments.get(name):
            pointers = {field: value for field, value in found._asdict().items() if isinstance(value, torch.Tensor)}
            made = {field: Pointer(elements_from(tensor)) for field, tensor in pointers.items()}
            arguments[name] = found._replace(**made)
    if "flags_ptr" in arguments:
        arguments["flags_ptr"] = 0
    if "shards" in arguments:
        arguments["shards"] = arguments["shards"]._replace(flags_ptr=0)
    if "shard" in arguments:
        arguments["shard"] = arguments["shard"]._replace(counts_ptr=0)
    if arguments.get("workspace"):
        tiles = arguments["workspace"].tiles_ptr.fill_(float("nan"))
        arguments["workspace"] = arguments["workspace"]._replace(tiles_ptr=Pointer(tiles), flags_ptr=0)
    programs = [
        machine.spawn("program", partial(kernel.fn, **arguments), rank=rank, program=program, num_programs=num_programs)
        for program in range(num_programs)
    ]
    epoch = world.epoch(rank)
    machine.wait(lambda: all(task.run.dead for task in programs + beside))
    assert world.epoch(rank) == epoch + 1, "the call has not ended"


def translate(pointer: Pointer, rank: int, peer: int, heap_bases: torch.Tensor) -> Pointer:
    """Return where a place on a rank's heap is on a peer's, all in one window."""
    address = pointer.memory.data_ptr() + int(heap_bases[peer]) - int(heap_bases[rank])
    memory = (ctypes.c_char * pointer.memory.nbytes).from_address(address)
    return Pointer(torch.frombuffer(memory, dtype=pointer.memory.dtype), pointer.offsets)


def push(machine: Machine, world: World, operator: Any, data: Any) -> None:
    """Stand for the copy stream of all-gather."""
    last = operator.last_call
    if keeps_gathered(last):  # the barrier of all ranks
        epoch = world.begin_call(last.peers(), operator.problem.world_size)
        world.wait_ready(last.peers(), epoch, operator.problem.world_size)
    for copy in copies_of(operator):
        machine.wait(lambda: True)
        if copy.scales is not None:
            columns = operator.problem.scale_columns
            copy.scales.copy_(data.scales["a_scale"].expand(len(data.a), columns).reshape(1, -1))
        copy.destination.copy_(data.a[copy.rows, copy.columns])
        world.set_flag(*place_of_flag(operator, copy))


def copies_of(operator: Any) -> list[Any]:
    """Return the copies of a call of all-gather by copy engines; of another's none."""
    call, config = operator.last_call, operator.config
    if operator.variant != COPIES:
        return []
    chunks = copies_module.shard_chunks(call, config.row_chunks, config.k_chunks)
    return copies_module.copies_of(call, chunks)


def place_of_flag(operator: Any, copy: Any) -> tuple[int, int]:
    """Return the rank that a copy's flag is at, and its place among that rank's."""
    flags = operator.ctx.peer_view(operator.last_call.memory["flags"])
    peer, flag = divmod(copy.flag.storage_offset() - flags.storage_offset(), flags.stride(0))
    return peer, flag


def run_rank(machine: Machine, world: World, operator: Any, layout: str, faults: list[str], *, is_traced: bool) -> None:
    """Call an operator with other data each time; its output must be whole when its own call ends."""
    problem, rank = operator.problem, operator.rank
    for number in range(CALLS):
        if is_traced:
            operator.trace_to(make_spans(1, torch.device("cpu")) if number == 1 else None)
        if problem.scales:
            data = make_scaled_data(operator.family, problem, rank, number)
            finished = data.data
            if problem.is_quantised:  # to what it stands for
                data = data._replace(a=dequantised(data.a, data.scales["a_scale"]))
        else:
            data = make_data(operator.family, problem, rank, number, torch.device("cpu"), layout=layout)
            finished = epilogues.finished_data(data, operator.family, problem, rank)
        if number == 0:
            poison(operator)
        call(machine, world, operator, data)
        error = torch.linalg.vector_norm(operator.output - finished.expected)
        if problem.out_dtype == torch.float32 and error > 1e-5 * torch.linalg.vector_norm(finished.expected):
            faults.append(f"rank {rank}, call {number}: the error is {error}, of a C of fp32")
        if wrong := fault(operator.output, finished, problem.out_dtype):
            faults.append(f"rank {rank}, call {number}: {wrong}")
        if operator.last_call.options.get("keep_gathered"):
            for peer in set(range(problem.world_size)) - {rank}:
                sent = make_data(operator.family, problem, peer, number, torch.device("cpu"), layout=layout).a
                if not torch.equal(operator.gathered[slice(*problem.rows(peer))], sent):
                    faults.append(f"rank {rank}, call {number}: what rank {peer} sent is not what is kept")


def run_case(
    family: str,
    name: str,
    case: Case,
    seed: int,
    *,
    is_traced: bool = False,
    late: str = "",
    epilogue: tuple[str, ...] = (),
    scales: tuple[str, ...] = (),
    use_fast_accum: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    given: torch.dtype | None = None,
    **options: bool,
) -> dict[int, list[Span]]:
    """Run all ranks, whose output must be right; return each rank's spans, of the second call.

    With `scales`, operands are fp8 and have these; A is quantised from `given`, where it is.
    """
    dtype = torch.float8_e4m3fn if scales else torch.bfloat16
    problem = make_problem(family, case.m, case.n, case.k, case.world_size, dtype)
    problem = replace(problem, epilogue=epilogue, scales=scales, use_fast_accum=use_fast_accum, out_dtype=out_dtype)
    problem = replace(problem, a_dtype=given or dtype)
    config = GemmConfig(
        128,
        case.block_n,
        hopper.step_k(dtype),
        group_m=2,
        num_stages=3,
        num_sms=case.programs,
        comm_sms=1,
        comm_rows=case.comm_rows,
        row_chunks=case.row_chunks,
        splits=case.splits,
        k_chunks=case.k_chunks,
        pingpong=case.pingpong,
    )
    window = torch.frombuffer(mmap.mmap(-1, case.world_size * (8 << 20)), dtype=torch.uint8)
    machine = Machine(seed, late=late)
    world = World(machine)
    faults: list[str] = []
    small_chunks = mock.patch.object(all_gather_gemm.hopper.workgroup_specialized, "_CHUNK_BYTES", (1 << 15, 1 << 15))
    with mock.patch.object(hopper, "machine_reason", return_value=None), small_chunks:
        variant = get_variant(family, name)
        if reason := variant.unsupported_reason(problem, config):
            pytest.skip(reason)
        for rank in range(case.world_size):
            context = Context(
                window,
                compiling.Case(name, "sm_90", rank=rank, family=family, world_size=case.world_size),
            )
            operator = variant.build(context, problem, config, **options)
            world.set_in_a_call.update(place_of_flag(operator, copy) for copy in copies_of(operator))
            machine.spawn(
                "rank", partial(run_rank, machine, world, operator, case.layout, faults, is_traced=is_traced), rank=rank
            )
        modules = [
            tile_order,
            promotion,
            waves,
            pipeline,
            epilogue_store,
            epilogue_load,
            fixup,
            tile_loop,
            comm_programs,
            reduce_scatter_schedule,
            KERNELS[family, name],
        ]
        with emulated(machine, modules, [epilogue_ops, epilogues, scaling], translate=translate, **world.names):
            machine.run()
    assert not faults
    assert machine.has_late_tasks == bool(late)  # else this is the run without
    return world.spans
