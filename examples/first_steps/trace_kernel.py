"""A kernel that records what it does, and one file for Perfetto with all ranks on one line of time.

Each rank sends chunks to the next and waits for those of the rank before. Open the file at ui.perfetto.dev: a process a
rank, a thread per program, and by each span the peer and the bytes. With None in the place of the trace nothing of
it is compiled.

- python examples/first_steps/trace_kernel.py --ranks 4 --out trace.json
- torchrun --nproc-per-node 4 examples/first_steps/trace_kernel.py
"""

import os
import tempfile

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core
from iris_core import tracing

PROGRAMS, CHUNKS, SIZE = 2, 3, 512
SEND, WAIT = tl.constexpr(0), tl.constexpr(1)
KINDS = ("send", "wait")


@triton.jit(do_not_specialize=["call"])
def exchange_kernel(
    sent_ptr, received_ptr, flags_ptr, call, context_tensor, trace_ptr, CHUNKS: tl.constexpr, SIZE: tl.constexpr
):
    """Send chunks to the next rank, and wait for as many; programs have chunks of their own."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    next_rank, previous = (ctx.rank + 1) % ctx.world_size, (ctx.rank + ctx.world_size - 1) % ctx.world_size
    for number in range(CHUNKS):
        chunk = tl.program_id(0) * CHUNKS + number
        offsets = chunk * SIZE + tl.arange(0, SIZE)
        begin = tracing.begin_event(trace_ptr)
        ctx.store(received_ptr + offsets, tl.load(sent_ptr + offsets), next_rank)
        ctx.signal(flags_ptr + chunk, call, next_rank)
        begin = tracing.end_event(trace_ptr, SEND, begin, next_rank, SIZE * 4, chunk)
        ctx.wait(flags_ptr + chunk, call)
        tracing.end_event(trace_ptr, WAIT, begin, previous, 0, chunk)


def body(rank, world_size, out):
    ctx = iris_core.iris(heap_size=1 << 20)
    sent = torch.full((PROGRAMS, CHUNKS, SIZE), float(rank), device=ctx.get_device())
    received = ctx.zeros(PROGRAMS, CHUNKS, SIZE)
    flags = ctx.zeros(PROGRAMS * CHUNKS, dtype=torch.int64)
    ctx.watchdog.watch(flags, lambda chunk, _: f"chunk {chunk}")
    trace = tracing.Trace(ctx, KINDS)
    for call, trace_ptr in ((1, trace.words), (2, None), (3, trace.words)):
        trace.clear()  # of the first call, which compiles
        ctx.barrier()
        exchange_kernel[(PROGRAMS,)](sent, received, flags, call, ctx.get_device_context(), trace_ptr, CHUNKS, SIZE)
    traced = trace.write(out)  # on rank 0
    assert (received == (rank - 1) % world_size).all()
    ctx.close()
    assert [len(spans) for spans in traced.ranks] == [2 * PROGRAMS * CHUNKS] * world_size
    return f"{sum(map(len, traced.ranks))} spans of {world_size} ranks in {out}" if rank == 0 else None


if __name__ == "__main__":
    parser = command_line(__doc__, ranks=4)
    parser.add_argument("--out", help="the file; without it a temporary one")
    arguments = parser.parse_args()
    if arguments.out:
        run(body, arguments, arguments.out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(body, arguments, os.path.join(folder, "trace.json"))
