"""The context: a rank's view of the symmetric heap and of the other ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from .backends.base import Stream
from .backends.select import choose_backend, ranks_on_one_device
from .collectives.barrier_kernel import barrier_kernel
from .heap.heap import SymmetricHeap
from .heap.tensor_factories import Device, TensorFactories
from .interpreter.grid import polls_bounded
from .rendezvous import rank_info
from .rendezvous.process_group import make_process_group
from .utils.settings import is_whole, switch_in
from .utils.torch_modes import plain_tensors
from .watchdog.recovery import Meeting
from .watchdog.watchdog import Watchdog


class Context(TensorFactories, Meeting):
    """One rank's handle on the heap, its peers, and what they do together. Make it with `iris_core.iris`.

    When a wait has failed on any rank, or a rank did not come to something collective, whatever could give wrong data
    raises the same error on every rank, until all have called `reset`.

    A context is of the process that opened it. In one forked from that, such as a DataLoader's worker, its tensors may
    be read and written, to leave or close it does nothing, and all else raises RuntimeError.

    Attributes:
        heap: the symmetric heap.
        watchdog: bounds every wait of this rank's kernels.
        group: the ranks, outside kernels.
        operators: operators made for this context, by whoever made them; they end with it.
        timeout_s: limit of a wait in a kernel, in seconds; the host waits twice as long for a rank; 0 for none.
        ranks_on_device: how many ranks take turns on the GPU that has the most: 1, unless ``IRIS_RANKS_PER_GPU`` allows
            more.
        debug: whether calls that must be the same on all ranks are compared (``IRIS_DEBUG=1``).
    """

    def __init__(
        self,
        heap_size: int,
        device: str,
        timeout_s: float,
        process_group: dist.ProcessGroup | None,
        open_contexts: dict[int, Context],
    ) -> None:
        self._rank_info = rank_info.find_rank_info(process_group)
        self._handled = sys.exc_info()[1]  # in the face of what the caller makes the context, if of anything
        self.debug = switch_in("IRIS_DEBUG")
        self.operators: dict[Any, Any] = {}
        self._process_group: dist.ProcessGroup | None = None
        self._leave_group: Callable[[bool], None] = lambda is_failing: None
        self.timeout_s = timeout_s
        self.control_plane = rank_info.connect(self._rank_info, timeout_s)
        with contextlib.ExitStack() as opened:
            opened.callback(self.control_plane.close)
            with plain_tensors():
                self._open(heap_size, device, opened)
            self._opened = opened.pop_all()
        open_contexts[self.get_rank()] = self
        self._opened.callback(open_contexts.pop, self.get_rank(), None)

    def _open(self, heap_size: int, device: str, opened: contextlib.ExitStack) -> None:
        with self.control_plane.collective_section("choose a device"):
            self.backend = choose_backend(device, self._rank_info)
            opened.callback(self.backend.close_window)
            ranks_per_gpu = rank_info.ranks_per_gpu()
        self.ranks_on_device = ranks_on_one_device(self.control_plane, self.backend, ranks_per_gpu)
        asked = {
            "heap_size": heap_size,
            "device": self.backend.name,
            "timeout_s": self.timeout_s,
            "IRIS_DEBUG": self.debug,
            "IRIS_RANKS_PER_GPU": ranks_per_gpu,
        }
        self.control_plane.agree("what the ranks ask of their context", asked)
        self.heap = SymmetricHeap(self.control_plane, self.backend, heap_size)
        self.watchdog = Watchdog(self.control_plane, self.heap, self.backend, timeout_s=self.timeout_s)
        opened.enter_context(polls_bounded(self.watchdog))
        self._barrier_state = self.zeros(self.get_num_ranks() + 1, dtype=torch.int64)
        self.watchdog.watch(self._barrier_state, lambda peer, _: f"rank {peer} at a device barrier")
        self.barrier()

    # Who and where ---------------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        """Return this rank's number."""
        return self.control_plane.rank

    def get_num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.control_plane.world_size

    def get_device(self) -> torch.device:
        """Return the device the heap is on."""
        return self.backend.device

    def get_cu_count(self) -> int:
        """Return the number of SMs (compute units on AMD); without a GPU, the number of programs to emulate."""
        return self.backend.compute_units()

    def get_arch(self) -> str:
        """Return what kernels are compiled for: "sm_90", "gfx942", …, or "cpu" where they are interpreted."""
        return self.backend.arch()

    def get_heap_bases(self) -> torch.Tensor:
        """Return the address of every rank's heap as this rank sees it, uint64 of (world_size,), for the device API."""
        self._check_open()
        return self.heap.bases

    def get_watchdog(self) -> torch.Tensor:
        """Return the words that `wait` and `barrier` of the device API take as `watchdog_ptr`.

        Raises:
            TimeoutError, PeerError: see `check`.
        """
        self.check()
        return self.watchdog.words

    def is_interpreted(self) -> bool:
        """Return whether kernels run in Triton's interpreter, as they do without a GPU."""
        return self.backend.name == "shm"

    # Memory ----------------------------------------------------------------------------------------------------

    def free(self, buffer: torch.Tensor) -> None:
        """Give a buffer back to the heap; collective, like allocation. Its memory may be handed out again at once.

        Raises:
            ValueError: it is not on the heap, does not start where a buffer starts, was freed before (though another
                buffer has its place), or is part of a `peer_view`.
            TimeoutError, PeerError: see `check`.
        """
        self.check()
        self.watchdog.unwatch(buffer, self.heap.free(buffer))

    def peer_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' copies of a heap tensor as one strided tensor, shape ``(world_size, *tensor.shape)``.

        Reading and writing through it is unordered with the peers' own accesses: put a barrier between.

        Raises:
            ValueError: the tensor is not on the heap.
        """
        self._check_open()
        return self.heap.peer_view(tensor)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, device: Device) -> torch.Tensor:
        if device is not None and not _same_device(torch.device(device), self.get_device()):
            raise ValueError(f"device {str(device)!r} is not the heap's; it is on {str(self.get_device())!r}")
        self.check()
        return self.heap.allocate(shape, dtype)

    # Together --------------------------------------------------------------------------------------------------

    def device_barrier(self) -> None:
        """Queue a barrier of all ranks on the current stream; the host does not wait.

        Raises:
            TimeoutError, PeerError: see `check`.
        """
        barrier_kernel[(1,)](
            self._barrier_state,
            self.get_rank(),
            self.get_num_ranks(),
            self.get_heap_bases(),
            self.get_watchdog(),
            num_warps=1,
        )

    def broadcast(self, value: Any, source_rank: int) -> Any:
        """Return `source_rank`'s value on every rank; collective.

        Args:
            value: a tensor of any shape, dtype and device of the source (others may pass None), or anything JSON holds.
            source_rank: the rank whose value is taken.

        Returns:
            A new tensor on the context's device, not on the heap; or the value.

        Raises:
            ValueError: there is no such rank; or the tensor is none that copies element by element, such as a sparse
                one; on every rank.
        """
        if not is_whole(source_rank, 0) or source_rank >= self.get_num_ranks():
            raise ValueError(f"source_rank {source_rank!r} is not one of the {self.get_num_ranks()} ranks")
        self.check()
        is_source = self.get_rank() == source_rank
        is_tensor = is_source and isinstance(value, torch.Tensor)
        with self.collective_section("broadcast a tensor"):
            if is_tensor and (value.layout is not torch.strided or value.is_quantized or value.is_meta):
                raise ValueError(
                    f"a tensor of layout {value.layout} and dtype {value.dtype} on {value.device} cannot be broadcast; "
                    "a dense one can, such as its to_dense()"
                )
        said = [list(value.shape), str(value.dtype).removeprefix("torch.")] if is_tensor else value
        with self.raising_root_cause():
            is_tensor, said = self.control_plane.broadcast([is_tensor, said], source_rank)
        if not is_tensor:
            return said
        shape, dtype = said[0], getattr(torch, said[1])
        staging = self.empty(shape, dtype=dtype)
        if is_source:
            staging.copy_(value.detach())
        self.barrier()
        result = self.peer_view(staging)[source_rank].clone()
        self.barrier()
        self.free(staging)
        return result

    def make_stream(self) -> Stream:
        """Return a queue of work beside the current stream, of high priority."""
        self._check_open()
        return self.backend.make_stream(self.timeout_s, self.watchdog.stream_timed_out)

    def process_group(self) -> dist.ProcessGroup:
        """Return torch's process group of the same ranks: NCCL, RCCL, or gloo without a GPU. Made at the first call.

        It is the one that the context was made of, or torch's default one, if its backend for the context's device is
        right; else a new one, which ends with the context. A new one's collectives wait for a rank as long as the host
        does, twice `timeout_s`.
        Where torch.distributed is not initialised this does it: whoever wants to do so himself must come first.

        Raises:
            RuntimeError: ranks share a GPU, which NCCL and RCCL do not take; or one process, under the race checker.
            PeerError: a rank did not come to its making within the limit.
        """
        self._check_open()
        if self._rank_info.node is not None:
            raise RuntimeError("the race checker's ranks are one process; torch's process groups are of several")
        if self.ranks_on_device > 1:
            raise RuntimeError(
                f"up to {self.ranks_on_device} ranks share a GPU (IRIS_RANKS_PER_GPU); NCCL and RCCL take one rank each"
            )
        if self._process_group is None:
            device = None if self.is_interpreted() else self.get_device()
            with self.raising_root_cause():
                self._process_group, self._leave_group = make_process_group(
                    self.control_plane, device, self._rank_info.group
                )
        return self._process_group

    def release_operators(self) -> None:
        """Close the operators that calls with operands alone have made, and give their memory back; collective.

        Their outputs must not be used after this. The next such call makes its operator again.

        Raises:
            TimeoutError, PeerError: see `check`.
        """
        self.check()
        while self.operators:
            self.operators.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(is_failing=kind is not None)

    def close(self) -> None:
        """Leave: release the heap. Its tensors must not be used after this. Collective, unless `check` raises.

        What else is asked of a closed context raises RuntimeError; to close it again does nothing. While an exception
        is on its way that was not when the context was made, as in a ``finally`` or at the end of ``with
        iris_core.iris() as ctx:``, nobody is waited for: the peers hear that this rank has left.

        Raises:
            What `barrier` raises, if a rank fails at this, and TimeoutError, if a CUDA graph holds collectives of the
            process group that was made here; the heap is released all the same.
        """
        error = sys.exc_info()[1]
        self._close(is_failing=error is not None and error is not self._handled)

    def _close(self, *, is_failing: bool) -> None:
        if self.is_closed or not self.control_plane.is_owned:
            return
        self._handled = None  # whose traceback holds what its callers had
        with self._opened:
            self._opened.callback(lambda: self._leave_group(is_failing))
            try:
                if self.watchdog.failure is None and self.control_plane.failure is None and not is_failing:
                    self.barrier()
                else:
                    self.watchdog.abort()
            except BaseException:
                is_failing = True
                raise
            finally:
                self.is_closed = True


def _same_device(asked: torch.device, own: torch.device) -> bool:
    return asked.type == own.type and asked.index in (None, own.index)
