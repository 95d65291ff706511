"""Causal attention over a sequence that is sharded over the ranks: keys and values go round a ring of two slots.

A rank keeps its queries. At step s it attends to the shard of rank - s, while one program sends that shard on to the
next rank; memory stays that of two shards, however long the sequence is.

| word | written by | awaited by |
|---|---|---|
| arrived | the previous rank: s shards have come | all programs, before step s |
| free | the next rank: its slot for step s + 1 is free | the sending program, before it sends |
| done, one per program | this rank's programs, after each step | the sending program, before it frees a slot |

Words grow from call to call and are never reset.

- python examples/kernels/ring_attention.py --ranks 4
- torchrun --nproc-per-node 4 examples/kernels/ring_attention.py
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core

ROWS, WIDTH, BLOCK = 64, 32, 32  # of a rank's shard; queries of a program
CALLS = 2


@triton.jit(do_not_specialize=["call"])
def ring_attention_kernel(
    q_ptr, shards_ptr, out_ptr, words_ptr, context_tensor, call, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program 0 sends, the others attend for a block of queries each. A slot is ROWS keys, then ROWS values."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    arrived, free, done = words_ptr, words_ptr + 1, words_ptr + 2
    slot: tl.constexpr = 2 * ROWS * WIDTH
    sent = call * (ctx.world_size - 1)  # shards, in earlier calls
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    block = rows[:, None] * WIDTH + columns[None, :]
    if tl.program_id(0) == 0:
        next_rank, previous = (ctx.rank + 1) % ctx.world_size, (ctx.rank + ctx.world_size - 1) % ctx.world_size
        for step in range(ctx.world_size - 1):
            for program in range(ROWS // BLOCK):
                ctx.wait(done + program, call * ctx.world_size + step, "gpu")  # has read the slot of step - 1
            ctx.signal(free, sent + step + 1, previous)
            ctx.wait(arrived, sent + step)
            ctx.wait(free, sent + step + 1)
            from_ptr, to_ptr = shards_ptr + step % 2 * slot, shards_ptr + (step + 1) % 2 * slot
            for start in range(0, 2 * ROWS, BLOCK):
                ctx.put(from_ptr + start * WIDTH + block, to_ptr + start * WIDTH + block, next_rank)
            ctx.signal(arrived, sent + step + 1, next_rank)
    else:
        first_row = (tl.program_id(0) - 1) * BLOCK
        q = tl.load(q_ptr + first_row * WIDTH + block)
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        total, out = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK, WIDTH), tl.float32)
        for step in range(ctx.world_size):
            owner = (ctx.rank - step + ctx.world_size) % ctx.world_size
            ctx.wait(arrived, sent + step)
            if owner <= ctx.rank:  # later shards are masked as a whole
                for start in range(0, ROWS, BLOCK):
                    k_ptr = shards_ptr + step % 2 * slot + start * WIDTH
                    k = tl.load(k_ptr + block, cache_modifier=".cg")  # L1 may hold the slot's last shard
                    v = tl.load(k_ptr + ROWS * WIDTH + block, cache_modifier=".cg")
                    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * WIDTH**-0.5
                    is_seen = (ctx.rank * ROWS + first_row + rows)[:, None] >= (owner * ROWS + start + rows)[None, :]
                    scores = tl.where(is_seen, scores, float("-inf"))
                    # Step 0 begins with the diagonal, or what lies left of it: no row is without a score.
                    new_largest = tl.maximum(largest, tl.max(scores, 1))
                    weights, scale = tl.exp(scores - new_largest[:, None]), tl.exp(largest - new_largest)
                    total = total * scale + tl.sum(weights, 1)
                    out = tl.dot(weights.to(v.dtype), v, out * scale[:, None], input_precision="ieee")
                    largest = new_largest
            iris_core.signal(done + tl.program_id(0) - 1, call * ctx.world_size + step + 1, "gpu")
        tl.store(out_ptr + first_row * WIDTH + block, out / total[:, None])


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    device = ctx.get_device()
    slots, words = ctx.zeros(2, 2, ROWS, WIDTH), ctx.zeros(2 + ROWS // BLOCK, dtype=torch.int64)
    ctx.watchdog.watch(words, lambda word, _: ["a shard", "a free slot"][word] if word < 2 else f"program {word - 1}")
    ctx.barrier()
    for call in range(CALLS):
        generator = torch.Generator(device).manual_seed(call)  # every rank draws the whole sequence, for the check
        q, k, v = torch.randn(3, world_size * ROWS, WIDTH, generator=generator, device=device)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        slots[0, 0], slots[0, 1] = k[own], v[own]
        out = torch.empty(ROWS, WIDTH, device=device)
        ring_attention_kernel[(1 + ROWS // BLOCK,)](
            q[own].contiguous(), slots, out, words, ctx.get_device_context(), call, ROWS, WIDTH, BLOCK
        )
        expected = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0, own]
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)
    ctx.close()
    if rank == 0:
        return f"{CALLS} × attention over {world_size * ROWS} tokens on {world_size} ranks, two slots of {ROWS} each"


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
