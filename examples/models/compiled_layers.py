"""Layers sharded over all ranks, for inference, under torch.compile: one graph, in which a call is one step.

What the compiler makes of the rest goes around them.

- python examples/models/compiled_layers.py --ranks 4
- torchrun --nproc-per-node 4 examples/models/compiled_layers.py
"""

import torch
from _command_line import command_line, run

import iris_core
from iris_tensor_parallel import MergedColumnParallelLinear, RowParallelLinear

TOLERANCE = 2e-2  # relative, over all elements; each is rounded to bf16 at every layer


class Block(torch.nn.Module):
    """Tokens x (m/W, k) of every rank to (m/W, k): up to (m, f/W), this rank's features, gated, and down again."""

    def __init__(self, ctx, width, features):
        super().__init__()
        options = {"bias": False, "sequence_parallel": True, "dtype": torch.bfloat16}
        self.gate_and_up = MergedColumnParallelLinear(ctx, width, (features, features), **options)
        self.down = RowParallelLinear(ctx, features, width, **options)

    def forward(self, x):
        gate, up = self.gate_and_up.split(self.gate_and_up(x))
        return x + self.down(torch.nn.functional.silu(gate) * up)


def body(rank, world_size, backend):
    ctx = iris_core.iris(heap_size=1 << 30)
    tokens, width, features = (64, 48, 96) if ctx.is_interpreted() else (4096, 4096, 16384)
    torch.manual_seed(0)  # the same on every rank
    model = torch.nn.Sequential(*(Block(ctx, width, features) for _ in range(2))).eval()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for number in range(3):
            x = torch.randn(tokens << number, width, dtype=torch.bfloat16, device=ctx.get_device())
            own = x.chunk(world_size)[rank]
            expected = model(own).float()
            error = ((compiled(own).float() - expected).norm() / expected.norm()).item()
            assert error < TOLERANCE, f"rank {rank}: relative error {error}"
    ctx.close()
    return f"rank {rank}: one graph for all numbers of tokens, relative error beside the eager layers {error:.1e}"


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--backend", help="of torch.compile; without GPUs one that needs no C++ compiler")
    arguments = parser.parse_args()
    on_gpus = arguments.device != "cpu" and torch.cuda.is_available()
    run(body, arguments, arguments.backend or ("inductor" if on_gpus else "aot_eager"))
