"""Two sharded layers on ranks of several hosts, of which this machine acts as two: forwards and backwards, as without.

A program for several hosts looks as one for a single host does: it is started on each of them, by torchrun.

- python examples/models/two_hosts.py --ranks 4
- torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST examples/models/two_hosts.py
"""

import os

import torch
from _command_line import command_line

import iris_core
from iris_tensor_parallel import ColumnParallelLinear, RowParallelLinear

TOLERANCE = 2e-2  # relative, over all elements; products are rounded to bf16 at every layer


def body(rank, world_size):
    with iris_core.iris(heap_size=1 << 28) as ctx:  # finds that its ranks live on several hosts
        device = ctx.get_device()
        tokens, width, features = (64, 48, 96) if ctx.is_interpreted() else (4096, 4096, 16384)
        torch.manual_seed(0)  # the same on every rank
        up, down = torch.nn.Linear(width, features).to(device), torch.nn.Linear(features, width).to(device)
        x = torch.randn(tokens, width, device=device)
        mlp = torch.nn.Sequential(
            ColumnParallelLinear.from_linear(ctx, up, sequence_parallel=True),
            torch.nn.GELU(),
            RowParallelLinear.from_linear(ctx, down, sequence_parallel=True),
        )
        whole = torch.nn.Sequential(up, torch.nn.GELU(), down)
        own = x.chunk(world_size)[rank].clone().requires_grad_()
        every = x.clone().requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            y, expected = mlp(own), whole(every)
        y.float().square().sum().backward()
        expected.float().square().sum().backward()
        errors = []
        for found, reference in ((y, expected), (own.grad, every.grad)):
            part = reference.chunk(world_size)[rank]
            errors.append(((found - part).norm() / part.norm()).item())
        assert max(errors) < TOLERANCE, f"rank {rank}: relative errors {errors}"
        return f"rank {rank} on host {ctx.topology.host_of(rank)}: relative errors up to {max(errors):.1e}"


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        print(body(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
    else:
        arguments = command_line(__doc__).parse_args()
        print(*iris_core.launch(body, arguments.ranks, arguments.device, hosts=2), sep="\n")
