"""A benchmark of your own: all-gather, over sizes and dtypes.

- python examples/first_steps/benchmark.py --ranks 2
- python examples/first_steps/benchmark.py --axis_N=pow2:10:24 --skip_dtype=fp32 --benchmark_format=csv
"""

import torch

from iris_core import bench


@bench.register
@bench.axis("N", bench.power_of_two(8, 10))
@bench.axis("dtype", [torch.bfloat16, torch.float32])
def all_gather(state, ctx):
    n, dtype = state["N"], state["dtype"]
    world_size = ctx.get_num_ranks()
    shard = torch.full((n,), ctx.get_rank(), dtype=dtype, device=ctx.get_device())
    whole = torch.empty(world_size * n, dtype=dtype, device=ctx.get_device())
    state.set_bytes((world_size - 1) * n * dtype.itemsize)  # that a rank receives
    state.exec(lambda: ctx.ccl.all_gather(whole, shard))


if __name__ == "__main__":
    bench.main()
