"""Four processes, two contexts of two ranks, which are the ranks of a mesh's second dimension; then several at once.

They are forks of one process, which imports for all of them. Its argument is the port at which they meet.
"""

import gc
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import iris_core
from iris_kernels.gemm_all_reduce import gemm_all_reduce
from iris_tensor_parallel.styles import mesh_of

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1], "WORLD_SIZE": "4"}
gc.freeze()  # forks would look through all that is imported as they end
for number in range(4):
    if os.fork() == 0:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        break
else:
    statuses = [os.wait()[1] for _ in range(4)]
    sys.exit(any(statuses))
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
number, replica = dist.get_rank(), mesh["dp"].get_local_rank()
groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
with pytest.raises(ValueError, match="none of the given group's"):
    iris_core.iris(1 << 20, device="cpu", group=groups[1 - replica])
for _ in range(2):
    with iris_core.iris(1 << 20, device="cpu", group=mesh["tp"].get_group()) as ctx:
        assert ctx.get_num_ranks() == 2
        assert ctx.process_group() is mesh["tp"].get_group()
        assert mesh_of(ctx).mesh.tolist() == [2 * replica, 2 * replica + 1]
        a, b = torch.full((4, 3), float(replica + 1)), torch.ones(3, 5)
        for variant in ("library", "workgroup_specialized:portable"):
            total = gemm_all_reduce(ctx, a, b, variant=variant)
            assert (total == 6 * (replica + 1)).all(), total
        line = f"process {number}: rank {ctx.get_rank()} of {ctx.get_num_ranks()}, sums of replica {replica}\n"
contexts = [iris_core.iris(1 << 20, device="cpu", group=group) for group in (dist.group.WORLD, mesh["dp"].get_group())]
with pytest.raises(RuntimeError, match=r"has a context already.*group="):
    iris_core.iris(1 << 20, device="cpu")
for _ in range(2):  # two at once: one of all ranks, one of this rank and its peer in the other replica
    for ctx, members in zip(contexts, (range(4), (number % 2, number % 2 + 2)), strict=True):
        total = gemm_all_reduce(ctx, torch.full((4, 3), float(number)), b, variant="workgroup_specialized:portable")
        assert (total == 3 * sum(members)).all(), total
contexts[0].close()
assert (gemm_all_reduce(contexts[1], torch.ones(4, 3), b) == 6).all()
contexts[1].close()
dist.barrier()  # the user's own groups are still there
dist.destroy_process_group()
sys.stdout.write(line)
