"""A model sharded over all ranks by torch's parallelize_module, with fused layers in the place of torch's own.

The plan is torch's: what each linear layer takes and gives. Parameters become DTensors, as they do with torch's styles,
so optimizers and checkpoints see what they know.

- python examples/models/parallelize_model.py --ranks 4
- torchrun --nproc-per-node 4 examples/models/parallelize_model.py
"""

import copy

import torch
from _command_line import command_line, run
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import iris_core
from iris_tensor_parallel.styles import ColwiseParallel, RowwiseParallel, mesh_of

HEADS = 4
TOLERANCE = 1e-4  # relative, over all elements; in fp32


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual; x is (batch, sequence, width)."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width, elementwise_affine=False) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // HEADS

    def forward(self, x):
        normed = self.norms[0](x)
        heads = [layer(normed).unflatten(-1, (-1, self.head_width)) for layer in (self.query, self.key, self.value)]
        mixed = nn.functional.scaled_dot_product_attention(*(one.transpose(1, 2) for one in heads), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def cut(model, ctx):
    """Shard a model in place; between layers each rank has a part of the sequence, the second dimension."""
    into, out_of = ColwiseParallel(ctx, input_layouts=Shard(1)), RowwiseParallel(ctx, output_layouts=Shard(1))
    plan = {f"*.{name}": into for name in ("query", "key", "value", "up")}
    plan |= {f"*.{name}": out_of for name in ("out", "down")}
    return parallelize_module(model, mesh_of(ctx), plan)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 28)
    batch, sequence, width = (2, 16, 64) if ctx.is_interpreted() else (2, 1024, 2048)
    torch.manual_seed(0)  # the same on every rank
    whole = nn.Sequential(Block(width), Block(width)).to(ctx.get_device())
    x = torch.randn(batch, sequence, width, device=ctx.get_device())

    model = cut(copy.deepcopy(whole), ctx)

    whole(x).square().mean().backward()
    output = model(x.chunk(world_size, 1)[rank])
    (output.square().sum() / x.numel()).backward()
    errors = []
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        error = ((one.grad.full_tensor() - other.grad).norm() / other.grad.norm()).item()
        assert error < TOLERANCE, f"gradient of {name}, rank {rank}: relative error {error}"
        errors.append(error)
    ctx.close()
    return f"rank {rank}: {len(errors)} gradients, largest relative error {max(errors):.1e}"


if __name__ == "__main__":
    run(body, command_line(__doc__).parse_args())
