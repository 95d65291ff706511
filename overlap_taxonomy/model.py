"""The cost model: the predicted time of a call of each variant of each family, from a machine's constants.

A GEMM is waves of tiles over the SMs. What is told apart is what may run beside it, and what cannot: the first wave has
nothing to send, the bytes of the last one leave when there is nothing left to multiply. A call takes the longer of the
work and the communication, and what neither hides; docs/performance.md has the formulas and how far they are off.
"""

from __future__ import annotations

from collections.abc import Callable

from .cost import Gemm, Work, collective_us, copy_us, gemm, push_us
from .machine import Machine

# How the kernels are configured by default, where it shows in the time.
_COMM_SHARES = {
    ("gemm_all_scatter", "producer_consumer"): 12 / 132,
    ("gemm_all_scatter", "workgroup_specialized"): 12 / 132,
    ("all_gather_gemm", "producer_consumer"): 12 / 132,
    ("all_gather_gemm", "workgroup_specialized"): 16 / 132,
    ("all_gather_gemm", "warp_specialized"): 16 / 132,
    ("gemm_reduce_scatter", "producer_consumer"): 16 / 132,
    ("gemm_reduce_scatter", "workgroup_specialized"): 24 / 132,
    ("gemm_all_reduce", "workgroup_specialized"): 24 / 132,
}
_ONE_SHOT_ROWS = 16  # of the lowest tile
_CHUNKS = 8  # of a tile's operands, awaited one after the other
_GATED_RATE = 0.75  # how fast tiles are multiplied whose chunks are awaited, and narrower than others
_PANEL_BYTES = 8 << 20  # the copy engines' pieces are at least so large
_COPIES_AT_ONCE_A_CALL = {"gemm_all_scatter": 4, "gemm_reduce_scatter": 2}  # panels at most, of a rank's part


def predict_us(machine: Machine, variant: str, work: Work) -> float | None:
    """Return the predicted time of a call among others, in µs; None for a variant that is not modelled, or not there.

    Raises:
        ValueError: the model does not know the family.
    """
    if work.family not in FAMILIES:
        raise ValueError(f"no model of family {work.family!r}; known families: {', '.join(FAMILIES)}")
    pattern = FAMILIES[work.family].get(variant)
    if pattern is None or (variant.startswith("warp_specialized") and not machine.is_hopper):
        return None
    return pattern(machine, work)


# GEMM + all-scatter: tiles of C to every peer -----------------------------------------------------------------------


def _scatter_gemm(machine: Machine, work: Work, *, sms: int = 0, kind: str = "portable") -> Gemm:
    return gemm(machine, work, work.m, work.share(work.n), work.k, sms=sms, kind=kind)


def _scattered(work: Work) -> int:
    return work.peers * work.m * work.share(work.n) * work.element_bytes


def _library_scatter(machine: Machine, work: Work) -> float:
    return _library(machine, _scatter_gemm(machine, work, kind="library"), work, _scattered(work))


def _library_scatter_layout(machine: Machine, work: Work) -> float:
    moved = 2 * work.m * work.n * work.element_bytes
    return _library_scatter(machine, work) + moved / machine.layout_gbps / 1e3 + machine.launch_us


def _library_scatter_list(machine: Machine, work: Work) -> float:
    return _library_scatter_layout(machine, work) + machine.launch_us * work.peers


def _bulk_scatter(machine: Machine, work: Work) -> float:
    push = push_us(machine, _scattered(work), narrow=work.is_narrow(work.n))
    return _scatter_gemm(machine, work).us + push + _ends(machine, kernels=2)


def _split_scatter(machine: Machine, work: Work, variant: str) -> float:
    sms = _comm_sms(machine, work, variant)
    own = _scatter_gemm(machine, work, sms=machine.num_sms - sms)
    push = push_us(machine, _scattered(work), narrow=work.is_narrow(work.n), sms=sms)
    return _sent_beside(own, push) + _ends(machine, kernels=1)


def _fused_scatter(machine: Machine, work: Work) -> float:
    own = _scatter_gemm(machine, work)
    push = push_us(machine, _scattered(work), narrow=work.is_narrow(work.n))
    return max(own.us + push * _exposed(machine, own), own.wave_us + push) + _ends(machine, kernels=1)


def _engine_scatter(machine: Machine, work: Work) -> float:
    own = _scatter_gemm(machine, work)
    columns = work.share(work.n) * work.element_bytes
    panels = _panels(work, work.m * columns)
    copies = work.peers * copy_us(machine, work.m * columns / panels, columns)
    return max(own.us + copies, own.us / panels + panels * copies) + _ends(machine, kernels=2)


