"""Puts the checker between kernels and memory: the interpreter's memory operations, and torch's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime.interpreter import ReduceScanOpInterface, interpreter_builder

from ..device import sync
from ..heap.heap import address_of
from ..interpreter.memory_bounds import is_volatile_load, itemsize_of, lanes_of
from .clocks import CTA, GPU, SYSTEM, WEAK, Agent
from .device import Streams
from .simulation import Simulation

_SCOPE_OF = {ir.MEM_SYNC_SCOPE.CTA: CTA, ir.MEM_SYNC_SCOPE.GPU: GPU, ir.MEM_SYNC_SCOPE.SYSTEM: SYSTEM}
_ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_WAITS = ("wait", "wait_each")  # of the device API
_EVERY_THREADS = -1  # in place of the element that a thread accesses
# Operations that end only when the device has: the host knows afterwards what its stream did.
_TO_HOST = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::item")


@contextlib.contextmanager
def kernels_watched(simulation: Simulation) -> Iterator[None]:
    """Send every memory operation of interpreted kernels past the checker."""
    operations = _Operations(simulation)
    names = (
        "create_masked_load",
        "create_masked_store",
        "create_atomic_rmw",
        "create_atomic_cas",
        "create_barrier",
        "create_dot",
    )
    for name in names:  # on the instance: its class keeps the originals
        setattr(interpreter_builder, name, getattr(operations, name))
    reduce_or_scan = ReduceScanOpInterface.apply

    def apply(self: Any, given: Any) -> Any:
        operations.converge()
        return reduce_or_scan(self, given)

    ReduceScanOpInterface.apply = apply
    try:
        yield
    finally:
        ReduceScanOpInterface.apply = reduce_or_scan
        for name in names:
            delattr(interpreter_builder, name)


@contextlib.contextmanager
def host_reads_watched(streams: Streams) -> Iterator[None]:
    """Let the host see a tensor as numbers only when its stream has got there: these go past torch's dispatcher."""
    simulation = streams.simulation
    names = ("tolist", "numpy", "__array__")
    originals = {name: getattr(torch.Tensor, name) for name in names}

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if simulation.scheduler.current is not None and simulation.knows(tensor):
                tensor.clone()
                streams.stream_reached()
            return original(tensor, *args, **kwargs)

        return read

    for name, original in originals.items():
        setattr(torch.Tensor, name, watched(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


class _Operations:
    """The interpreter's memory operations, each first recorded. Signatures are the interpreter's."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._original = type(interpreter_builder)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *how: Any, **named: Any) -> Any:
        is_volatile = is_volatile_load(how, named)
        site = self._simulation.detector.site()
        chosen = lanes_of(ptrs, mask)
        addresses = ptrs.data[chosen].reshape(-1)
        first = int(addresses[0]) if addresses.size else 0
        if is_volatile or (addresses.size == 1 and not self._simulation.bounds.is_heap_bases(first)):
            self._simulation.scheduler.look(first, site, is_strong=is_volatile)
        elif addresses.size > 1:
            self._simulation.scheduler.at_load()
        # PTX ISA, "ld": volatile has the ordering of relaxed at system scope.
        strength = SYSTEM if is_volatile else WEAK
        self._access(ptrs, chosen, addresses, site, write=False, strength=strength)
        if is_volatile and ptrs.data.size == 1 and addresses.size:
            self._simulation.detector.store_buffers.look(self._agent, int(addresses[0]), site, releases=False)
        return self._original.create_masked_load(interpreter_builder, ptrs, mask, other, *how, **named)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *how: Any) -> Any:
        self._simulation.scheduler.at_access()
        site = self._simulation.detector.site()
        chosen = lanes_of(ptrs, mask)
        values = np.broadcast_to(value.data, ptrs.data.shape)[chosen].reshape(-1)
        self._access(ptrs, chosen, ptrs.data[chosen].reshape(-1), site, write=True, values=values)
        return self._original.create_masked_store(interpreter_builder, ptrs, value, mask, *how)

    def create_atomic_rmw(self, operation: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        def act() -> Any:
            return self._original.create_atomic_rmw(interpreter_builder, operation, ptr, value, mask, sem, scope)

        return self._atomic(ptr, mask, sem, scope, act, lambda old, new: True)

    def create_atomic_cas(self, ptr: Any, compare: Any, value: Any, sem: Any, scope: Any) -> Any:
        def act() -> Any:
            return self._original.create_atomic_cas(interpreter_builder, ptr, compare, value, sem, scope)

        def swapped(old: np.ndarray, new: np.ndarray) -> bool:
            return bool((old == compare.data).any())

        return self._atomic(ptr, None, sem, scope, act, swapped)

    def create_barrier(self) -> None:
        self._simulation.detector.clocks.pass_barrier(self._agent)

    def converge(self) -> None:
        """Elements of all threads go into one result: they have come this far."""
        self._simulation.detector.clocks.converge(self._agent)

    def create_dot(self, *args: Any) -> Any:
        self.converge()
        return self._original.create_dot(interpreter_builder, *args)

    @property
    def _agent(self) -> Agent:
        task = self._simulation.scheduler.current
        assert task is not None
        return task.agent

    def _access(
        self,
        ptrs: Any,
        chosen: np.ndarray,
        addresses: np.ndarray,
        site: int,
        *,
        write: bool,
        by_one: bool = False,
        **kind: Any,
    ) -> None:
        """Record an access by a program's first thread, if it writes a scalar or is `by_one`; else by all of them.

        `addresses` are those of the `chosen` lanes.
        """
        agent, count = self._agent, ptrs.data.size
        simulation = self._simulation
        stray = simulation.stray(addresses, itemsize_of(ptrs))
        if stray is not None and site not in simulation.detector.strays:
            doing = "writes" if write else "reads"
            simulation.detector.strays[site] = agent, f"{doing} past a tensor's end: {stray}"
        by_first = by_one or (write and count == 1)
        # As many elements are spread the same way over threads; a scalar that is loaded is every thread's.
        lanes = count + np.flatnonzero(chosen) if by_first or count > 1 else np.full(addresses.size, _EVERY_THREADS)
        simulation.detector.access(
            agent.first_thread if by_first and agent.first_thread else agent,
            addresses,
            itemsize_of(ptrs),
            site,
            write=write,
            lanes=lanes,
            **kind,
        )

    def _atomic(
        self,
        ptr: Any,
        mask: Any,
        sem: Any,
        scope: Any,
        act: Callable[[], Any],
        writes: Callable[[np.ndarray, np.ndarray], bool],
    ) -> Any:
        simulation, agent, strength = self._simulation, self._agent, _SCOPE_OF[scope]
        chosen = lanes_of(ptr, mask)
        addresses = ptr.data[chosen].reshape(-1)
        site = simulation.detector.site()
        simulation.scheduler.look(int(addresses[0]) if addresses.size else 0, site)
        # What releases is in what it releases, so whichever threads these are, they count as the first.
        self._access(ptr, chosen, addresses, site, by_one=sem in _RELEASES, write=True, strength=strength)
        old = act()
        new = native.load(ptr.data, chosen, np.zeros_like(old.data), old.data.dtype)
        unused = simulation.detector.result_is_unused(site)
        if unused and sem == ir.MEM_SEMANTIC.ACQUIRE:
            simulation.detector.vain_acquires.setdefault(site, agent)
        changed = bool((new != old.data)[chosen].any())
        if ptr.data.size == 1:
            for address in addresses.tolist():
                if changed:
                    simulation.detector.store_buffers.write(agent, address, acquires=sem in _ACQUIRES and not unused)
                elif not unused:
                    simulation.detector.store_buffers.look(agent, address, site, releases=sem in _RELEASES)
        releases, awaited = simulation.detector.releases, _awaited() if sem in _ACQUIRES else None
        for address, value in zip(addresses.tolist(), new[chosen].reshape(-1).tolist(), strict=True):
            if writes(old.data, new):
                releases.update(agent, address, value, strength, releases=sem in _RELEASES)
            if sem in _ACQUIRES and not unused:
                releases.acquire(agent, address, strength, awaited)
        if ptr.data.size == 1 and not unused:
            simulation.detector.clocks.converge(agent)  # the first thread hands the result to the others
        if changed:
            simulation.scheduler.changed_words(addresses.tolist())
        return old


class TorchWatched(TorchDispatchMode):
    """Sends torch's operations on memory that kernels also use past the checker, in the order of the rank's stream."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams
        self._simulation = streams.simulation
        self._made_of = WeakTensorKeyDictionary()  # tensors made of such memory, elsewhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        task = self._simulation.scheduler.current
        if task is None:
            return func(*args, **kwargs)
        schema = func._schema.arguments
        given = [*zip(schema, args, strict=False)]
        given += [(argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs]
        tensors = [
            (tensor, argument.alias_info is not None and argument.alias_info.is_write)
            for argument, value in given
            for tensor in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(tensor, torch.Tensor)
        ]
        is_view, is_to_host = _is_view(func), func._schema.name in _TO_HOST
        touched = [] if is_view else [(tensor, writes) for tensor, writes in tensors if self._simulation.knows(tensor)]
        if not touched and not any(tensor in self._made_of for tensor, _ in tensors):
            return func(*args, **kwargs)
        site = self._simulation.detector.site() if task.site is None else task.site
        if touched or is_to_host:
            with self:  # torch takes the mode off in here, and other tasks' operations come through it meanwhile
                agent = self._streams.next_in_stream()
        for tensor, writes in touched:
            self._simulation.detector.access(agent, addresses_of(tensor), tensor.element_size(), site, write=writes)
        result = func(*args, **kwargs)
        if touched:
            self._simulation.scheduler.changed()
        if is_to_host:
            self._streams.stream_reached()
        for made in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(made, torch.Tensor) and not self._simulation.knows(made):
                self._made_of[made] = None
        return result


def _awaited() -> int | None:
    """Return the value for which a `wait` of the device API waits that runs now; None in other code."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _WAITS and frame.f_code.co_filename == sync.__file__:
            expected = frame.f_locals["expected"]
            return int(expected.handle.data.item()) if isinstance(expected, tl.tensor) else int(expected)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _is_view(func: Any) -> bool:
    """Whether an operation only makes another name for the same memory."""
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def addresses_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the address of every element."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    return address_of(tensor) + offsets * tensor.element_size()
