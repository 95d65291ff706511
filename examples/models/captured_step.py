"""A step of decoding over all ranks, captured in one CUDA graph and replayed: the host queues one launch per step.

Tokens are few and layers many, so what the host does for each call would take longer than the call. Without a GPU the
step is called as it is.

- python examples/models/captured_step.py --ranks 4
- torchrun --nproc-per-node 4 examples/models/captured_step.py
"""

import torch
from _command_line import command_line, run

import iris_core
from iris_tensor_parallel import MergedColumnParallelLinear, RowParallelLinear

STEPS = 5
TOLERANCE = 1e-2  # relative, over all elements: the library's GEMM may add in another order while it is captured


class Block(torch.nn.Module):
    """Tokens x (m, k), which all ranks have alike, to (m, k): this rank's features, gated, and their sum over ranks."""

    def __init__(self, ctx, width, features):
        super().__init__()
        options = {"bias": False, "dtype": torch.bfloat16}
        self.gate_and_up = MergedColumnParallelLinear(ctx, width, (features, features), **options)
        self.down = RowParallelLinear(ctx, features, width, **options)

    def forward(self, x):
        gate, up = self.gate_and_up.split(self.gate_and_up(x))
        return x + self.down(torch.nn.functional.silu(gate) * up)


def captured(step, x):
    """Return what replays a step's work on other tokens like x; where there is no GPU, the step."""
    if x.device.type != "cuda":
        return step
    graph, tokens = torch.cuda.CUDAGraph(), x.clone()
    # On every rank, of a step that was called before, which made what it needs. A thread of NCCL's asks for events.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step(tokens)

    def replay(x):
        tokens.copy_(x)
        graph.replay()
        return output  # the same memory in every step

    return replay


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 28)
    tokens, width, features = (8, 32, 64) if ctx.is_interpreted() else (32, 2048, 8192)
    torch.manual_seed(0)  # the same on every rank
    model = torch.nn.Sequential(*(Block(ctx, width, features) for _ in range(4))).eval()
    with torch.inference_mode():
        xs = torch.randn(STEPS, tokens, width, dtype=torch.bfloat16, device=ctx.get_device())
        expected = [model(x) for x in xs]
        step = captured(model, xs[0])
        errors = []
        for number, x in enumerate(xs):
            found = step(x).float()
            errors.append(((found - expected[number]).norm() / expected[number].float().norm()).item())
            assert errors[-1] < TOLERANCE, f"rank {rank}, step {number}: relative error {errors[-1]}"
    how = "replayed" if xs.is_cuda else "called, as there is no GPU to capture them for"
    ctx.close()
    return f"rank {rank}: {STEPS} steps of {len(model)} blocks, {how}; relative error beside eager {max(errors):.1e}"


if __name__ == "__main__":
    run(body, command_line(__doc__).parse_args())
