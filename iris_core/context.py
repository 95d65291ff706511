"""The context: a rank's view of the symmetric heap and of the other ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import bootstrap, interpreter
from .allocator import first_difference
from .backends import make_backend
from .backends.base import Backend, Stream
from .creation import Device, HeapTensors
from .errors import AllocationMismatch
from .heap import SymmetricHeap
from .kernels import barrier_kernel
from .watchdog import Watchdog

DEFAULT_HEAP_SIZE = 1 << 30

_of_process: dict[int, Context] = {}  # this process's context, by rank; a simulated host keeps its ranks' own


class Context(HeapTensors):
    """One rank's handle on the heap, its peers, and what they do together. Make it with `iris_core.iris`.

    Attributes:
        heap: the symmetric heap.
        watchdog: bounds every wait of this rank's kernels.
        group: the ranks, outside kernels.
        operators: operators made for this context, by whoever made them; they end with it.
        debug: whether calls that must be the same on all ranks are compared (``IRIS_DEBUG=1``).
    """

    def __init__(self, heap_size: int, device: str) -> None:
        self._origin = bootstrap.find_origin()
        self.debug = os.environ.get("IRIS_DEBUG", "0") not in ("", "0")
        self.operators: dict[Any, Any] = {}
        self._process_group: dist.ProcessGroup | None = None
        self._owns_distributed = False
        self.group = bootstrap.connect(self._origin)
        try:
            self._open(heap_size, device)
        except BaseException:
            self.group.close()
            raise

    def _open(self, heap_size: int, device: str) -> None:
        with self.group.together("choose a device"):
            self.backend = _make_backend(device, self._origin)
        self._check_devices_differ()
        self.heap = SymmetricHeap(self.group, self.backend, heap_size)
        self.watchdog = Watchdog(
            self.heap, self.backend, rank=self.get_rank(), timeout_s=0.0 if self._origin.node else bootstrap.timeout_s()
        )
        self._barrier_state = self.zeros(self.get_num_ranks() + 1, dtype=torch.int64)
        self.watchdog.watch(self._barrier_state, lambda peer: f"rank {peer} at a device barrier")
        self.barrier()

    # Who and where ---------------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        """Return this rank's number."""
        return self.group.rank

    def get_num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.group.world_size

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
        return self.heap.bases

    def get_watchdog(self) -> torch.Tensor:
        """Return the words that `wait` and `barrier` of the device API take as `watchdog_ptr`."""
        return self.watchdog.words

    def is_interpreted(self) -> bool:
        """Return whether kernels run in Triton's interpreter, as they do without a GPU."""
        return self.backend.name == "shm"

    # Memory ----------------------------------------------------------------------------------------------------

    def free(self, buffer: torch.Tensor) -> None:
        """Give a buffer back to the heap; collective, like allocation. Its memory may be handed out again at once.

        Raises:
            ValueError: it is not on the heap, is only part of a buffer, or was freed before.
        """
        self.heap.free(buffer)

    def peer_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' copies of a heap tensor as one strided tensor, shape ``(world_size, *tensor.shape)``.

        Reading and writing through it is unordered with the peers' own accesses: put a barrier between.

        Raises:
            ValueError: the tensor is not on the heap.
        """
        return self.heap.peer_view(tensor)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, device: Device) -> torch.Tensor:
        if device is not None and not _same_device(torch.device(device), self.get_device()):
            raise ValueError(f"device {str(device)!r} is not the heap's; it is on {str(self.get_device())!r}")
        return self.heap.allocate(shape, dtype)

    # Together --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for this rank's device, then for all ranks.

        Raises:
            TimeoutError: a wait in one of this rank's kernels passed its limit.
            AllocationMismatch: the ranks allocated or freed in different orders; names the first difference.
            PeerError: a rank died, or raised one of the above.
        """
        with self.group.together("reach the barrier"):
            self.backend.synchronize()
            self.watchdog.check()
        self._compare_allocations()

    def device_barrier(self) -> None:
        """Queue a barrier of all ranks on the current stream; the host does not wait."""
        self.watchdog.check()
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
            ValueError: there is no such rank.
        """
        if not 0 <= source_rank < self.get_num_ranks():
            raise ValueError(f"source_rank {source_rank} is not one of the {self.get_num_ranks()} ranks")
        is_source = self.get_rank() == source_rank
        is_tensor = is_source and isinstance(value, torch.Tensor)
        said = [list(value.shape), str(value.dtype).removeprefix("torch.")] if is_tensor else value
        is_tensor, said = self.group.broadcast([is_tensor, said], source_rank)
        if not is_tensor:
            return said
        shape, dtype = said[0], getattr(torch, said[1])
        staging = self.empty(shape, dtype=dtype)
        if is_source:
            staging.copy_(value)
        self.barrier()
        result = self.peer_view(staging)[source_rank].clone()
        self.barrier()
        self.free(staging)
        return result

    def agree(self, what: str, value: Any) -> None:
        """Raise on every rank unless all ranks give the same value (anything JSON holds); collective.

        Raises:
            ValueError: the values differ; names every rank's.
        """
        values = self.group.all_gather(value)
        if any(other != values[0] for other in values):
            listed = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            raise ValueError(f"{what} must be the same on all ranks: {listed}")

    def make_stream(self) -> Stream:
        """Return a queue of work beside the current stream, of high priority."""
        return self.backend.make_stream()

    def process_group(self) -> dist.ProcessGroup:
        """Return torch's process group of the same ranks: NCCL, RCCL, or gloo without a GPU. Made at the first call."""
        if self._process_group is None:
            self._process_group = self._make_process_group()
        return self._process_group

    def close(self) -> None:
        """Leave: release the heap. Its tensors must not be used after this. Collective."""
        self.barrier()
        if self._owns_distributed:
            dist.destroy_process_group()
        self.backend.close_window()
        self.group.close()
        contexts = self._origin.node.contexts if self._origin.node else _of_process
        contexts.pop(self.get_rank(), None)

    # ------------------------------------------------------------------------------------------------------------

    def _check_devices_differ(self) -> None:
        names = self.group.all_gather(self.backend.identity())
        if all(names) and len(set(names)) < len(names):
            raise ValueError(
                f"world size {self.get_num_ranks()} is larger than the number of GPUs the ranks see "
                f"({len(set(names))}); start at most that many ranks, or use device='cpu'"
            )

    def _compare_allocations(self) -> None:
        allocator = self.heap.allocator
        if len(set(self.group.all_gather(allocator.digest))) > 1:
            difference = first_difference(self.group.all_gather(allocator.history))
            raise AllocationMismatch(
                f"the ranks allocated differently since the last barrier: {difference}; allocation and free are "
                "collective, every rank must make the same calls in the same order"
            )
        allocator.agreed()

    def _make_process_group(self) -> dist.ProcessGroup:
        backend = "gloo" if self.is_interpreted() else "nccl"
        if dist.is_initialized():
            world = dist.group.WORLD
            assert world is not None
            return world if dist.get_backend() == backend else dist.new_group(backend=backend)
        store = None
        if self.get_rank() == 0:
            store = dist.TCPStore("127.0.0.1", 0, self.get_num_ranks(), is_master=True, wait_for_workers=False)
        port = self.group.broadcast(store.port if store else 0, 0)
        store = store or dist.TCPStore("127.0.0.1", port, self.get_num_ranks(), is_master=False)
        device_id = None if self.is_interpreted() else self.get_device()
        dist.init_process_group(
            backend, store=store, rank=self.get_rank(), world_size=self.get_num_ranks(), device_id=device_id
        )
        self._owns_distributed = True
        assert dist.group.WORLD is not None
        return dist.group.WORLD