def _warp_scatter(machine: Machine, work: Work) -> float:
    own = _scatter_gemm(machine, work, kind="specialized")
    push = push_us(machine, _scattered(work), narrow=False)
    return _sent_beside(own, push) + _ends(machine, kernels=1)


def _one_shot_scatter(machine: Machine, work: Work) -> float:
    push = push_us(machine, _scattered(work), narrow=work.is_narrow(work.n))
    return _one_shot(machine, work, work.m, work.share(work.n), work.k) + push


# All-gather + GEMM: shards of A to every peer -----------------------------------------------------------------------


def _gather_gemm(machine: Machine, work: Work, *, sms: int = 0, kind: str = "portable") -> Gemm:
    return gemm(machine, work, work.m, work.share(work.n), work.k, sms=sms, kind=kind)


def _shard_bytes(work: Work) -> int:
    return work.share(work.m) * work.k * work.element_bytes


def _library_gather(machine: Machine, work: Work) -> float:
    return _library(machine, _gather_gemm(machine, work, kind="library"), work, work.peers * _shard_bytes(work))


def _bulk_gather(machine: Machine, work: Work) -> float:
    push = push_us(machine, work.peers * _shard_bytes(work), narrow=work.is_narrow(work.k))
    return _gather_gemm(machine, work).us + push + _ends(machine, kernels=2)


