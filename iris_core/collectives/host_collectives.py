"""Collectives that the host of every rank starts: a barrier on the stream, and a broadcast."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton

from ..device.sync import barrier
from ..heap.heap import SymmetricHeap
from ..rendezvous.control_plane import ControlPlane
from ..utils.settings import is_whole
from ..watchdog.recovery import Recovery
from ..watchdog.watchdog import Watchdog


@triton.jit(do_not_specialize=["rank"])
def barrier_kernel(state_ptr, rank, world_size, heap_bases, watchdog_ptr):
    """Run `sync.barrier` in one program per rank."""
    barrier(state_ptr, rank, world_size, heap_bases, watchdog_ptr)


class HostCollectives:
    """The host-side collectives of a context; making one is collective. `Context` has the same methods.

    Args:
        control_plane: all ranks.
        heap: where the barrier's flags and what is broadcast lie.
        watchdog: of the waits of this rank's kernels.
        recovery: of the context.
    """

    def __init__(
        self, control_plane: ControlPlane, heap: SymmetricHeap, watchdog: Watchdog, recovery: Recovery
    ) -> None:
        self._control_plane = control_plane
        self._heap = heap
        self._watchdog = watchdog
        self._recovery = recovery
        self._barrier_state = heap.allocate((control_plane.world_size + 1,), torch.int64).zero_()
        watchdog.watch(self._barrier_state, lambda peer, _: f"rank {peer} at a device barrier")

    def device_barrier(self) -> None:
        """Queue a barrier of all ranks on the current stream; the host does not wait."""
        self._recovery.check()
        rank, world_size = self._control_plane.rank, self._control_plane.world_size
        barrier_kernel[(1,)](self._barrier_state, rank, world_size, self._heap.bases, self._watchdog.words, num_warps=1)

    def broadcast(self, value: Any, src: int) -> Any:
        """Return `src`'s value on every rank."""
        world_size = self._control_plane.world_size
        if not is_whole(src, 0) or src >= world_size:
            raise ValueError(f"src {src!r} is not one of the {world_size} ranks")
        self._recovery.check()
        is_source = self._control_plane.rank == src
        is_array = is_source and isinstance(value, np.ndarray)
        with self._recovery.collective_section("broadcast a tensor"):
            if is_array:
                value = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
            elif isinstance(value, np.generic):
                value = value.item()
            is_tensor = is_source and isinstance(value, torch.Tensor)
            if is_tensor and (value.layout is not torch.strided or value.is_quantized or value.is_meta):
                raise ValueError(
                    f"a tensor of layout {value.layout} and dtype {value.dtype} on {value.device} cannot be broadcast; "
                    "a dense one can, such as its to_dense()"
                )
        header = [list(value.shape), str(value.dtype).removeprefix("torch.")] if is_tensor else value
        with self._recovery.raising_root_cause():
            is_tensor, is_array, header = self._control_plane.broadcast([is_tensor, is_array, header], src)
        if not is_tensor:
            return header
        staging = self._heap.allocate(header[0], getattr(torch, header[1]))
        if is_source:
            staging.copy_(value.detach())
        self._recovery.barrier()
        result = self._heap.peer_view(staging)[src].clone()
        self._recovery.barrier()
        self._recovery.check()
        self._heap.free(staging)
        return result.cpu().numpy() if is_array else result
