"""The roles of a warp-specialised kernel's warps, and their registers.

Every program is 8 warps that multiply and one that loads and communicates; some kernels have two more of these. The 8
multiply a tile together; or, with PINGPONG, each of the two warp groups has a tile of its own, and they multiply in
turns (tile_loop.py). All programs are resident, one an SM. None waits for another of its rank, but for those that split
its last tiles, if any (fixup.py).

A kernel that is all a call queues is launched early: its programs take SMs that the kernel before has left, make their
barriers, and touch no global memory before that one is done. The kernel after may start when all programs have asked
for their last operands. Beside copy engines it is not, as its side streams need a free SM.
"""

from __future__ import annotations

from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

# Of a thread that loads and communicates; those that multiply have the rest. With 56 the handshake of 8 ranks spills.
LOADER_REGISTERS = gl.constexpr(72)
# Of a thread of the first warp group with PINGPONG; those of the second have what is left, more or as many.
MULTIPLY_REGISTERS = gl.constexpr(208)
GROUP_WARPS = gl.constexpr(4)


@constexpr_function
def first_role(pingpong):
    """Return the index of a kernel's first role: the second warp group's, which is listed first, may be left out."""
    return 0 if pingpong else 1


@constexpr_function
def worker_warps(comm_warps, pingpong):
    """Return the warps of each role but the first that is listed; `comm_warps` of them load and communicate."""
    return [GROUP_WARPS.value] * pingpong + [1] * comm_warps


@constexpr_function
def worker_registers(comm_warps, pingpong):
    """Return the registers of a thread of the same roles."""
    return [MULTIPLY_REGISTERS.value] * pingpong + [LOADER_REGISTERS.value] * comm_warps
