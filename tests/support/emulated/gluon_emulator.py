"""Gluon on the CPU, as far as the warp-specialised kernels use it: their own source, run as Python.

Roles, programs and ranks are greenlets that take turns at random at every step that may wait. What is asynchronous on a
GPU is late here, too: a copy by TMA is done some time after it is queued, a store reads shared memory at one time and
arrives at a later one, a multiplication reads its operands when it is waited for. Barriers in shared memory have
phases. If nobody can go on, that is a deadlock. What it cannot show: layouts, memory ordering, the warps of a role
among themselves.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from emulated_memory import Descriptor, Pointer, Register, Shared
from triton.runtime.jit import JITFunction

from iris_core.interpreter.greenlets import import_greenlet
from iris_kernels.common.device.epilogue import apply_ops


class Deadlock(Exception):
    """Nobody can go on."""


@dataclass(eq=False)
class Task:
    """Something that runs in turns: a role of a program of a rank, or a copy under way."""

    name: str
    rank: int
    program: int
    num_programs: int
    run: Any = field(repr=False)  # a greenlet
    may_go_on: Callable[[], bool] = field(default=lambda: True, repr=False)
    stores: list[str] = field(default_factory=list, repr=False)  # of each store: queued, read or arrived
    products: int = 0  # that it has begun


class Machine:
    """All ranks' programs. `spawn` what is to run, then `run`.

    Args:
        seed: of the order in which they take turns.
        late: tasks with this in their names, which a space and the rank end, take theirs when nobody else can go on,
            what was spawned last first.
    """

    def __init__(self, seed: int, *, late: str = "") -> None:
        self._random = random.Random(seed)
        self._late = late
        self.has_late_tasks = False
        self._prompt_tasks: list[Task] = []
        self._late_tasks: list[Task] = []
        self._greenlets = import_greenlet()
        self._hub = self._greenlets.getcurrent()
        self.task: Task = Task("host", -1, -1, 0, self._hub)

    def spawn(self, name: str, fn: Callable[[], Any], *, rank: int, program: int = 0, num_programs: int = 1) -> Task:
        task = Task(name, rank, program, num_programs, self._greenlets.greenlet(fn, parent=self._hub))
        self._fellows(task).append(task)
        return task

    def spawn_beside(self, name: str, fn: Callable[[], Any]) -> Task:
        """Spawn what belongs to the program that runs."""
        now = self.task
        return self.spawn(name, fn, rank=now.rank, program=now.program, num_programs=now.num_programs)

    def wait(self, may_go_on: Callable[[], bool]) -> None:
        """Let others run until a condition holds."""
        self.task.may_go_on = may_go_on
        self._hub.switch()

    def run(self) -> None:
        while self._prompt_tasks or self._late_tasks:
            self.task = self._choose(self._prompt_tasks) or self._newest(self._late_tasks) or self._stuck()
            self.task.run.switch()
            if self.task.run.dead:
                self._fellows(self.task).remove(self.task)

    def _fellows(self, task: Task) -> list[Task]:
        is_late = bool(self._late) and self._late in f"{task.name} {task.rank}"
        self.has_late_tasks |= is_late
        return self._late_tasks if is_late else self._prompt_tasks

    def _choose(self, tasks: list[Task]) -> Task | None:
        """Return one of those that may go on, each as likely as another, or None; few are asked."""
        for left in range(len(tasks), 0, -1):
            place = int(self._random.random() * left)
            task = tasks[place]
            if task.may_go_on():
                return task
            tasks[place], tasks[left - 1] = tasks[left - 1], task
        return None

    def _newest(self, tasks: list[Task]) -> Task | None:
        return next((task for task in reversed(tasks) if task.may_go_on()), None)

    def _stuck(self) -> Task:
        tasks = self._prompt_tasks + self._late_tasks
        raise Deadlock(", ".join(f"{task.name} {task.rank}.{task.program}" for task in tasks))


class Barrier:
    """A barrier in shared memory (mbarrier): a phase completes with its last arrival and its last byte."""

    def __init__(self) -> None:
        self.completed = self.pending = self.count = self.bytes = 0

    def arrive(self, *, arrivals: int = 0, num_bytes: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += num_bytes
        assert self.pending >= 0, "more arrivals than the barrier was made for"
        if self.pending == 0 and self.bytes == 0:
            self.completed += 1
            self.pending = self.count


def _fakes(machine: Machine) -> dict[str, Any]:
    """Return what stands for the names that the kernels' modules import from Gluon."""

    def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout == "barrier":
            barriers = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(shape=shape, index=barriers.__getitem__)
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def specialize(functions: list[Any], warps: Any, registers: Any) -> None:
        roles = [machine.spawn_beside(fn.__name__, lambda fn=fn, args=args: fn(*args)) for fn, args in functions]
        machine.wait(lambda: all(role.run.dead for role in roles))

    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def wait_phase(barrier: Barrier, phase: int, pred: Any = True) -> None:
        if pred:
            machine.wait(lambda: barrier.completed & 1 != phase)

    def arrive(barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            barrier.arrive(arrivals=count)

    def load(source: Descriptor, start: list[int], barrier: Barrier, into: Shared) -> None:
        def arrives() -> None:
            source.read(start, into.memory)
            barrier.arrive(num_bytes=-source.block_type.nbytes)

        into.memory.fill_(float("nan"))
        machine.spawn_beside("tma_load", arrives)

    def store(destination: Descriptor, start: list[int], source: Shared) -> None:
        sender, number = machine.task, len(machine.task.stores)
        sender.stores.append("queued")

        def arrives() -> None:
            value = source.memory.clone()
            sender.stores[number] = "read"
            machine.wait(lambda: True)
            destination.write(start, value)
            sender.stores[number] = "arrived"

        machine.spawn_beside("tma_store", arrives)

    def store_wait(pendings: int) -> None:
        stores = machine.task.stores
        awaited = len(stores) - pendings
        machine.wait(lambda: "queued" not in stores[:awaited])

    def asm(code: str, *args: Any, **kwargs: Any) -> None:
        if code.startswith(("nanosleep", "fence")):
            return machine.wait(lambda: True)
        (pendings,) = re.findall(r"^cp\.async\.bulk\.wait_group (\d+); fence\.proxy\.async;", code)
        stores = machine.task.stores
        awaited = len(stores) - int(pendings)
        machine.wait(lambda: all(state == "arrived" for state in stores[:awaited]))

    def multiply(a: Shared, b: Shared, acc: Register, use_acc: Any, is_async: bool) -> Register:
        machine.task.products += 1
        return Register(acc._value, (*acc.in_flight, (machine.task.products, a, b, bool(use_acc))))

    def apply_ops_to_register(acc: Register, *args: Any) -> Register:
        return Register(apply_ops.fn(acc.value, *args))

    def load_block(pointers: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Register:
        mask = torch.ones_like(torch.as_tensor(pointers.offsets), dtype=torch.bool) if mask is None else mask
        return Register(_load_elements(pointers, mask, other))

    def store_block(pointers: Pointer, value: Register, mask: Any = True) -> None:
        mask = torch.as_tensor(mask).expand(pointers.offsets.shape)
        pointers.memory[pointers.offsets[mask]] = value.value[mask]

    gl = SimpleNamespace(
        constexpr=lambda value: value,
        int64=torch.int64,
        int32=torch.int32,
        float32=torch.float32,
        static_range=range,
        program_id=lambda axis: machine.task.program,
        num_programs=lambda axis: machine.task.num_programs,
        num_warps=lambda: 8,
        cdiv=lambda a, b: -(-a // b),
        maximum=max,
        where=lambda condition, yes, no: yes if condition else no,
        minimum=min,
        zeros=lambda shape, dtype, layout: Register(torch.zeros(*shape)),
        join=lambda left, right: Register(torch.stack([left.value, right.value], -1)),
        convert_layout=lambda value, layout: value,
        arange=lambda start, stop, layout: torch.arange(start, stop),
        load=load_block,
        store=store_block,
        SliceLayout=lambda dim, parent: None,
        BlockedLayout=lambda *sizes: None,
        allocate_shared_memory=allocate,
        warp_specialize=specialize,
        inline_asm_elementwise=asm,
        NVMMADistributedLayout=lambda **kwargs: None,
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda shape, dtype: None),
    )
    return {
        "gl": gl,
        "apply_ops": apply_ops_to_register,
        "zero_tile": lambda pipeline, columns, tile: Register(torch.zeros(tile.BLOCK_M, columns)),
        "accumulator_layout": lambda num_warps, dtype, columns: None,
        "thread_barrier": lambda: machine.wait(lambda: True),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: "barrier",
            init=init,
            wait=wait_phase,
            arrive=arrive,
            expect=lambda barrier, num_bytes: barrier.arrive(arrivals=1, num_bytes=num_bytes),
        ),
        "tma_load": load,
        "tma_store": store,
        "tma": SimpleNamespace(store_wait=store_wait),
        "reinterpret": Shared.reinterpret,
        "warpgroup_mma_init": lambda acc: acc,
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": lambda num_outstanding, deps: deps[0].after(machine.task.products - num_outstanding),
        "fence_async_shared": lambda: None,
        "fence_before_descriptor_loads": lambda: None,
        "_SCALE_BLOCK": 128,
        "SCALES_AT_ONCE": 128,
        "_SPLITS_AT_ONCE": 4,
        "LAG": 4,
    }


def _load_elements(pointers: Pointer, mask: torch.Tensor, other: float, cache_modifier: str = "") -> torch.Tensor:
    return torch.where(mask, pointers.memory[torch.where(mask, pointers.offsets, 0)], torch.tensor(other))


def _tanh(code: str, constraints: str, operands: list[torch.Tensor], **_: Any) -> torch.Tensor:
    assert code == "tanh.approx.f32 $0, $1;"
    return torch.tanh(operands[0])


# What stands for `triton.language` in the ops of epilogues, which compute with torch's tensors.
OPS_LANGUAGE = SimpleNamespace(
    inline_asm_elementwise=_tanh,
    minimum=lambda values, most: values.clamp(max=most),
    maximum=lambda values, least, propagate_nan: values.clamp(min=least),
    PropagateNan=SimpleNamespace(ALL=None),
    load=_load_elements,
    where=torch.where,
    sigmoid=torch.sigmoid,
    split=lambda pairs: pairs.unbind(-1),
    float32=torch.float32,
    int64=torch.int64,
    static_range=range,
)


@contextlib.contextmanager
def emulated(machine: Machine, modules: list[Any], ops: Sequence[Any] = (), **further: Any) -> Iterator[None]:
    """Let the kernels in these modules run as Python on a machine.

    Args:
        machine: that.
        modules: of the kernels.
        ops: modules of ops of epilogues.
        further: names to replace in the kernels' modules as well.
    """
    with contextlib.ExitStack() as stack:
        for module in ops:
            stack.enter_context(mock.patch.object(module, "tl", OPS_LANGUAGE))
        stack.enter_context(
            mock.patch.object(JITFunction, "__call__", lambda self, *args, **kwargs: self.fn(*args, **kwargs))
        )
        for module in modules:
            for name, fake in (_fakes(machine) | further).items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, fake))
        yield
