"""The steps of a calibration: what runs on all ranks at once, and which constant of the cost model follows.

A step is several calls, timed in turns, and for each the time that the model predicts for it from one constant: the
constant becomes what makes that the time that was measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from iris_core import Context
from overlap_taxonomy import Agent, Machine, Mainloop, Schedule, Variant, Work, list_variants, predict_us
from overlap_taxonomy.gemm_cost import stream_k_us
from overlap_taxonomy.library_cost import library_gemm
from overlap_taxonomy.transfer_cost import copy_us

from ..config import warps_of
from ..variants.library import all_gather_single
from .links import BLOCK, MOVES, move_kernel, round_trip_kernel

_FAMILY = "all_gather_gemm"  # whose copy engines leave the SMs to the main loop
_FEW_SMS = 4  # which store less together than the link takes
_ROUND_TRIPS = 20
_TILES = ((128, 128), (64, 128))  # beside the largest, which is taken for many rows and columns
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """How much is multiplied and moved.

    Args:
        short, long: (m, n, k) of a GEMM so short that the GPU stays cool, and of one so long that it does not.
        weights: (m, n, k) of one that takes as long as reading its B.
        deep, shallow, few: (m, n, k) of a rank's GEMM: most of the time multiplying; with many tiles' ends; with few
            rows.
        tiny: the same, of next to nothing.
        elements: of 4 bytes, to each peer; a multiple of BLOCK.
        collectives: bytes of a shard, in ascending order, two where latency counts, two where bytes do.
    """

    short: tuple[int, int, int] = (2048, 4096, 4096)
    long: tuple[int, int, int] = (8192, 8192, 8192)
    weights: tuple[int, int, int] = (16, 16384, 8192)
    deep: tuple[int, int, int] = (2048, 8192, 8192)
    shallow: tuple[int, int, int] = (2048, 8192, 1024)
    few: tuple[int, int, int] = (128, 16384, 8192)
    tiny: tuple[int, int, int] = (128, 128, 256)
    elements: int = 1024 * BLOCK
    collectives: tuple[int, int, int, int] = (16 << 10, 1 << 20, 8 << 20, 64 << 20)

    def heap_bytes(self, world_size: int) -> int:
        """Return what the steps hold of a rank's heap, at most."""
        gathered = max(m * k for m, _, k in (self.deep, self.shallow, self.few, self.tiny)) * _DTYPE.itemsize
        return 4 * self.elements * (world_size + 1) + 8 * gathered + (32 << 20)


# For interpreted kernels, whose times say nothing of any machine.
SMALL = Sizes(
    short=(32, 32, 32),
    long=(64, 32, 32),
    weights=(16, 64, 32),
    deep=(64, 32, 64),
    shallow=(64, 32, 32),
    few=(32, 64, 32),
    tiny=(16, 16, 16),
    elements=2 * BLOCK,
    collectives=(64, 128, 256, 512),
)


@dataclass(frozen=True)
class Sample:
    """A call, and the constant that follows from its time.

    Args:
        constant: as `Machine.constant` takes it.
        call: queues it on this rank.
        predict: returns the time that the model has for it, in µs.
    """

    constant: str
    call: Callable[[], object]
    predict: Callable[[Machine], float]


@dataclass(frozen=True)
class Setting:
    """Where a step runs.

    Args:
        ctx: a context of the calibration's own.
        sizes: how much to multiply and to move.
    """

    ctx: Context
    sizes: Sizes

    @property
    def peers(self) -> list[int]:
        """The other ranks, those of higher numbers first."""
        rank, world_size = self.ctx.get_rank(), self.ctx.get_num_ranks()
        return [(rank + distance) % world_size for distance in range(1, world_size)]

    def drawn(self, rows: int, columns: int) -> torch.Tensor:
        """Return a matrix of random values, as others draw less power; torch's own generators stay as they are."""
        device = self.ctx.get_device()
        return torch.randn(rows, columns, device=device, dtype=_DTYPE, generator=torch.Generator(device))


