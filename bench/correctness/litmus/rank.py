"""One rank's part of a litmus test: memory, launches, and the count of forbidden outcomes over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from iris_core import Context

from ...measure.job import context
from . import kernels, kernels_sm90

SCOPES = ("sys", "gpu")
BLOCK = 512  # int32 of a message: 16 bytes per thread of four warps, 16 cache lines
_NUM_WARPS = 4
_PROGRAMS = {True: 4, False: 128}  # interpreted, or on a GPU, where all of them are resident
_DELAYS = {True: 1, False: 64}
_WORDS = {True: 256, False: 1 << 15}  # of a launch of `write_words`
_WORDS_OF_A_PROGRAM = 128


class Litmus(NamedTuple):
    """A litmus test.

    Args:
        edge: what is promised, in a few words.
        kernel: see kernels.py.
        weakenings: what may be left out.
        scopes: in which it is promised.
        constants: of the kernel.
        programs: of a side.
    """

    edge: str
    kernel: Any
    weakenings: tuple[str, ...] = ("release", "acquire")
    scopes: tuple[str, ...] = SCOPES
    constants: dict[str, Any] | None = None
    programs: int = 1


def _messages(
    edge: str, move: str, *weakenings: str, scopes: tuple[str, ...] = ("sys",), atomics: bool = False
) -> Litmus:
    constants = {"MOVE": move, "ATOMICS": atomics}
    return Litmus(edge, kernels.message_passing, weakenings or ("release", "acquire"), scopes, constants)


LITMUS = {
    "store": _messages("store, signal -> wait, load", "store", scopes=SCOPES),
    "put": _messages("put, signal -> wait, load", "put"),
    "copy": _messages("copy, signal -> wait, load", "copy"),
    "get": _messages("store, signal -> wait, get", "get"),
    "atomics": _messages("store, atomic release -> atomic acquire, load", "store", scopes=SCOPES, atomics=True),
    "descriptor": _messages("store, signal -> wait, fence, load by descriptor", "descriptor", "fence"),
    "descriptor_store": Litmus(
        "store by descriptor, its arrival, signal -> wait, load",
        kernels_sm90.descriptor_stores,
        ("arrival",),
        ("sys",),
        {"LAYOUT": gl.BlockedLayout([1, 4], [4, 8], [_NUM_WARPS, 1], [1, 0])},
    ),
    "read_first": Litmus("load, signal -> wait, store", kernels.read_first),
    "chain": Litmus("store, signal -> wait, signal -> wait, load", kernels.chain, programs=2),
    "barrier": Litmus("store, barrier -> barrier, load", kernels.store_and_barrier, scopes=("sys",)),
    "store_buffering": Litmus("two read-modify-writes on each side", kernels.store_buffering, ("rmw",)),
    "device_barrier": Litmus("kernel, device barrier -> kernel", kernels.write_words, ("barrier",), ("sys",)),
}


@dataclass(frozen=True)
class Case:
    """A litmus test in a scope, with what is left out of it; "" for nothing."""

    litmus: str
    scope: str
    weakened: str


@dataclass(frozen=True)
class Job:
    """What to run: `rounds` of all pairs together, at least."""

    case: Case
    rounds: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What came of it; the names are those of `LitmusRecord`."""

    case: Case
    rounds: int
    forbidden: int | None
    seconds: float | None
    status: str
    reason: str = ""


def cases(names: tuple[str, ...]) -> list[Case]:
    """Return all cases of litmus tests, those that are promised first."""
    found = [
        Case(name, scope, weakened)
        for name in names
        for scope in LITMUS[name].scopes
        for weakened in ("", *LITMUS[name].weakenings)
    ]
    return sorted(found, key=lambda case: bool(case.weakened))


def measure(rank: int, world_size: int, job: Job) -> Outcome:
    """Run a litmus test; collective. The outcome is the same on all ranks.

    Raises:
        TimeoutError: a rank timed out in a wait for another.
    """
    ctx = context()
    run = _Run(ctx, job)
    if reason := run.unsupported_reason():
        return Outcome(job.case, job.rounds, None, None, "unsupported", reason)
    pair_rounds, pairs = run.prepare()
    run.launch(0)  # a kernel's first launch may wait for the device
    ctx.barrier()
    start = time.perf_counter()
    run.launch(pair_rounds)
    ctx.barrier()
    seconds = max(ctx.control_plane.all_gather(time.perf_counter() - start))
    forbidden = sum(ctx.control_plane.all_gather(int(run.forbidden.sum())))
    run.close()
    status = "wrong" if forbidden and not job.case.weakened else "ok"
    return Outcome(job.case, pair_rounds * pairs, forbidden, seconds, status)


def not_begun(job: Job, reason: str) -> Outcome:
    """Return the outcome of a job that the ranks did not end."""
    return Outcome(job.case, job.rounds, None, None, "error", reason)


