"""The machines whose constants are known: measured, or derived from measured ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .machine import Machine, Sm90, StreamK

# Fitted to 507 tilings of 66 problems on one H200 (mean error 5 %; the tiling that they choose is 0.8 % slower than the
# best in the mean, 8 % at most), but for what storing a partial takes, which was measured alone.
H200_STREAM_K = StreamK(
    read_gbps=117.0,
    stream_gbps=96.0,
    low_stream_gbps=78.0,
    memory_gbps=4270.0,
    sm_tflops=7.0,
    tile_rates={
        (128, 256): 0.96,
        (128, 128): 0.85,
        (64, 128): 0.73,
        (128, 64): 0.42,
        (64, 64): 0.48,
        (32, 128): 0.30,
        (32, 64): 0.177,
        (16, 128): 0.178,
        (16, 64): 0.105,
    },
    least_rate=0.09,
    tile_us=2.5,
    fixup_us=1.85,
    uneven_fixup_us=2.0,
    store_us=0.8,
    store_gbps=40.0,
    load_gbps=37.0,
)

# Those without copies were chosen together, so that of 104 tilings of 37 all-scatters over 4 H200s, in six runs, the
# fastest are predicted to be; the exchange by 14 all-scatters over two H200s that send as four do. Those beside copies
# for 124 schedules of 13 all-gathers over 2 H200s (results/notebook.md). Those of promoted sums are of four products
# over 2 H200s, and of one with scales of blocks: 0.5 to 5 % off; 64 columns were not measured.
H200_SM90 = Sm90(
    sm_tflops=5.8,
    rates={256: 1.0, 128: 1.0, 64: 0.55},
    rates_beside_copies={256: 1.0, 128: 0.98, 64: 0.55},
    promoted_rates={128: 0.9, 64: 0.5},
    block_rates={256: 0.725, 128: 0.605, 64: 0.33},
    tile_us=3.0,
    pingpong_tile_us=1.4,
    store_gbps=345.0,
    exchange_us=14.0,
    exchange_beside_copies_us=4.0,
    copy_gbps=387.0,
    copy_start_us=10.0,
    next_copy_us=7.0,
    beside_copies_us=6.0,
)

# Fitted to the measured times that come with the library, from starting points measured one by one; rates of the link
# as they were measured (`iris-bench model --fit --keep`).
H200X4 = Machine(
    name="h200x4",
    gpu="H200",
    chip="GH100",
    world_size=4,
    is_measured=True,
    is_hopper=True,
    num_sms=132,
    boost_tflops=997.0,
    hot_share=0.741,
    warm_ms=0.217,
    fp32_tflops=45.0,
    portable_rate=0.989,
    tile_us=0.559,
    portable_tile_us=5.29,
    portable_step_us=0.07,
    spare_power=0.246,
    narrow_slowdown=28.6,
    narrow_tile_us=15.0,
    library_narrow_slowdown=6.93,
    launch_us=3.01,
    handshake_us=8.83,
    early_launch_us=1.15,
    hop_us=4.0,
    memory_gbps=3830.0,
    layout_gbps=1670.0,
    align_gbps=4000.0,
    sum_gbps=2840.0,
    link_gbps=361.0,
    peer_gbps=332.0,
    sm_link_gbps=61.0,
    signal_us=3.93,
    narrow_link_gbps=185.0,
    pull_gbps=323.0,
    engine_gbps=378.0,
    engine_narrow_rows_gbps=335.0,
    engine_us=7.15,
    stall_share=0.218,
    collective_gbps=298.0,
    collective_us=8.17,
    small_collective_gbps=118.0,
    small_collective_us=2.78,
    all_reduce_gbps=328.0,
    tile_rates={(128, 256): 1.0, (128, 128): 0.85, (64, 128): 0.6, (64, 64): 0.35},
    stream_k=H200_STREAM_K,
    sm90=H200_SM90,
)

# Two of them multiply twice as much a rank, and send half: what the link does hardly shows, so its rates are those of
# four.
H200X2 = replace(
    H200X4,
    name="h200x2",
    world_size=2,
    boost_tflops=987.0,
    hot_share=0.763,
    warm_ms=0.4,
    portable_rate=0.959,
    tile_us=0.255,
    portable_tile_us=2.91,
    stall_share=0.0822,
    portable_step_us=0.0708,
    spare_power=0.172,
    narrow_slowdown=27.4,
    narrow_tile_us=15.0,
    library_narrow_slowdown=7.14,
    launch_us=3.15,
    handshake_us=8.09,
    early_launch_us=2.21,
    hop_us=2.52,
    memory_gbps=3660.0,
    layout_gbps=1470.0,
    sum_gbps=2450.0,
    signal_us=0.515,
    engine_us=8.84,
    collective_gbps=262.0,
    collective_us=23.0,
    small_collective_gbps=88.6,
    small_collective_us=7.21,
    all_reduce_gbps=296.0,
    pull_gbps=288.0,
)

# The same GPUs behind the same switch. Nothing was measured on eight.
H200X8 = replace(H200X4, name="h200x8", world_size=8, is_measured=False)


def _of_h100s(like: Machine) -> Machine:
    """Return as many H100s as these H200s, without what was measured of them: an early launch is by the fit to one."""
    return replace(
        like,
        name=like.name.replace("h200", "h100"),
        gpu="H100 80GB HBM3",
        is_measured=False,
        early_launch_us=like.early_launch_us * 1.45,
        align_gbps=like.align_gbps * 3.35 / 4.8,
        stream_k=replace(like.stream_k, memory_gbps=like.stream_k.memory_gbps * 3.35 / 4.8),
    )


# The same chip and links (SXM), beside memory that data sheets have at 3.35 TB/s, not 4.8. Two were calibrated, as two
# H200s were: times are longer by the difference, and the rates of waves that read memory, and of copies that change the
# layout, are in the ratio. An early launch is in that of one H100, which was fitted. A trip to the peer took 1.76 times
# as long; with that, calls of 64 rows were predicted 5 to 10 % too long, and without it to 6 %.
H100X2, H100X4, H100X8 = (
    replace(
        _of_h100s(one),
        launch_us=one.launch_us + 0.2,
        memory_gbps=one.memory_gbps * 0.71,
        portable_tile_us=one.portable_tile_us + 0.85,
        tile_us=one.tile_us + 0.9,
        layout_gbps=one.layout_gbps * 0.94,
    )
    for one in (H200X2, H200X4, H200X8)
)

# One by itself was fitted: launches, and the rates of memory, are in these ratios to one H200's.
H100X1 = replace(
    _of_h100s(H200X2),
    name="h100x1",
    world_size=1,
    launch_us=H200X2.launch_us * 2.65,
    memory_gbps=H200X2.memory_gbps * 0.8,
    layout_gbps=H200X2.layout_gbps * 3.35 / 4.8,
)

# From data sheets and public figures: 304 compute units; a link of its own to each of seven peers, of which a copy
# or a kernel that stores to one peer uses one. What no data sheet tells is taken from the H200.
MI300X8 = replace(
    H200X4,
    name="mi300xx8",
    gpu="MI300X",
    chip="MI300X",
    world_size=8,
    is_measured=False,
    is_hopper=False,
    num_sms=304,
    boost_tflops=650.0,
    fp32_tflops=80.0,
    memory_gbps=4000.0,
    link_gbps=310.0,
    peer_gbps=45.0,
    narrow_link_gbps=200.0,
    pull_gbps=290.0,
    is_fully_connected=True,
    engine_gbps=45.0,
    engine_narrow_rows_gbps=45.0,
    collective_gbps=300.0,
    all_reduce_gbps=300.0,
    tile_rates={(128, 128): 1.0, (64, 128): 0.7, (64, 64): 0.45},
    stream_k=replace(H200_STREAM_K, memory_gbps=4000.0, sm_tflops=2.1),
)

# Rates to all peers at once.
_OF_ALL_LINKS = (
    "link_gbps",
    "narrow_link_gbps",
    "pull_gbps",
    "collective_gbps",
    "small_collective_gbps",
    "all_reduce_gbps",
)

MACHINES = {machine.name: machine for machine in (H200X2, H200X4, H200X8, H100X1, H100X2, H100X4, H100X8, MI300X8)}


def machine_for(device_name: str, world_size: int) -> Machine | None:
    """Return the machine whose constants are closest to a device's; None for a GPU that the model does not know.

    Args:
        device_name: as the driver gives it, e.g. "NVIDIA H200".
        world_size: how many of them; constants for another number are taken, as a prediction, where none are for this.
    """
    kin = [machine for machine in MACHINES.values() if machine.has(device_name)]
    if not kin:
        return None
    closest = min(kin, key=lambda machine: abs(machine.world_size - world_size))
    if closest.world_size == world_size:
        return closest
    return replace(_of_ranks(closest, world_size), is_measured=False)


def _of_ranks(machine: Machine, world_size: int) -> Machine:
    """Return so many of the same GPUs; where each peer has a link of its own, fewer have fewer links."""
    changed: dict[str, Any] = {"world_size": world_size}
    if machine.is_fully_connected:
        share = min(1.0, max(1, world_size - 1) / (machine.world_size - 1))
        changed |= {name: share * getattr(machine, name) for name in _OF_ALL_LINKS}
    return replace(machine, **changed)


def assumed_machine(
    gpu: str, world_size: int, *, num_sms: int, l2_bytes: int, is_amd: bool, is_hopper: bool
) -> Machine:
    """Return what is assumed of a machine until it is measured: the nearest that is known, with its own counts.

    Args:
        gpu: the device's name.
        world_size: how many of them.
        num_sms, l2_bytes: of one.
        is_amd, is_hopper: its kind.
    """
    if known := machine_for(gpu, world_size):
        return known
    machines = [MI300X8] if is_amd else [H200X2, H200X4, H200X8]
    nearest = min(machines, key=lambda machine: abs(machine.world_size - world_size))
    return replace(
        _of_ranks(nearest, world_size),
        name=f"{world_size} x {gpu}",
        gpu=gpu,
        chip=gpu,
        is_measured=False,
        is_hopper=is_hopper,
        num_sms=num_sms,
        l2_bytes=l2_bytes,
    )
