"""A gated block sharded over all ranks whose layers multiply in fp8: inference with quantised weights, and training.

Weights are quantised once, over a scale an output feature; tokens in every call, over a scale each, before they are
gathered. In training weights keep their dtype, and are quantised in every call, too.

- python examples/models/float8_layers.py --ranks 4
- torchrun --nproc-per-node 4 examples/models/float8_layers.py
"""

import torch
from _command_line import command_line, run

import iris_core
from iris_tensor_parallel import Float8, MergedColumnParallelLinear, RowParallelLinear

TOLERANCE = 0.1  # relative, over all elements: operands have 4 bits, and errors of two layers add up
OF_GRADIENTS = 0.2  # gradients of outputs have 3


def block(ctx, layers, training=False):
    """Return gate and up as one layer, and down, cut for this rank."""
    gate, up, down = layers
    options = {"sequence_parallel": True, "quantize": Float8(training=training)}
    gate_and_up = MergedColumnParallelLinear.from_linears(ctx, [gate, up], activation="swiglu", **options)
    return torch.nn.Sequential(gate_and_up, RowParallelLinear.from_linear(ctx, down, **options))


def error(found, expected):
    """Return the relative error over all elements."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 28)
    tokens, width, features = (32, 64, 128) if ctx.is_interpreted() else (4096, 4096, 14336)
    torch.manual_seed(0)  # the same on every rank
    with ctx.get_device():
        sizes = ((width, features), (width, features), (features, width))
        layers = [torch.nn.Linear(*size, bias=False, dtype=torch.bfloat16) for size in sizes]
        x = torch.randn(tokens, width, dtype=torch.bfloat16).requires_grad_()
    gate, up, down = layers
    whole = down(torch.nn.functional.silu(gate(x)) * up(x))
    whole.float().square().sum().backward()
    own, expected, of_x = (one.chunk(world_size)[rank].detach() for one in (x, whole, x.grad))

    with torch.no_grad():
        inferred = error(block(ctx, layers)(own), expected)

    leaf = own.clone().requires_grad_()
    output = block(ctx, layers, training=True)(leaf)
    output.float().square().sum().backward()
    trained, gradient = error(output, expected), error(leaf.grad, of_x)

    assert max(inferred, trained) < TOLERANCE, f"rank {rank}: relative errors {inferred}, {trained}"
    assert gradient < OF_GRADIENTS, f"rank {rank}: relative error of a gradient {gradient}"
    ctx.close()
    return f"rank {rank}: relative errors {inferred:.1e} in inference, {trained:.1e} and {gradient:.1e} in training"


if __name__ == "__main__":
    run(body, command_line(__doc__).parse_args())
