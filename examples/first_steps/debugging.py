"""What helps to debug a kernel of several ranks: values printed with their rank, and two traps without an error.

| trap | here |
|---|---|
| `tl.arange` takes powers of two, world sizes are what they are | a block of the next power of two, and a mask |
| values of several ranks, printed side by side, look alike | the rank is printed, too |

- python examples/first_steps/debugging.py --ranks 3
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run
from triton.language.extra import libdevice

import iris_core


@triton.jit(do_not_specialize=["rank"])
def gather_kernel(value, gathered, rank, heap_bases, WORLD_SIZE: tl.constexpr, DEBUG: tl.constexpr):
    """Gather tanh of one value of every rank."""
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    is_peer = peers < WORLD_SIZE
    found = iris_core.load(value + peers * 0, rank, tl.minimum(peers, WORLD_SIZE - 1), heap_bases, mask=is_peer)
    if DEBUG:
        tl.device_print("rank, values:", rank, found)
    tl.store(gathered + peers, libdevice.tanh(found), mask=is_peer)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    value = ctx.full((1,), 0.25 * rank, dtype=torch.float32)
    gathered = torch.empty(world_size, device=ctx.get_device())
    ctx.barrier()  # every rank has its value
    gather_kernel[(1,)](value, gathered, rank, ctx.get_heap_bases(), world_size, DEBUG=True)
    expected = torch.tanh(0.25 * torch.arange(world_size, device=ctx.get_device()))
    torch.testing.assert_close(gathered, expected)
    ctx.barrier()  # every rank's kernel has ended
    ctx.close()


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=3).parse_args())
