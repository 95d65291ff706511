"""A mixture of experts, sharded over the ranks: tokens go to their experts' ranks, and weighted results come back.

| kernel | does |
|---|---|
| dispatch | asks the expert's rank for a row by a remote atomic, and stores the token there |
| expert | multiplies the rows that came by this rank's experts' weights |
| combine | loads a token's results from wherever they are, and sums them in fp32 |

Device barriers between the kernels order them over all ranks; the host waits for none. Rows come in any order, results
do not depend on it.

- python examples/kernels/expert_dispatch.py --ranks 4
- torchrun --nproc-per-node 4 examples/kernels/expert_dispatch.py
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core

TOKENS, WIDTH, EXPERTS, CHOICES, BLOCK = 12, 32, 2, 2, 16  # tokens and experts a rank; experts of a token


@triton.jit
def dispatch_kernel(
    x_ptr, choice_ptr, row_ptr, count_ptr, inbound_ptr, context_tensor, CAPACITY: tl.constexpr, WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Send a token to one of its experts, and note the row that it got there; a program a choice."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    columns = tl.arange(0, WIDTH)
    expert = tl.load(choice_ptr + tl.program_id(0)).to(tl.int32)
    row = ctx.atomic_add(count_ptr + expert % EXPERTS, 1, expert // EXPERTS, sem="relaxed")
    row = (expert % EXPERTS) * CAPACITY + row
    tl.store(row_ptr + tl.program_id(0), row)
    value = tl.load(x_ptr + tl.program_id(0) // CHOICES * WIDTH + columns)
    ctx.store(inbound_ptr + row * WIDTH + columns, value, expert // EXPERTS)


@triton.jit
def expert_kernel(
    inbound_ptr, weight_ptr, count_ptr, outbound_ptr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Multiply an expert's rows by its weights; a program per expert."""
    columns = tl.arange(0, WIDTH)
    expert, count = tl.program_id(0), tl.load(count_ptr + tl.program_id(0))
    weight = tl.load(weight_ptr + (expert * WIDTH + columns)[:, None] * WIDTH + columns[None, :])
    for first in range(0, count, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        offsets = (expert * CAPACITY + rows)[:, None] * WIDTH + columns[None, :]
        value = tl.load(inbound_ptr + offsets, mask=(rows < count)[:, None], other=0)
        result = tl.dot(value, weight, input_precision="ieee")
        tl.store(outbound_ptr + offsets, result, mask=(rows < count)[:, None])


@triton.jit
def combine_kernel(
    choice_ptr, row_ptr, gate_ptr, outbound_ptr, y_ptr, context_tensor, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):  # fmt: skip
    """Sum a token's results, each times its gate; a program per token."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    columns = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for number in range(CHOICES):
        choice = tl.program_id(0) * CHOICES + number
        owner = tl.load(choice_ptr + choice).to(tl.int32) // EXPERTS
        result = ctx.load(outbound_ptr + tl.load(row_ptr + choice) * WIDTH + columns, owner)
        total += tl.load(gate_ptr + choice) * result
    tl.store(y_ptr + tl.program_id(0) * WIDTH + columns, total)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 22)
    device, capacity = ctx.get_device(), world_size * TOKENS  # all tokens may choose one expert
    generator = torch.Generator(device).manual_seed(0)  # every rank draws everything, for the check
    x = torch.randn(world_size, TOKENS, WIDTH, generator=generator, device=device)
    weights = torch.randn(world_size * EXPERTS, WIDTH, WIDTH, generator=generator, device=device)
    scores = torch.randn(world_size, TOKENS, world_size * EXPERTS, generator=generator, device=device)
    gates, choices = scores.softmax(-1).topk(CHOICES)

    counts = ctx.zeros(EXPERTS, dtype=torch.int32)
    inbound, outbound = (ctx.empty(EXPERTS, capacity, WIDTH) for _ in range(2))
    rows = torch.empty(TOKENS, CHOICES, dtype=torch.int32, device=device)
    own, y = weights[rank * EXPERTS : (rank + 1) * EXPERTS].contiguous(), torch.empty(TOKENS, WIDTH, device=device)
    own_x, own_choices, own_gates = (one[rank].contiguous() for one in (x, choices, gates))
    words = ctx.get_device_context()
    for _ in range(2):
        counts.zero_()
        ctx.device_barrier()  # all counts are zero, and all results of the last call have been loaded
        dispatch_kernel[(TOKENS * CHOICES,)](
            own_x, own_choices, rows, counts, inbound, words, capacity, WIDTH, EXPERTS, CHOICES
        )
        ctx.device_barrier()  # all tokens are where their experts are
        expert_kernel[(EXPERTS,)](inbound, own, counts, outbound, capacity, WIDTH, BLOCK)
        ctx.device_barrier()  # all results are there
        combine_kernel[(TOKENS,)](own_choices, rows, own_gates, outbound, y, words, WIDTH, EXPERTS, CHOICES)
        results = torch.einsum("tw,tcwv->tcv", own_x.double(), weights[own_choices].double())
        expected = (own_gates[..., None] * results).sum(1)
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-4)
    received = counts.sum().item()
    ctx.close()
    return f"rank {rank}: {TOKENS} tokens with {CHOICES} of {len(weights)} experts each; {received} came to this rank"


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