def iris(heap_size: int = DEFAULT_HEAP_SIZE, device: str = "auto") -> Context:
    """Make this process's context; collective over all ranks.

    The ranks are those of whatever started the process: `iris_core.launch`, an initialised ``torch.distributed``,
    ``torchrun``, ``mpirun``; alone, a world of one.

    Args:
        heap_size: bytes of symmetric heap a rank.
        device: "cuda" (NVIDIA or AMD GPUs), "cpu" (shared memory, kernels interpreted), or "auto": the GPUs if there
            are any and Triton is not told to interpret.

    Returns:
        The context. `Context.close` ends it; a process has one at a time.

    Raises:
        RuntimeError: this process has a context already, or the machine lacks what the device needs.
        ValueError: the device or the heap size makes no sense, or there are more ranks than GPUs.
        PeerError: a rank did not start.
    """
    node = bootstrap.simulated_host()
    if _of_process if node is None else node.rank in node.contexts:
        raise RuntimeError("this process has a context already; close() it before making another")
    bootstrap.asked_device(device)
    if not isinstance(heap_size, int) or heap_size <= 0:
        raise ValueError(f"heap_size is {heap_size!r}; it takes a positive number of bytes")
    context = Context(heap_size, device)
    (_of_process if node is None else node.contexts)[context.get_rank()] = context
    return context


def _make_backend(device: str, origin: bootstrap.Origin) -> Backend:
    if origin.node is not None:
        return origin.node.backend(origin.rank)
    return make_backend(*_choose_backend(device, origin))


def _choose_backend(device: str, origin: bootstrap.Origin) -> tuple[str, int]:
    device = bootstrap.asked_device(device)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and not interpreter.is_enabled() else "cpu"
    if device == "cpu":
        interpreter.enable()
        return "shm", 0
    if interpreter.is_enabled():
        raise RuntimeError("device='cuda' with TRITON_INTERPRET=1: interpreted kernels cannot reach a GPU's memory")
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError("device='cuda', but torch sees no GPU here; device='cpu' runs without one")
    return ("hip" if torch.version.hip else "cuda"), origin.local_rank % count


def _same_device(asked: torch.device, own: torch.device) -> bool:
    return asked.type == own.type and asked.index in (None, own.index)