def _fused_gather(machine: Machine, work: Work) -> float:
    own = _gather_gemm(machine, work)
    columns_of_tiles = -(-work.share(work.n) // own.tile_n)
    pull = work.peers * _shard_bytes(work) * columns_of_tiles / machine.pull_gbps / 1e3
    return max(own.us, pull) + own.wave_us + _ends(machine, kernels=1)


def _split_gather(machine: Machine, work: Work, variant: str) -> float:
    sms = _comm_sms(machine, work, variant)
    arrival = push_us(machine, _shard_bytes(work), narrow=work.is_narrow(work.k), sms=sms, to_one=True)
    own = _gather_gemm(machine, work, sms=machine.num_sms - sms)
    return _as_shards_come(own, work, arrival) + _ends(machine, kernels=1)


def _warp_gather(machine: Machine, work: Work) -> float:
    sms = _comm_sms(machine, work, "warp_specialized")
    rows = _rows_in_tiles(work)
    own = gemm(machine, work, rows, work.share(work.n), work.k, sms=machine.num_sms - sms, kind="specialized")
    push = push_us(machine, work.peers * _shard_bytes(work), narrow=False, sms=sms)
    return max(own.us / _GATED_RATE, push + own.wave_us / _CHUNKS) + _ends(machine, kernels=1)


def _engine_gather(machine: Machine, work: Work, kind: str = "portable") -> float:
    own = _gather_gemm(machine, work, sms=machine.num_sms - 1, kind=kind)
    arrival = copy_us(machine, _shard_bytes(work), 512)  # a shard is contiguous
    return _as_shards_come(own, work, arrival) + _ends(machine, kernels=2)


def _one_shot_gather(machine: Machine, work: Work) -> float:
    push = push_us(machine, work.peers * _shard_bytes(work), narrow=work.is_narrow(work.k))
    return _one_shot(machine, work, work.m, work.share(work.n), work.k) + push


# GEMM + reduce-scatter: partial tiles of C, each to its owner -------------------------------------------------------


def _partial_gemm(machine: Machine, work: Work, *, sms: int = 0, kind: str = "portable") -> Gemm:
    return gemm(machine, work, work.m, work.n, work.share(work.k), sms=sms, kind=kind)


def _reduced(work: Work) -> int:
    return work.peers * work.share(work.m) * work.n * work.element_bytes


def _library_reduce(machine: Machine, work: Work) -> float:
    return _library(machine, _partial_gemm(machine, work, kind="library"), work, _reduced(work))


def _bulk_reduce(machine: Machine, work: Work) -> float:
    return _partial_gemm(machine, work).us + _pull_us(machine, work) + _ends(machine, kernels=2)


def _split_reduce(machine: Machine, work: Work, variant: str) -> float:
    own, push = _split_partials(machine, work, variant)
    return max(own.us, own.wave_us + push + own.wave_us) + _sum_us(machine, work) + _ends(machine, kernels=1)


def _fused_reduce(machine: Machine, work: Work) -> float:
    own = _partial_gemm(machine, work)
    push = push_us(machine, _reduced(work), narrow=work.is_narrow(work.n), to_one=True)
    sent = max(own.us, own.wave_us + push + own.wave_us)
    return sent + _sum_us(machine, work) + _ends(machine, kernels=1)


def _engine_reduce(machine: Machine, work: Work) -> float:
    own = _partial_gemm(machine, work)
    shard, row_bytes = _reduced(work) / max(1, work.peers), work.n * work.element_bytes
    panels = _panels(work, shard)
    copies = work.peers * panels * copy_us(machine, shard / panels, row_bytes if row_bytes % 16 else 512)
    first = own.us / (work.world_size * panels)
    return max(own.us, first + copies + first) + _sum_us(machine, work) + _ends(machine, kernels=3)


def _warp_reduce(machine: Machine, work: Work) -> float:
    own = gemm(machine, work, _rows_in_tiles(work), work.n, work.share(work.k), kind="specialized")
    push = push_us(machine, _reduced(work), narrow=False, to_one=True)
    return max(own.us, own.wave_us + push + own.wave_us) + _sum_us(machine, work) + _ends(machine, kernels=1)


def _one_shot_reduce(machine: Machine, work: Work) -> float:
    push = push_us(machine, _reduced(work), narrow=work.is_narrow(work.n))
    return _one_shot(machine, work, work.m, work.n, work.share(work.k)) + push + _sum_us(machine, work)


# GEMM + all-reduce: as reduce-scatter, and the sums to every peer; or partial tiles to every peer ------------------


def _library_all_reduce(machine: Machine, work: Work) -> float:
    own = _partial_gemm(machine, work, kind="library")
    return own.us + collective_us(machine, work, 2 * _reduced(work), gbps=machine.all_reduce_gbps) + machine.launch_us


def _bulk_all_reduce(machine: Machine, work: Work) -> float:
    sums = push_us(machine, _reduced(work), narrow=work.is_narrow(work.n))
    return _bulk_reduce(machine, work) + sums


def _split_all_reduce(machine: Machine, work: Work, variant: str) -> float:
    own, push = _split_partials(machine, work, variant)
    sums = push_us(machine, _reduced(work), narrow=work.is_narrow(work.n))
    sent = max(own.us * work.peers / work.world_size, own.wave_us + push)
    summed = max(own.us / work.world_size, own.wave_us + sums)
    return sent + summed + _sum_us(machine, work) + _ends(machine, kernels=1)


def _fused_all_reduce(machine: Machine, work: Work) -> float:
    return _partial_gemm(machine, work).us + _exchange_us(machine, work) + _ends(machine, kernels=1)


def _one_shot_all_reduce(machine: Machine, work: Work) -> float:
    return _one_shot(machine, work, work.m, work.n, work.share(work.k)) + _exchange_us(machine, work)


def _exchange_us(machine: Machine, work: Work) -> float:
    """Partial sums of all of C to every peer, and those of all ranks added."""
    whole = work.m * work.n * work.element_bytes
    push = push_us(machine, work.peers * whole, narrow=work.is_narrow(work.n))
    return push + work.world_size * whole / machine.sum_gbps / 1e3


# What they share ----------------------------------------------------------------------------------------------------


def _library(machine: Machine, own: Gemm, work: Work, sent: int) -> float:
    return own.us + collective_us(machine, work, sent) + machine.launch_us


def _one_shot(machine: Machine, work: Work, m: int, n: int, k: int) -> float:
    """A GEMM whose tiles programs share, and what its one kernel waits for: all SMs read, or multiply slowly."""
    rows = -(-m // _ONE_SHOT_ROWS) * _ONE_SHOT_ROWS
    tflops = machine.boost_tflops * min(machine.tile_rates.values())
    if work.element_bytes > 2:
        tflops = machine.fp32_tflops
    if work.is_narrow(k):
        tflops /= machine.narrow_slowdown
    read_us = work.element_bytes * (m * k + k * n + m * n) / machine.memory_gbps / 1e3
    multiply_us = 2.0 * rows * n * k / tflops / 1e6
    return max(read_us, multiply_us) + machine.split_us + machine.hop_us + machine.launch_us


def _rows_in_tiles(work: Work) -> int:
    """The rows that are multiplied where every shard of rows is cut into tiles of its own, of 128 rows."""
    return work.world_size * -(-work.share(work.m) // 128) * 128


def _ends(machine: Machine, *, kernels: int) -> float:
    return machine.handshake_us + kernels * machine.launch_us


def _comm_sms(machine: Machine, work: Work, variant: str) -> int:
    return max(1, round(machine.num_sms * _COMM_SHARES[work.family, variant]))


def _panels(work: Work, part_bytes: float) -> int:
    return max(1, min(_COPIES_AT_ONCE_A_CALL[work.family], int(part_bytes) // _PANEL_BYTES))


def _sent_beside(own: Gemm, push: float) -> float:
    """Tiles leave while the next are multiplied: the first wave sends nothing, the last one's leave after it."""
    return max(own.us + push * own.last_share, own.wave_us + push)


def _exposed(machine: Machine, own: Gemm) -> float:
    """The part of the stores that a program which stores its own tile cannot hide: all of it in the last wave."""
    return machine.stall_share + (1 - machine.stall_share) / own.waves


def _as_shards_come(own: Gemm, work: Work, arrival_us: float) -> float:
    """Shards are multiplied in the order of their arrival, the own one first; SMs wait for what has not come."""
    shard_waves = -(-own.waves // work.world_size)
    end = 0.0
    for distance in range(work.world_size):
        end = max(
            end + own.us / work.world_size, distance * arrival_us + (shard_waves * own.wave_us if distance else 0)
        )
    return end


def _split_partials(machine: Machine, work: Work, variant: str) -> tuple[Gemm, float]:
    """The GEMM on the SMs that multiply, and what the others take to send and announce the peers' partial tiles."""
    sms = _comm_sms(machine, work, variant)
    own = _partial_gemm(machine, work, sms=machine.num_sms - sms)
    narrow = work.is_narrow(work.n)
    return own, push_us(machine, _reduced(work), narrow=narrow, sms=sms, piece_bytes=own.tile_bytes, to_one=True)


def _sum_us(machine: Machine, work: Work) -> float:
    """Adding the peers' partials in the own tiles' epilogue."""
    return _reduced(work) / machine.sum_gbps / 1e3


def _pull_us(machine: Machine, work: Work) -> float:
    slower = machine.link_gbps / machine.narrow_link_gbps if work.is_narrow(work.n) else 1.0
    return _reduced(work) * slower / machine.pull_gbps / 1e3


Pattern = Callable[[Machine, Work], float]


def _named(pattern: Callable[[Machine, Work, str], float], variant: str) -> Pattern:
    return lambda machine, work: pattern(machine, work, variant)


FAMILIES: dict[str, dict[str, Pattern]] = {
    "gemm_all_scatter": {
        "library": _library_scatter,
        "library_layout": _library_scatter_layout,
        "library_list": _library_scatter_list,
        "bulk_synchronous": _bulk_scatter,
        "producer_consumer": _named(_split_scatter, "producer_consumer"),
        "fused_sequential": _fused_scatter,
        "workgroup_specialized": _named(_split_scatter, "workgroup_specialized"),
        "copy_engine": _engine_scatter,
        "warp_specialized": _warp_scatter,
        "one_shot": _one_shot_scatter,
    },
    "all_gather_gemm": {
        "library": _library_gather,
        "bulk_synchronous": _bulk_gather,
        "producer_consumer": _named(_split_gather, "producer_consumer"),
        "fused_sequential": _fused_gather,
        "workgroup_specialized": _named(_split_gather, "workgroup_specialized"),
        "copy_engine": _engine_gather,
        "warp_specialized": _warp_gather,
        "warp_specialized_copies": lambda machine, work: _engine_gather(machine, work, "specialized"),
        "one_shot": _one_shot_gather,
    },
    "gemm_reduce_scatter": {
        "library": _library_reduce,
        "bulk_synchronous": _bulk_reduce,
        "producer_consumer": _named(_split_reduce, "producer_consumer"),
        "fused_sequential": _fused_reduce,
        "workgroup_specialized": _named(_split_reduce, "workgroup_specialized"),
        "copy_engine": _engine_reduce,
        "warp_specialized": _warp_reduce,
        "one_shot": _one_shot_reduce,
    },
    "gemm_all_reduce": {
        "library": _library_all_reduce,
        "bulk_synchronous": _bulk_all_reduce,
        "fused_sequential": _fused_all_reduce,
        "one_shot": _one_shot_all_reduce,
        "workgroup_specialized": _named(_split_all_reduce, "workgroup_specialized"),
    },
}