@dataclass(frozen=True)
class Step:
    """Samples that are timed in turns.

    Args:
        name: says what is measured.
        prepare: makes the samples; collective. ValueError where this machine cannot do it.
        has_peers: whether it takes two ranks or more.
    """

    name: str
    prepare: Callable[[Setting], Sequence[Sample]]
    has_peers: bool = False


def _library(setting: Setting) -> list[Sample]:
    """torch.mm of next to nothing, which is all taken for a kernel's launch, short, and reading weights; a copy."""
    sizes = setting.sizes
    m, n, _ = sizes.long
    blocks, matrix = setting.drawn(2 * m, n // 2).view(2, m, n // 2), setting.drawn(m, n)

    def copied_us(machine: Machine) -> float:
        return 2 * m * n * _DTYPE.itemsize / machine.layout_gbps / 1e3 + machine.launch_us

    return [
        _multiplied(setting, "launch_us", sizes.tiny, lambda machine, work: 0.0),
        _multiplied(setting, "boost_tflops", sizes.short, _library_us),
        _multiplied(setting, "stream_k.memory_gbps", sizes.weights, _split_us),
        Sample("layout_gbps", lambda: matrix.view(m, 2, n // 2).copy_(blocks.transpose(0, 1)), copied_us),
    ]


def _hot(setting: Setting) -> list[Sample]:
    """torch.mm, long: by itself, as it heats the GPU for what comes next."""
    return [_multiplied(setting, "hot_share", setting.sizes.long, _library_us)]


def _multiplied(
    setting: Setting, constant: str, size: tuple[int, int, int], predict: Callable[[Machine, Work], float]
) -> Sample:
    """Return a torch.mm of each rank's, of which `predict` returns the time after its launch."""
    (m, n, k), ranks = size, setting.ctx.get_num_ranks()
    a, b = setting.drawn(m, k), setting.drawn(n, k).t()
    work = Work(_FAMILY, m, n * ranks, k, ranks)
    return Sample(constant, lambda: torch.mm(a, b), lambda machine: predict(machine, work) + machine.launch_us)


def _library_us(machine: Machine, work: Work) -> float:
    """Return the time of the library's GEMM."""
    return library_gemm(machine, work).us


def _split_us(machine: Machine, work: Work) -> float:
    """Return the same of one that is known to split its tiles, as it has few."""
    return stream_k_us(machine, *work.product, work.element_bytes, fits_rows=True)


def _links(setting: Setting) -> list[Sample]:
    """Kernels that store to, and load from, all peers at once, or one; copies to all in turn; a signal's way."""
    ctx, elements, peers = setting.ctx, setting.sizes.elements, setting.peers
    rank, size = ctx.get_rank(), 4.0 * setting.sizes.elements
    received, sent = (
        ctx.zeros((ctx.get_num_ranks(), elements), dtype=torch.int32),
        ctx.zeros(elements, dtype=torch.int32),
    )
    landing = torch.zeros(elements, dtype=torch.int32, device=ctx.get_device())
    flags = ctx.zeros((1,), dtype=torch.int64)
    ctx.watchdog.watch(flags, lambda word, _: "the round trip of a calibration")
    stream, halves = ctx.make_stream(), [one.view(torch.int16) for one in (sent, received[rank])]
    trips = iter(range(1, 1 << 62, _ROUND_TRIPS))

    def move(kind: str, sms: int, num_peers: int = 1, *, narrow: bool = False) -> None:
        own, there = (landing, sent) if kind == "load" else (sent, received[rank])
        if narrow:
            own, there = (half[1:] for half in halves)
        programs = max(1, sms // num_peers) * num_peers
        words = (own.numel(), rank, peers[0], ctx.get_heap_bases())
        options = {"KIND": MOVES.index(kind), "BLOCK": BLOCK, "PEERS": num_peers, "num_warps": 16}
        move_kernel[(programs,)](own, there, *words, **options)

    def copy(columns: int, rows: int = elements // BLOCK) -> None:
        stream.wait_for_current()
        for peer in peers:
            there = ctx.peer_view(received)[peer, rank].view(-1, BLOCK)[:rows, :columns]
            stream.copy_2d(there, sent.view(-1, BLOCK)[:rows, :columns])
        stream.current_waits()

    def signal() -> None:
        if rank < 2:
            words = (next(trips), _ROUND_TRIPS, int(rank == 0), rank, 1 - rank)
            round_trip_kernel[(1,)](flags, *words, ctx.get_heap_bases(), ctx.get_watchdog(), num_warps=1)

    num_sms, all_bytes, off_512 = ctx.get_cu_count(), len(peers) * size, BLOCK - 8
    few_sms, rows = min(_FEW_SMS, num_sms), elements // BLOCK
    of_row = size / rows

    def rate(constant: str, call: Callable[[], object], moved: float, share: float = 1.0) -> Sample:
        return Sample(constant, call, lambda machine: moved / machine.constant(constant) / share / 1e3)

    def copying(constant: str, call: Callable[[], object], moved: float, row_bytes: int) -> Sample:
        return Sample(constant, call, lambda machine: len(peers) * copy_us(machine, moved, row_bytes))

    return [
        rate("link_gbps", lambda: move("store", num_sms, len(peers)), all_bytes),
        rate("peer_gbps", lambda: move("store", num_sms), size),
        rate("sm_link_gbps", lambda: move("store", few_sms), size, few_sms),
        rate("narrow_link_gbps", lambda: move("store", num_sms, len(peers), narrow=True), all_bytes),
        rate("pull_gbps", lambda: move("load", num_sms, len(peers)), all_bytes),
        copying("engine_gbps", lambda: copy(BLOCK), size, 512),
        copying("engine_us", lambda: copy(BLOCK, 1), of_row, 512),
        copying("engine_narrow_rows_gbps", lambda: copy(off_512), size * off_512 / BLOCK, 4 * off_512),
        Sample("hop_us", signal, lambda machine: 2 * _ROUND_TRIPS * machine.hop_us + machine.launch_us),
    ]


def _collectives(setting: Setting) -> list[Sample]:
    """The library's all-gather, of four sizes, and its all-reduce."""
    group, ranks, device = setting.ctx.process_group(), setting.ctx.get_num_ranks(), setting.ctx.get_device()

    def gather(constant: str, size: int, gbps: str, latency: str) -> Sample:
        own = torch.zeros(size // _DTYPE.itemsize, dtype=_DTYPE, device=device)
        gathered = own.new_empty(ranks * own.numel())

        def us(machine: Machine) -> float:
            return (ranks - 1) * (size / machine.constant(gbps) / 1e3 + machine.constant(latency))

        return Sample(constant, lambda: all_gather_single(gathered, own, group=group), us)

    small, less_small, less_large, large = setting.sizes.collectives
    of_large, of_small = ("collective_gbps", "collective_us"), ("small_collective_gbps", "small_collective_us")
    reduced = torch.zeros(large // _DTYPE.itemsize, dtype=_DTYPE, device=device)

    def reduced_us(machine: Machine) -> float:
        sent = 2 * (ranks - 1) / ranks * large
        return sent / machine.all_reduce_gbps / 1e3 + machine.collective_us * (ranks - 1)

    return [
        gather("collective_gbps", large, *of_large),
        gather("collective_us", less_large, *of_large),
        gather("small_collective_gbps", less_small, *of_small),
        gather("small_collective_us", small, *of_small),
        Sample("all_reduce_gbps", lambda: dist.all_reduce(reduced, group=group), reduced_us),
    ]


def _portable(setting: Setting) -> list[Sample]:
    """The portable main loop with much k, and little, and with few rows; and a call that does next to nothing."""
    variant, sizes = _variant(Mainloop.PORTABLE), setting.sizes
    tile = _tile_of(setting, variant)
    samples = [
        _product(setting, variant, "portable_rate", sizes.deep, tile),
        _product(setting, variant, "portable_tile_us", sizes.shallow, tile),
        _product(setting, variant, "memory_gbps", sizes.few),
    ]
    if setting.peers:
        samples.append(_product(setting, variant, "handshake_us", sizes.tiny))
    return samples


def _tiles(setting: Setting) -> list[Sample]:
    """The portable main loop in other tiles than those of its plan."""
    variant, deep = _variant(Mainloop.PORTABLE), setting.sizes.deep
    others = [tile for tile in _TILES if tile != _tile_of(setting, variant)]
    return [_product(setting, variant, "tile_rates.{}x{}".format(*tile), deep, tile) for tile in others]


def _hopper(setting: Setting) -> list[Sample]:
    """The main loop for Hopper, where tiles' ends count."""
    return [_product(setting, _variant(Mainloop.SM90), "tile_us", setting.sizes.shallow)]


def _variant(mainloop: Mainloop) -> Variant:
    """Return the variant of all-gather whose SMs do nothing but multiply."""
    (found,) = (
        one
        for one in list_variants(_FAMILY)
        if (one.agent, one.mainloop, one.schedule) == (Agent.COPY_ENGINES, mainloop, Schedule.DATA_PARALLEL)
    )
    return found


def _problem(setting: Setting, size: tuple[int, int, int]) -> Any:
    """Return the problem in which a rank multiplies (m, n, k)."""
    m, n, k = size
    ranks = setting.ctx.get_num_ranks()
    return importlib.import_module(f"iris_kernels.{_FAMILY}").Problem(m, n * ranks, k, ranks, _DTYPE)


def _tile_of(setting: Setting, variant: Variant) -> tuple[int, int]:
    """Return the tile of the deep GEMM, by its plan."""
    operator = variant.build(setting.ctx, _problem(setting, setting.sizes.deep))
    config = operator.config
    operator.close()
    return config.block_m, config.block_n


def _product(
    setting: Setting,
    variant: Variant,
    constant: str,
    size: tuple[int, int, int],
    tile: tuple[int, int] | None = None,
) -> Sample:
    """Return a call of a variant, in which a rank multiplies (m, n, k); in these tiles, or those of its plan."""
    problem = _problem(setting, size)
    if reason := variant.unsupported_reason(problem, None):
        raise ValueError(reason)
    operator = variant.build(setting.ctx, problem)
    if tile and tile != (operator.config.block_m, operator.config.block_n):
        block_m, block_n = tile
        of_tile = {"block_m": block_m, "block_n": block_n, "num_warps": warps_of(block_m, block_n), "num_stages": 4}
        config = replace(operator.config, **of_tile, comm_rows=min(operator.config.comm_rows, block_m))
        operator.close()
        operator = variant.build(setting.ctx, problem, config)
    rank = setting.ctx.get_rank()
    a, b = setting.drawn(*problem.a_shape(rank)), setting.drawn(*problem.b_shape(rank)[::-1]).t()
    work = Work(_FAMILY, problem.m, problem.n, problem.k, problem.world_size)

    def us(machine: Machine) -> float:
        rates = machine.tile_rates
        if tile is not None and tile in rates:
            machine = replace(machine, tile_rates={tile: rates[tile]})
        found = predict_us(machine, variant.name, work)
        assert found is not None
        return found

    return Sample(constant, lambda: operator(a, b, m=problem.m), us)


STEPS = (
    Step("launches, copies and the library's GEMM", _library),
    Step("the library's GEMM, hot", _hot),
    Step("links", _links, has_peers=True),
    Step("the library's collectives", _collectives, has_peers=True),
    Step("the portable main loop", _portable),
    Step("other tiles", _tiles),
    Step("the main loop for Hopper", _hopper),
)
