"""The context: a rank's view of the symmetric heap and of the other ranks.

One class, long by its public methods and what they promise; what they do is in its parts.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from ..backends.base import Stream
from ..backends.select import ranks_on_one_device
from ..device.context import encode
from ..device.interpretation import poll_limits
from ..heap.heap import SymmetricHeap
from ..heap.tensor_factories import Device, TensorFactories
from ..rendezvous.control_plane import ControlPlane
from ..rendezvous.rank_info import RankInfo
from ..utils import settings
from ..utils.profiler_ranges import profiler_range
from ..utils.rank_logging import DEBUG, ERROR, INFO, WARNING, log
from ..utils.torch_modes import plain_tensors
from ..watchdog.recovery import Recovery
from ..watchdog.watchdog import Watchdog
from .host import Host, ProcessGroup, TorchGroup
from .options import ContextOptions

_contexts: weakref.WeakValueDictionary[str, Context] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def context_named(name: str) -> Context:
    """Return this process's context of a name, by which torch ops, and so graphs of `torch.compile`, know it.

    Raises:
        RuntimeError: there is none, or it was closed.
    """
    ctx = _contexts.get(name)
    if ctx is None:
        raise RuntimeError(f"no context of this process is named {name!r}: it was closed, or another process made it")
    return ctx


class Context(TensorFactories):
    """One rank's handle on the heap, its peers, and what they do together. Make it with `iris_core.iris`.

    When a wait has failed on any rank, or a rank did not come to something collective, whatever could give wrong data
    raises the same error on every rank, until all have called `reset`: `check` names these errors, which all methods
    raise beside their own that use the heap, the other ranks or operators.

    A context is of the process that opened it. In one forked from that, such as a DataLoader's worker, its tensors may
    be read and written, to leave or close it does nothing, and all else raises RuntimeError.

    Attributes:
        name: which torch ops know it by.
        control_plane: the ranks, outside kernels.
        backend: the kind of memory, and the device.
        heap: the symmetric heap.
        watchdog: bounds every wait of this rank's kernels.
        recovery: what fails on all ranks at once, and its reset.
        collectives: what the hosts of all ranks start together.
        ccl: collectives on whole tensors.
        tracing: events that kernels record by their context object.
        operators: operators made for this context, by key; they end with it.
        kept: what packages that use the context have found out in it, each under a class or function of its own as the
            key; it ends with the context, and can be found out again.
        timeout_s: limit of a wait in a kernel, in seconds; the host waits twice as long for a rank; 0 for none.
        reserve_sms: SMs that its kernels leave free.
        provider: the name of what the heap's memory is from; None for the driver.
        ranks_on_device: how many ranks take turns on the GPU that has the most: 1, unless ``IRIS_RANKS_PER_GPU`` allows
            more.
        profiler_range: what names calls in a profiler's timeline (``IRIS_PROFILER_RANGES=1``), or None.
        debug_mode: whether calls that must be the same on all ranks are compared (``IRIS_DEBUG=1``).
    """

    def __init__(self, host: Host, rank_info: RankInfo, options: ContextOptions) -> None:
        self._host = host
        self._rank_info = rank_info
        # With the rank: sizes in a graph are a rank's own, and ranks share torch's caches of compiled graphs.
        self.name = f"iris:{next(_numbers)}:{self._rank_info.rank}/{self._rank_info.world_size}"
        _contexts[self.name] = self
        self._handled = sys.exc_info()[1]  # in the face of what the caller makes the context, if of anything
        self.operators: dict[Any, Any] = {}
        self.kept: dict[Any, Any] = {}
        self.debug_mode, self.timeout_s = options.debug_mode, options.timeout_s
        self.reserve_sms, self.provider = options.reserve_sms, options.provider_name
        self.torch_group = TorchGroup(self._make_process_group)
        self.control_plane = self._connect()
        with contextlib.ExitStack() as opened:
            opened.callback(self.control_plane.close)
            with plain_tensors():
                self._open(options, opened)
            opened.callback(host.occupy(self))
            self._opened = opened.pop_all()

    def _connect(self) -> ControlPlane:
        return self._host.connect(self._rank_info, self.timeout_s)

    def _open(self, options: ContextOptions, opened: contextlib.ExitStack) -> None:
        from ..collectives.ccl import CCL  # which are no part of the core
        from ..collectives.host_collectives import HostCollectives
        from ..tracing.of_context import ContextTracing

        with self.control_plane.collective_section("choose a device"):
            self.backend = self._host.backend(self._rank_info, options.device)
            opened.callback(self.backend.close_window)
            own_memory, ranks_per_gpu = options.own_memory(self.backend), settings.ranks_per_gpu()
            options.check_reserved(self.backend)
        self.profiler_range = profiler_range(on_gpu=not self.is_interpreted())
        self.ranks_on_device = ranks_on_one_device(self.control_plane, self.backend, ranks_per_gpu)
        options.agree(self.control_plane, device=self.backend.name, IRIS_RANKS_PER_GPU=ranks_per_gpu)
        self.heap = SymmetricHeap(self.control_plane, self.backend, options.heap_size, own_memory)
        self.watchdog = Watchdog(self.control_plane, self.heap, self.backend, timeout_s=self.timeout_s)
        poll_limits.append(self.watchdog)
        opened.callback(poll_limits.remove, self.watchdog)
        self._device_context = encode(self.get_rank(), self.heap.bases, self.watchdog.words.data_ptr())
        self.recovery = Recovery(self.control_plane, self.backend, self.heap, self.watchdog)
        self.collectives = HostCollectives(self.control_plane, self.heap, self.watchdog, self.recovery)
        self.ccl = CCL(self)
        self.tracing = ContextTracing(self, self._device_context)
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

    def get_device_id(self) -> int:
        """Return the number of this rank's GPU on its host, as torch counts; 0 without a GPU."""
        return self.get_device().index or 0

    def get_cu_count(self) -> int:
        """Return how many SMs (compute units on AMD) kernels may fill, without those reserved; some without a GPU."""
        return self.backend.compute_units() - self.reserve_sms

    def get_arch(self) -> str:
        """Return what kernels are compiled for: "sm_90", "gfx942", …, or "cpu" where they are interpreted."""
        return self.backend.arch()

    def get_heap_bases(self) -> torch.Tensor:
        """Return the address of every rank's heap as this rank sees it, uint64 of (world_size,), for the device API."""
        self.recovery.check_open()
        return self.heap.bases

    def get_watchdog(self) -> torch.Tensor:
        """Return the words that `wait` and `barrier` of the device API take as `watchdog_ptr`."""
        self.check()
        return self.watchdog.words

    def get_device_context(self) -> torch.Tensor:
        """Return what `DeviceContext.initialize` takes in a kernel, int64 words: ranks, their heaps, the watchdog."""
        self.check()
        return self._device_context

    # By the names that Iris has for them.
    cur_rank = property(get_rank)
    num_ranks = property(get_num_ranks)
    heap_bases = property(get_heap_bases)

    @property
    def device(self) -> str:
        """The device the heap is on, as text: "cuda:0"."""
        return str(self.get_device())

    def is_interpreted(self) -> bool:
        """Return whether kernels run in Triton's interpreter, as they do without a GPU."""
        return self.backend.name == "shm"

    # Memory ----------------------------------------------------------------------------------------------------

    def free(self, buffer: torch.Tensor) -> None:
        """Give a buffer back to the heap; collective, like allocation. Its memory may be handed out again at once.

        Raises:
            ValueError: it is not on the heap, does not start where a buffer starts, was freed before (though another
                buffer has its place), or is part of a `peer_view`.
        """
        self.check()
        self.watchdog.unwatch(buffer, self.heap.free(buffer))

    def peer_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' copies of a heap tensor as one strided tensor, shape ``(world_size, *tensor.shape)``.

        Reading and writing through it is unordered with the peers' own accesses: put a barrier between.

        Raises:
            ValueError: the tensor is not on the heap.
        """
        self.recovery.check_open()
        return self.heap.peer_view(tensor)

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this rank's heap."""
        return isinstance(tensor, torch.Tensor) and self.heap.contains(tensor)

    def as_symmetric(self, tensor: torch.Tensor, *, copy: bool | None = None) -> torch.Tensor:
        """Return a tensor on the heap with the values of `tensor`: itself, if it is there; collective.

        Else a second address of the same memory, which every rank can reach, where that can be shared: what is written
        to one, once the kernel or copy that wrote it has ended, is read from the other. `tensor` is held until `free`
        is given the result. On NVIDIA GPUs memory can be shared that CUDA's virtual-memory calls made for that: of
        torch's symmetric memory, NVSHMEM, NCCL's ``ncclMemAlloc``, or torch's allocator with ``expandable_segments``,
        if the ranks' tensors lie alike in it; on the CPU that of ``tensor.share_memory_()``.

        Args:
            tensor: of any shape and dtype; the same on all ranks.
            copy: False to share memory or raise, True to copy, None to copy where it cannot be shared.

        Raises:
            ValueError: `copy` is False, and a rank's memory cannot be shared, or lies otherwise; says why.
            HeapExhausted: there is no room.
        """
        self.check()
        with self.recovery.raising_root_cause():
            return self.heap.as_symmetric(tensor, copy)

    def grow(self, size: int) -> None:
        """Let the heap have `size` more bytes per rank, in one piece, rounded up; collective. Buffers stay in place.

        Raises:
            RuntimeError: the device has no such memory; or the current stream is being captured.
            ValueError: the size makes no sense, or is not the same on all ranks.
            HeapExhausted: there are no such addresses, of which a rank has 256 GiB, on AMD GPUs 2.
        """
        self.check()
        with self.recovery.raising_root_cause():
            self.heap.grow(size)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, device: Device) -> torch.Tensor:
        self.heap.check_device(device)
        self.check()
        return self.heap.allocate(shape, dtype)

    # Collectives and recovery ----------------------------------------------------------------------------------

    def barrier(self, stream: Any = None, group: Any = None) -> None:
        """Wait for this rank's device, then for all ranks.

        Args:
            stream: of torch's; wait for that one alone, not for all of the device.
            group: of ``ccl.new_group``: a barrier of its ranks alone, by a kernel, which compares no allocations.

        Raises:
            ValueError: this rank is not in the group.
            TimeoutError: a wait in a kernel of any rank passed its limit.
            AllocationMismatch: the ranks allocated or freed in different orders; names the first difference.
            PeerError: a rank died, or did not come within the limit.
        """
        synchronize = self.backend.synchronize if stream is None else stream.synchronize
        if group is None:
            self.recovery.barrier(synchronize)
            return
        synchronize()
        self.device_barrier(group)
        self.backend.synchronize()
        self.check()

    def check(self) -> None:
        """Raise if this context cannot be used: a wait or something collective has failed. Costs a few loads.

        Raises:
            TimeoutError: the wait that failed first, on whatever rank; `reset` makes the context usable again.
            PeerError: a rank did not come to something collective, which `reset` mends; or has gone, which it cannot.
            RuntimeError: it is closed, or this process was forked from the one that opened it.
        """
        self.recovery.check()

    def reset(self) -> None:
        """Make the context usable again after `check` has raised; collective, and no matter where each rank failed.

        Ends this rank's kernels, waits for all ranks, and zeroes every flag and counter that the watchdog watches: the
        device barrier's, all operators', and those given to ``watchdog.watch``. What was in operators' outputs, and
        calls under way, are lost; buffers stay. A captured graph can be replayed.

        Raises:
            PeerError: a rank has gone, which is final, or did not come within the limit: call this again.
            AllocationMismatch: the ranks allocated or freed in different orders.
        """
        self.recovery.reset()

    def sleep(self) -> None:
        """Give the memory of the heap back to the GPU until `wake`; its addresses stay this context's. Collective.

        What is on the heap is lost; copy what must stay. Layers, operators and their plans stay, captured graphs too,
        which must not be replayed before `wake`; all else that needs the heap raises RuntimeError until then.

        Raises:
            RuntimeError: memory of another allocator is on the heap, a `provider`'s or what `as_symmetric` shares;
                names it. The context is then awake.
            TimeoutError, PeerError: as `barrier`; likewise.
        """
        from .sleep import sleep  # which is no part of the core

        sleep(self)

    def wake(self) -> None:
        """Give the heap memory again, at the same addresses; collective.

        All that is on it is zero, and so are the flags and counters that `reset` zeroes: captured graphs can be
        replayed at once. Awake, it does nothing.

        Raises:
            RuntimeError: this rank's GPU has not the memory; the context is still asleep, and may be woken later.
            PeerError: another rank's has not.
        """
        from .sleep import wake

        wake(self)

    def collective_section(self, what: str) -> AbstractContextManager[None]:
        """Run a block in which all ranks must succeed: if it raises on one, it raises on every one.

        The failing rank raises its own error, the others one that names it; where a wait has failed, all raise that.

        Args:
            what: the block does, for error messages: "load the weights".
        """
        return self.recovery.collective_section(what)

    def collective_allocation(self, what: str) -> AbstractContextManager[None]:
        """Run a collective block that allocates; if it raises on one rank it raises on all, and allocates on none.

        The flags that it gave the watchdog to watch are forgotten too. Raises what `collective_section` and `check` do.
        """
        return self.recovery.collective_allocation(what)

    def agree(self, what: str, value: Any) -> None:
        """Raise on every rank unless all ranks give the same value; collective.

        Args:
            what: a name for the value, for the message.
            value: anything JSON holds.

        Raises:
            ValueError: the values differ; names every rank's.
        """
        self.recovery.agree(what, value)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return the value of rank `src` on every rank; collective.

        Args:
            value: a tensor of any shape, dtype and device, an array or a number of numpy's, or anything JSON holds; of
                the source, others may pass None.
            src: the rank whose value is taken.

        Returns:
            A new tensor on the context's device, not on the heap; a new array; or the value.

        Raises:
            ValueError: there is no such rank; or the tensor is none that copies element by element, such as a sparse
                one; on every rank.
            TypeError: torch has no dtype such as the array's; on every rank.
        """
        return self.collectives.broadcast(value, src)

    def device_barrier(self, group: Any = None) -> None:
        """Queue a barrier of all ranks, or of a group's, on the current stream; the host does not wait.

        Args:
            group: of ``ccl.new_group``; None for all ranks.

        Raises:
            ValueError: this rank is not in the group.
        """
        if group is None:
            self.collectives.device_barrier()
        else:
            self.ccl.device_barrier(group)

    # Streams, torch's process group, operators -----------------------------------------------------------------

    def make_stream(self) -> Stream:
        """Return a queue of work beside the current stream, of high priority."""
        self.recovery.check_open()
        return self.backend.make_stream(self.timeout_s, self.watchdog.stream_timed_out)

    def process_group(self) -> dist.ProcessGroup:
        """Return torch's process group of the same ranks: NCCL, RCCL, or gloo without a GPU. Made at the first call.

        It is the one that the context was made of, or torch's default one, if its backend for the context's device is
        right; else a new one, which ends with the context. A new one's collectives wait for a rank as long as the host
        does, twice `timeout_s`.
        Where torch.distributed is not initialised, this initialises it; to initialise it otherwise, do so before.

        Raises:
            RuntimeError: ranks share a GPU, which NCCL and RCCL do not take; or one process, under the race checker.
            PeerError: a rank did not come to its making within the limit.
        """
        self.recovery.check_open()
        if self.ranks_on_device > 1:
            raise RuntimeError(
                f"up to {self.ranks_on_device} ranks share a GPU (IRIS_RANKS_PER_GPU); NCCL and RCCL take one rank each"
            )
        with self.recovery.raising_root_cause():
            return self.torch_group.get()

    def _make_process_group(self) -> ProcessGroup:
        device = None if self.is_interpreted() else self.get_device()
        return self._host.process_group(self.control_plane, device, self._rank_info.group)

    def release_operators(self, *, captured: bool = False) -> None:
        """Close the operators that calls with operands alone have made, and give their memory back; collective.

        Their outputs must not be used after this. The next such call makes its operator again.

        Args:
            captured: also those that a stream was captured of; its graphs must not be replayed after this.

        Raises:
            RuntimeError: some were captured, which is not expected: nothing is released.
        """
        self.check()
        if (used := [str(one) for one in self.operators.values() if one.was_captured]) and not captured:
            raise RuntimeError(
                f"captured CUDA graphs use the memory of {', '.join(sorted(set(used)))}; once these are deleted, "
                "release_operators(captured=True) gives it back"
            )
        while self.operators:
            self.operators.popitem()[1].close()

    # Log records -----------------------------------------------------------------------------------------------

    def debug(self, message: str) -> None:
        """Log a message with this rank's number at the level DEBUG; see `set_logger_level`."""
        self._log(DEBUG, message)

    def info(self, message: str) -> None:
        """Log a message with this rank's number at the level INFO."""
        self._log(INFO, message)

    def warning(self, message: str) -> None:
        """Log a message with this rank's number at the level WARNING."""
        self._log(WARNING, message)

    def error(self, message: str) -> None:
        """Log a message with this rank's number at the level ERROR."""
        self._log(ERROR, message)

    def _log(self, level: int, message: str) -> None:
        log(level, message, self.get_rank(), self.get_num_ranks())

    # Closing ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        """A copy of what holds a context, such as a module, has the same one."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(is_failing=kind is not None)

    def close(self) -> None:
        """Leave: release the heap. Its tensors must not be used after this. Collective, unless `check` raises.

        What else is asked of a closed context raises RuntimeError; to close it again does nothing. While an exception
        is on its way that was not when the context was made, as in a ``finally`` or at the end of ``with
        iris_core.iris() as ctx:``, no rank is waited for: the peers' next calls raise that this rank has left.

        Raises:
            TimeoutError: a CUDA graph holds collectives of the process group that was made here. For this, and for what
                `barrier` raises if a rank fails meanwhile, the heap is released all the same.
        """
        error = sys.exc_info()[1]
        self._close(is_failing=error is not None and error is not self._handled)

    def _close(self, *, is_failing: bool) -> None:
        if self.recovery.is_closed or not self.control_plane.is_owned:
            return
        self._handled = None  # whose traceback holds what its callers had
        with self._opened:
            self._opened.callback(lambda: self.torch_group.leave(is_failing))
            try:
                if self.recovery.is_asleep:
                    pass  # no kernel runs, and no rank reads this one's heap
                elif not self.recovery.has_failed and not is_failing:
                    self.barrier()
                else:
                    self.watchdog.abort()
            except BaseException:
                is_failing = True
                raise
            finally:
                self.recovery.is_closed = True