@dataclass
class _Run:
    """The memory of one rank, and the launches."""

    ctx: Context
    job: Job
    buffers: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.litmus = LITMUS[self.job.case.litmus]
        self.is_interpreted = self.ctx.is_interpreted()
        self.programs = _PROGRAMS[self.is_interpreted]
        self.launch: Callable[[int], None]
        self.forbidden: torch.Tensor

    def unsupported_reason(self) -> str:
        """Return why this device does not run the test; empty if it does."""
        arch = self.ctx.get_arch()
        if self.is_interpreted:
            return "Gluon is not interpreted" if self.litmus.kernel is kernels_sm90.descriptor_stores else ""
        has_tma = arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90
        uses_tma = self.job.case.litmus in ("descriptor", "descriptor_store")
        return f"{arch} has no loads and stores by TMA" if uses_tma and not has_tma else ""

    def prepare(self) -> tuple[int, int]:
        """Make buffers; return how many rounds a pair has, and how many pairs all ranks have together."""
        between_ranks = self.job.case.scope == "sys"
        if self.litmus.kernel is kernels.write_words:
            words = _WORDS[self.is_interpreted]
            self._prepare_words(words)
            pairs = words * self.ctx.get_num_ranks()
            rounds = triton.cdiv(self.job.rounds, pairs)
        else:
            own = self.programs // self.litmus.programs // (1 if between_ranks else 2)
            self._prepare_pairs(own)
            pairs = own * self.ctx.get_num_ranks() // (2 if between_ranks else 1)
            rounds = 2 * triton.cdiv(self.job.rounds, 2 * pairs)  # both sides begin equally often
        self.ctx.barrier()  # all flags are zero
        return rounds, pairs

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        self.buffers.append(self.ctx.zeros(shape, dtype=dtype))
        return self.buffers[-1]

    def _flags(self, *shape: int) -> torch.Tensor:
        flags = self._zeros(*shape, kernels.LINE_WORDS.value)
        self.ctx.watchdog.watch(flags, lambda word, _: f"{self.job.case}, word {word}")
        return flags

    def _prepare_pairs(self, pairs: int) -> None:
        """Prepare a launch of so many pairs, whose sides on this rank have flags and data of their own."""
        case, ctx, kernel = self.job.case, self.ctx, self.litmus.kernel
        is_words = kernel is kernels.store_buffering
        sizes = (2, kernels.LINE_ELEMENTS.value) if is_words else (2, kernels.SLOTS.value, BLOCK)
        data = self._zeros(pairs, *((2, *sizes) if is_words else sizes), dtype=torch.int32)
        self.forbidden = torch.zeros(self.programs, dtype=torch.int64, device=ctx.get_device())
        world_size = ctx.get_num_ranks()
        known: dict[str, Any] = {"data_ptr": data, "words_ptr": data, "forbidden_ptr": self.forbidden, "tiles": None}
        known |= {"flags_ptr": self._flags(pairs, 2 * self.litmus.programs), "seed": self.job.seed}
        known |= {"rank": ctx.get_rank(), "world_size": world_size, "heap_bases": ctx.get_heap_bases()}
        known |= {"watchdog_ptr": ctx.get_watchdog(), "BLOCK": BLOCK, "DELAY": _DELAYS[self.is_interpreted]}
        known |= {"SCOPE": case.scope, "WEAKENED": case.weakened} | (self.litmus.constants or {})
        tile = [BLOCK // kernels.TILE_COLUMNS.value, kernels.TILE_COLUMNS.value]
        if known.get("MOVE") == "descriptor":
            known["tiles"] = TensorDescriptor.from_tensor(data.view(-1, tile[1]), tile)
        if kernel is kernels_sm90.descriptor_stores:
            there = ctx.peer_view(data)[ctx.get_rank() ^ 1].view(-1, tile[1])
            layout = gl.NVMMASharedLayout.get_default_for(tile, gl.int32)
            known["tiles"] = GluonTensorDescriptor.from_tensor(there, tile, layout)
        if kernel is kernels.store_and_barrier:
            known["states_ptr"] = self._flags(self.programs, triton.cdiv(world_size + 1, kernels.LINE_WORDS.value))
        arguments = {name: value for name, value in known.items() if name in kernel.arg_names}
        self.launch = lambda rounds: kernel[(self.programs,)](**arguments, rounds=rounds, num_warps=_NUM_WARPS)

    def _prepare_words(self, words: int) -> None:
        """Prepare launches that each write so many words, and count those that are missing behind a barrier."""
        ctx = self.ctx
        data = self._zeros(words, kernels.LINE_ELEMENTS.value, dtype=torch.int32)
        programs = words // _WORDS_OF_A_PROGRAM
        self.forbidden = torch.zeros(programs, dtype=torch.int64, device=ctx.get_device())
        bases, has_barrier = ctx.get_heap_bases(), not self.job.case.weakened

        def launch(rounds: int) -> None:
            for number in range(1, max(rounds, 1) + 1):
                kernels.write_words[(programs,)](data, number, ctx.get_rank(), bases, BLOCK=_WORDS_OF_A_PROGRAM)
                if has_barrier:
                    ctx.device_barrier()
                kernels.count_missing[(programs,)](data, self.forbidden, number, BLOCK=_WORDS_OF_A_PROGRAM)
                ctx.device_barrier()  # no rank overwrites what another has yet to look at
            if not rounds:
                data.zero_()
                self.forbidden.zero_()

        self.launch = launch

    def close(self) -> None:
        """Give the buffers back; collective."""
        self.ctx.barrier()
        for buffer in self.buffers:
            self.ctx.watchdog.unwatch(buffer)
            self.ctx.free(buffer)
