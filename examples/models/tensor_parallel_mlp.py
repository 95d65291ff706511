"""Two layers sharded over all ranks, as in Megatron's sequence parallelism, trained: as without ranks.

The first layer's weights are cut by columns, the second's by rows, the tokens by rows. So the way in is an all-gather
and a GEMM, the way out a GEMM and a reduce-scatter; and backwards each is the other.

- python examples/models/tensor_parallel_mlp.py --ranks 4
- torchrun --nproc-per-node 4 examples/models/tensor_parallel_mlp.py
"""

import torch
from _command_line import command_line, run

import iris_core
from iris_tensor_parallel import ColumnParallelLinear, RowParallelLinear

STEPS = 3
TOLERANCE = 2e-2  # relative, over all elements of a parameter's change; products are rounded to bf16 at every layer


def cut_of(ctx, up, down):
    """Return two layers as those of this rank, which has a part of the tokens before and after them."""
    return torch.nn.Sequential(
        ColumnParallelLinear.from_linear(ctx, up, sequence_parallel=True),
        torch.nn.GELU(),
        RowParallelLinear.from_linear(ctx, down, sequence_parallel=True),
    )


def train(model, x, target, elements):
    """Take some steps on fp32 parameters, multiplied as bf16; return by how much each parameter has changed.

    The loss is the mean over so many elements of the target, those of all ranks.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=6.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16):
            output = model(x)
        loss = (output.float() - target).square().sum() / elements
        loss.backward()
        optimizer.step()
    return [parameter.detach() - one for parameter, one in zip(model.parameters(), before, strict=True)]


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 28)
    tokens, width, features = (64, 48, 96) if ctx.is_interpreted() else (4096, 4096, 16384)
    torch.manual_seed(0)  # the same on every rank
    up = torch.nn.Linear(width, features, device=ctx.get_device())
    down = torch.nn.Linear(features, width, device=ctx.get_device())
    x, target = (torch.randn(tokens, width, device=ctx.get_device()) for _ in range(2))

    cut = cut_of(ctx, up, down)
    found = train(cut, x.chunk(world_size)[rank], target.chunk(world_size)[rank], target.numel())
    whole = torch.nn.Sequential(up, torch.nn.GELU(), down)
    expected = train(whole, x, target, target.numel())
    parts = [cut[0].sharding.own_weight, cut[0].sharding.own_bias, cut[2].sharding.own_weight, cut[2].sharding.own_bias]
    errors = []
    for one, other, part in zip(found, expected, parts, strict=True):
        error = (one - part(other)).norm() / part(other).norm()
        assert error < TOLERANCE, f"rank {rank}: relative error {error}"
        errors.append(error.item())
    ctx.close()
    return f"rank {rank}: {STEPS} steps, changes of the parameters with relative errors up to {max(errors):.1e}"


if __name__ == "__main__":
    run(body, command_line(__doc__).parse_args())
