"""Decoding with a KV cache that is sharded over the ranks: each attends to its part, and partial results are combined.

A program serves the query heads that share a head of the cache. Its maximum, its sum of weights and its weighted values
are combined with those of the peers' programs from registers, each in one step between ranks: no second kernel.

- python examples/kernels/flash_decode.py --ranks 4
- torchrun --nproc-per-node 4 examples/kernels/flash_decode.py
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core
from iris_core import x

HEADS, GROUP, WIDTH, BLOCK = 2, 16, 32, 32  # heads of the cache, query heads of each, their width
LENGTHS = (70, 71, 3)  # of the cache, call by call; with three tokens most ranks have none


@triton.jit(do_not_specialize=["length"])
def flash_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, workspace_ptr, flags_ptr, context_tensor, length, stride_head, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Attend to this rank's `length` tokens, then combine; one program a head of the cache."""
    ctx = iris_core.DeviceContext.initialize(context_tensor, world_size=WORLD_SIZE)
    head, columns = tl.program_id(0), tl.arange(0, WIDTH)
    group = (head * GROUP + tl.arange(0, GROUP))[:, None] * WIDTH + columns[None, :]
    q = tl.load(q_ptr + group)
    largest = tl.full((GROUP,), -1e30, tl.float32)  # finite: a rank may have no tokens
    total, out = tl.zeros((GROUP,), tl.float32), tl.zeros((GROUP, WIDTH), tl.float32)
    for start in range(0, length, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        offsets = head * stride_head + tokens[:, None] * WIDTH + columns[None, :]
        k = tl.load(k_ptr + offsets, mask=(tokens < length)[:, None], other=0)
        v = tl.load(v_ptr + offsets, mask=(tokens < length)[:, None], other=0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * WIDTH**-0.5
        scores = tl.where((tokens < length)[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights, scale = tl.exp(scores - new_largest[:, None]), tl.exp(largest - new_largest)
        total = total * scale + tl.sum(weights, 1)
        out = tl.dot(weights, v, out * scale[:, None], input_precision="ieee")
        largest = new_largest
    # Each combination has memory of its own: two halves, a slot a rank.
    small: tl.constexpr = 2 * WORLD_SIZE * GROUP
    own_ptr, own_flags = workspace_ptr + head * small * (2 + WIDTH), flags_ptr + head * 3 * (WORLD_SIZE + 1)
    of_all = x.all_reduce_value(largest, "max", ctx, own_ptr, own_flags)
    scale = tl.exp(largest - of_all)
    total = x.all_reduce_value(total * scale, "sum", ctx, own_ptr + small, own_flags + WORLD_SIZE + 1)
    out = x.all_reduce_value(out * scale[:, None], "sum", ctx, own_ptr + 2 * small, own_flags + 2 * (WORLD_SIZE + 1))
    tl.store(out_ptr + group, out / total[:, None])


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    device = ctx.get_device()
    workspace = ctx.zeros(HEADS, 2 * world_size * GROUP * (2 + WIDTH))
    flags = ctx.zeros(HEADS, 3, world_size + 1, dtype=torch.int64)
    ctx.watchdog.watch(flags, lambda word, _: f"rank {word % (world_size + 1)}, head {word // (3 * world_size + 3)}")
    ctx.barrier()
    for length in LENGTHS:
        generator = torch.Generator(device).manual_seed(length)  # every rank draws the whole cache, for the check
        q = torch.randn(HEADS, GROUP, WIDTH, generator=generator, device=device)
        k, v = torch.randn(2, HEADS, length, WIDTH, generator=generator, device=device)
        own = slice(rank * length // world_size, (rank + 1) * length // world_size)
        own_k, own_v = k[:, own].contiguous(), v[:, own].contiguous()
        out = torch.empty_like(q)
        flash_decode_kernel[(HEADS,)](
            q, own_k, own_v, out, workspace, flags, ctx.get_device_context(), own_k.shape[1], own_k.stride(0),
            GROUP, WIDTH, BLOCK, world_size,
        )  # fmt: skip
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)
    ctx.close()
    if rank == 0:
        return f"decoded with caches of {LENGTHS} tokens, sharded over {world_size} ranks"


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
