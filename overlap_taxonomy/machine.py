"""What the cost model knows of a machine: a handful of measured constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class StreamK:
    """What multiplying tiles costs where programs split them (stream-K): of an SM, and of a partial sum.

    Args:
        read_gbps: operands into an SM from the L2 cache.
        stream_gbps: the same where the weights come from memory for it alone.
        low_stream_gbps: the same where the tile has 16 or 32 rows, too.
        memory_gbps: weights into all of them.
        sm_tflops: an SM multiplying 2-byte operands.
        tile_rates: how fast each tile multiplies, relative to that.
        least_rate: of all other tiles.
        tile_us: from a tile's first load to its first multiplication, and from its last to its stored tile.
        fixup_us: to wait for the other splits of a tile, of which there is a known number.
        uneven_fixup_us: the same where there is not.
        store_us: to store a partial sum, beside its bytes.
        store_gbps, load_gbps: at which a program stores and loads them.
    """

    read_gbps: float
    stream_gbps: float
    low_stream_gbps: float
    memory_gbps: float
    sm_tflops: float
    tile_rates: Mapping[tuple[int, int], float]
    least_rate: float
    tile_us: float
    fixup_us: float
    uneven_fixup_us: float
    store_us: float
    store_gbps: float
    load_gbps: float


@dataclass(frozen=True)
class Sm90:
    """What tiles of 128 rows cost in the sm90 main loop, by which its kernels choose tilings.

    Args:
        sm_tflops: an SM multiplying the widest tile, in calls so long that the GPU is hot.
        rates: how fast tiles of other widths multiply, relative to that.
        rates_beside_copies: the same where no stores to peers hold the narrower ones up.
        promoted_rates: the same of fp8 whose sums are promoted, counted as half as many elements of two bytes.
        block_rates: the same where each block of k has scales of its own.
        tile_us: what a tile takes beside its multiplication.
        pingpong_tile_us: the same where two warp groups multiply in turns.
        store_gbps: stores of all SMs to peers.
        exchange_us: of the partial sums of a split tile of 128 columns, where tiles are sent.
        exchange_beside_copies_us: the same where none are.
        copy_gbps: a copy engine.
        copy_start_us: until its first byte is copied, and from its last until it is seen.
        next_copy_us: between copies.
        beside_copies_us: a launch, the last tile's store, and the barrier at the end.
    """

    sm_tflops: float
    rates: Mapping[int, float]
    rates_beside_copies: Mapping[int, float]
    promoted_rates: Mapping[int, float]
    block_rates: Mapping[int, float]
    tile_us: float
    pingpong_tile_us: float
    store_gbps: float
    exchange_us: float
    exchange_beside_copies_us: float
    copy_gbps: float
    copy_start_us: float
    next_copy_us: float
    beside_copies_us: float


@dataclass(frozen=True, eq=False)
class Machine:
    """The constants of a kind of GPU and of what joins several of them. Rates are of one GPU.

    Each is equal to itself alone, so that what is computed of it can be kept.

    Args:
        name: what the command line calls it.
        gpu: how the device's name ends, as its driver gives it.
        chip: GPUs of one chip are alike: what is measured on one says something of the other.
        world_size: ranks that the constants are for.
        is_measured: False where they are taken from data sheets or from another machine: what follows is a prediction.
        is_hopper: whether the warp-specialised kernels run there.
        num_sms: SMs, or compute units.
        boost_tflops: all SMs multiplying 2-byte operands, in a short call.
        hot_share: what is left of that in calls so long that the power limit holds the clock down.
        warm_ms: length of a call, among others back to back, by which two thirds of that is lost.
        fp32_tflops: all SMs multiplying fp32 exactly.
        tile_rates: how fast each tile of 2-byte operands multiplies, relative to `boost_tflops`: 8192x2048x8192 on an
            H200, where 128x256 with 8 warps runs at cuBLAS speed. Plans choose tiles by those of an H200.
        portable_rate: our portable kernels' main loop against the library's and the warp-specialised one.
        tile_us: what a tile costs beside its multiplications, in a kernel that overlaps its epilogue.
        library_tile_us: the same of the library's.
        portable_tile_us: the same for a 128x256 tile in our portable kernels, which do not.
        portable_step_us: what a step of k waits for its loads in our portable kernels, beside the loads' bytes: with
            tiles of 64x64, whose multiplications take 0.1 µs per step, 64 to 512 rows take 0.31 µs per step, and with
            128x128 0.42. The sm90 main loop has more steps under way.
        spare_power: what fewer SMs gain in clock, as a power of how many fewer: all of them reach the power limit.
        narrow_slowdown: how much slower our kernels multiply through pointers where A's rows are not on 16 bytes.
        narrow_tile_us: `portable_tile_us` where the output's are not.
        library_narrow_slowdown: how much slower the library's multiply where A's rows are not.
        fp8_library_rates, fp8_sm90_rates, fp8_portable_rates: of twice bf16's rate in long calls, that of fp8 by the
            library and by the main loops here, in their widest tiles, by how sums are kept (`Work.sums`).
        launch_us: from one kernel to the next on a stream.
        handshake_us: of a call of ours: telling the peers to be ready and done, and hearing of it.
        early_launch_us: the same where the kernel after is launched early, as with stream-K.
        hop_us: with stream-K, from the first store of something small to a peer to the peer's knowing of it.
        memory_gbps: kernels that multiply tiles, in waves, reading their own memory.
        l2_bytes: of weights that stay in the L2 cache.
        layout_gbps: a copy that changes the layout: bytes read and written.
        align_gbps: a copy of operands to rows on 16 bytes, read and written.
        sum_gbps: partial sums read and added in an epilogue.
        link_gbps: SMs storing to all peers at once.
        peer_gbps: SMs storing to one peer; less where each peer has a link of its own.
        is_fully_connected: whether each has: what goes to one peer at a time then has one link's rate, and copies to
            different peers are made at once. Otherwise all share one port, which a copy fills.
        sm_link_gbps: one SM storing to peers.
        sm_tma_gbps: one warp of an SM sending tiles to peers by TMA: 8 SMs took 126 µs for 25 MB to three peers.
        signal_us: what an SM that sends whole tiles waits for each to arrive.
        narrow_link_gbps: all SMs storing to all peers, 2 bytes at a time.
        pull_gbps: SMs loading from peers.
        engine_gbps: a copy engine, contiguous rows.
        engine_narrow_rows_gbps: the same for rows that are not multiples of 512 bytes.
        engine_us: before a copy starts, or what follows it.
        stall_share: of the time in which a program stores its tile to peers, what it cannot hide behind others'.
        collective_gbps, collective_us: the library's collectives on large buffers: rate, and latency for each peer.
        small_collective_gbps, small_collective_us: the same on small ones, where it uses another protocol.
        all_reduce_gbps: `collective_gbps` of an all-reduce, whose bytes go round twice.
        stream_k: what tiles cost that programs split.
        sm90: what tiles cost in the sm90 main loop. Plans are made by an H200's.
    """

    name: str
    gpu: str
    chip: str
    world_size: int
    is_measured: bool
    is_hopper: bool
    num_sms: int
    boost_tflops: float
    hot_share: float
    warm_ms: float
    fp32_tflops: float
    portable_rate: float
    tile_us: float
    portable_tile_us: float
    portable_step_us: float
    spare_power: float
    narrow_slowdown: float
    narrow_tile_us: float
    library_narrow_slowdown: float
    launch_us: float
    handshake_us: float
    early_launch_us: float
    hop_us: float
    memory_gbps: float
    layout_gbps: float
    align_gbps: float
    sum_gbps: float
    link_gbps: float
    peer_gbps: float
    sm_link_gbps: float
    signal_us: float
    narrow_link_gbps: float
    pull_gbps: float
    engine_gbps: float
    engine_narrow_rows_gbps: float
    engine_us: float
    stall_share: float
    collective_gbps: float
    collective_us: float
    small_collective_gbps: float
    small_collective_us: float
    all_reduce_gbps: float
    tile_rates: Mapping[tuple[int, int], float]
    stream_k: StreamK
    sm90: Sm90
    is_fully_connected: bool = False
    library_tile_us: float = 1.92
    l2_bytes: int = 40 << 20
    sm_tma_gbps: float = 30.0
    fp8_library_rates: Mapping[str, float] = field(
        default_factory=lambda: {"promoted": 0.95, "fast": 1.05, "block": 0.81}
    )
    fp8_sm90_rates: Mapping[str, float] = field(default_factory=lambda: {"promoted": 0.94, "fast": 1.04, "block": 0.74})
    fp8_portable_rates: Mapping[str, float] = field(
        default_factory=lambda: {"promoted": 0.65, "fast": 1.0, "block": 0.43}
    )

    def has(self, device_name: str) -> bool:
        """Return whether its GPUs are of that name: a GH200, an H200 NVL or a part of an H200 is no H200."""
        return f" {device_name}".endswith(f" {self.gpu}")

    def with_sms(self, num_sms: int) -> Machine:
        """Return the same machine with so many SMs, each as fast, on the same links: others have the rest."""
        share = num_sms / self.num_sms
        boost_tflops, fp32_tflops = self.boost_tflops * share, self.fp32_tflops * share
        return replace(self, num_sms=num_sms, boost_tflops=boost_tflops, fp32_tflops=fp32_tflops)

    def constant(self, name: str) -> float:
        """Return a constant: "link_gbps", "stream_k.memory_gbps", "tile_rates.128x256".

        Raises:
            ValueError: there is none of this name.
        """
        part, _, rest = name.partition(".")
        found = getattr(self, part, None)
        if part == "tile_rates":
            found = self.tile_rates.get(_tile_of(rest))
        elif rest:
            found = getattr(found, rest, None)
        if not isinstance(found, float):
            raise ValueError(f"unknown constant {name!r}")
        return found

    def with_constants(self, values: Mapping[str, float]) -> Machine:
        """Return the same machine with other constants, by the names that `constant` takes; ValueError for others."""
        machine = self
        for name, value in values.items():
            machine.constant(name)
            part, _, rest = name.partition(".")
            changed: Any = {part: value}
            if part == "tile_rates":
                changed = {part: {**machine.tile_rates, _tile_of(rest): value}}
            elif rest:
                of_part: Any = {rest: value}
                changed = {part: replace(getattr(machine, part), **of_part)}
            machine = replace(machine, **changed)
        return machine

    def without_latency(self) -> Machine:
        """Return the same machine whose launches, signals and trips take no time."""
        return self._changed(0.0, *_LATENCIES)

    def without_links(self) -> Machine:
        """Return the same machine whose bytes to peers take no time."""
        return self._changed(_AT_ONCE, *_LINKS)

    def without_work(self) -> Machine:
        """Return the same machine whose SMs multiply, and move their own memory, in no time."""
        stream_k: Any = {name: _AT_ONCE * getattr(self.stream_k, name) for name in _STREAM_K_RATES}
        stream_k |= dict.fromkeys(_STREAM_K_TIMES, 0.0)
        changed = self._changed(_AT_ONCE, *_WORK)._changed(0.0, *_TILES)
        return replace(changed, stream_k=replace(self.stream_k, **stream_k))

    def _changed(self, factor: float, *names: str) -> Machine:
        changed: Any = {name: factor * getattr(self, name) for name in names}
        return replace(self, **changed)

    def has_descriptors(self, element_bytes: int) -> bool:
        """Return whether our kernels read elements of that size by tensor descriptors; fp32 goes through pointers."""
        return self.is_hopper and element_bytes <= 2


def _tile_of(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    return (int(rows), int(columns)) if rows.isdecimal() and columns.isdecimal() else (0, 0)


_AT_ONCE = 1e9  # times as fast as it is
_LATENCIES = (
    *("launch_us", "early_launch_us", "handshake_us", "hop_us", "signal_us", "engine_us"),
    *("collective_us", "small_collective_us"),
)
_LINKS = (
    *("link_gbps", "peer_gbps", "sm_link_gbps", "sm_tma_gbps", "narrow_link_gbps", "pull_gbps", "engine_gbps"),
    *("engine_narrow_rows_gbps", "collective_gbps", "small_collective_gbps", "all_reduce_gbps"),
)
_WORK = ("boost_tflops", "fp32_tflops", "memory_gbps", "layout_gbps", "align_gbps", "sum_gbps")
_TILES = ("tile_us", "library_tile_us", "portable_tile_us", "portable_step_us", "narrow_tile_us")
_STREAM_K_RATES = ("read_gbps", "stream_gbps", "low_stream_gbps", "memory_gbps", "sm_tflops", "store_gbps", "load_gbps")
_STREAM_K_TIMES = ("tile_us", "fixup_us", "uneven_fixup_us", "store_us")
