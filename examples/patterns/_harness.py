"""What the patterns share around their kernels: operands, calls with new ones, and the check of every rank's C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _command_line import command_line, run

import iris_core

CALLS = 2
TOLERANCE = 1e-2  # relative, over all elements; each is rounded to bf16


class Call(NamedTuple):
    """What a pattern launches its kernels with.

    Attributes:
        a, b: A (m, k), and this rank's columns of B (k, n).
        c: C (m, world_size * n), of which the kernels write this rank's block of columns.
        flags: int64 words of this rank, one per tile, that only grow.
        number: of this call, from 1.
        words: what `DeviceContext.initialize` takes.
        m, n, k, block: sizes, and that of a tile.
        programs: that run at a time.
        stream: beside the current one.
    """

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    flags: torch.Tensor
    number: int
    words: torch.Tensor
    m: int
    n: int
    k: int
    block: int
    programs: int
    stream: Any


def body(rank: int, world_size: int, launch: Callable[[Call], None], is_scattered: bool = True) -> str | None:
    """Call ``launch`` some times, and check C.

    Args:
        rank, world_size: of this process.
        launch: multiplies A by this rank's B into its block of C.
        is_scattered: whether all blocks of C are on every rank after that, or this rank's alone.

    Returns:
        A line that says what was done, on rank 0.
    """
    ctx = iris_core.iris(heap_size=1 << 26)
    m, n, k, block = (40, 24, 48, 16) if ctx.is_interpreted() else (4096, 1024, 4096, 64)
    programs = min(8, ctx.get_cu_count()) if ctx.is_interpreted() else ctx.get_cu_count()
    c = ctx.zeros(m, world_size * n, dtype=torch.bfloat16)
    flags = torch.zeros(-(-m // block) * -(-n // block), dtype=torch.int64, device=ctx.get_device())
    ctx.watchdog.watch(flags, lambda tile, _: f"tile {tile}")
    words, stream, errors = ctx.get_device_context(), ctx.make_stream(), []
    for number in range(1, CALLS + 1):
        generator = torch.Generator(ctx.get_device()).manual_seed(number)  # every rank draws all of B, for the check
        a = torch.randn(m, k, generator=generator, device=ctx.get_device()).bfloat16()
        b = torch.randn(world_size, k, n, generator=generator, device=ctx.get_device()).bfloat16()
        ctx.device_barrier()  # no rank reads the C of the last call any more
        launch(Call(a, b[rank], c, flags, number, words, m, n, k, block, programs, stream))
        ctx.device_barrier()  # all blocks are there
        expected = torch.cat([a.float() @ one.float() for one in b], 1)
        columns = slice(None) if is_scattered else slice(rank * n, (rank + 1) * n)
        error = (c.float() - expected)[:, columns].norm() / expected[:, columns].norm()
        errors.append(error.item())
        assert errors[-1] < TOLERANCE, f"rank {rank}, call {number}: relative error {errors[-1]}"
    ctx.close()
    return f"C {m} × {world_size * n} on {world_size} ranks, relative error {max(errors):.1e}" if rank == 0 else None


def main(description: str | None, launch: Callable[[Call], None], *others: Any) -> None:
    """Be the main program of a pattern."""
    run(body, command_line(description).parse_args(), launch, *others)
