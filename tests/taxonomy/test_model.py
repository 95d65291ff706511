"""The cost model: close to what was measured, sound where nothing was, and easy to fit again."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iris_bench.records.record import read_records
from iris_bench.tune.measured import measurements
from overlap_taxonomy import (
    MACHINES,
    Mainloop,
    Work,
    copies_operands,
    explain_us,
    get_variant,
    list_families,
    list_variants,
    machine_for,
    predict_ideal_us,
    predict_us,
)
from overlap_taxonomy.fit import Measurement, error_of, fit, median_errors
from overlap_taxonomy.gemm_cost import gemm, tiles_of
from overlap_taxonomy.machine import Machine

RESULTS = Path(__file__).parents[2] / "results"
SWEEPS = [
    RESULTS / f"{name}-bf16.csv" for name in ("tuning/h200x4", "2026-11-22-h200x4/large", "2026-11-22-h200x4/small-m")
]
H200, H200X2 = MACHINES["h200x4"], MACHINES["h200x2"]


def measured(files: list[Path] = SWEEPS, machine: Machine = H200) -> list[Measurement]:
    return measurements((record for file in files for record in read_records(file)), machine)


def modelled(family: str) -> list[str]:
    work = Work(family, 64, 64, 64, 4)
    return [one.name for one in list_variants(family) if predict_us(H200, one.name, work) is not None]


def test_the_model_is_close_to_the_sweeps() -> None:
    errors = [abs(error) for one in measured() if (error := error_of(H200, one)) is not None]
    assert len(errors) > 800
    assert statistics.median(errors) < 0.08
    medians = median_errors(H200, measured())
    # A kernel for many rows, of which most of these problems have few.
    off = {family for family, variant in medians if medians[family, variant] > 0.17}
    assert off == {"all_gather_gemm", "gemm_reduce_scatter"}
    variants = {variant for family, variant in medians if medians[family, variant] > 0.17}
    assert variants == {"workgroup_specialized:sm90", "warp_specialized:sm90"}


@pytest.mark.parametrize(("ranks", "folder"), [(2, "2026-11-29-h200x2"), (4, "2026-11-22-h200x4")])
def test_the_model_knows_that_a_single_wave_has_the_own_tiles_too(ranks: int, folder: str) -> None:
    """From 256 rows on it is no slower than others: what is predicted of it decides what is chosen."""
    machine = MACHINES[f"h200x{ranks}"]
    few = [one for one in measured([RESULTS / folder / "small-m-bf16.csv"], machine) if one.work.m in (256, 512)]
    medians = median_errors(machine, few)
    assert medians["gemm_reduce_scatter", "warp_specialized:sm90"] < 0.25
    if ranks == 2:  # of four, the sweep has none
        assert medians["gemm_reduce_scatter", "fused_sequential:portable"] < 0.1


def test_the_model_of_two_is_close_to_their_sweeps() -> None:
    machine = MACHINES["h200x2"]
    names = ("2026-11-29-h200x2/llama", "2026-11-29-h200x2/square", "2026-11-29-h200x2/small-m")
    files = [RESULTS / f"{name}-bf16.csv" for name in names]
    errors = [abs(error) for one in measured(files, machine) if (error := error_of(machine, one)) is not None]
    assert len(errors) > 680
    assert statistics.median(errors) < 0.10


@pytest.mark.parametrize(
    ("ranks", "file", "most"),
    [
        (2, "2026-11-29-h200x2/fp8-row", 0.08),
        (4, "2026-11-26-h200x4/fp8-row", 0.06),
        (2, "2026-11-29-h200x2/fp8-block", 0.07),
        (2, "2026-11-29-h200x2/fp8-fast", 0.06),
    ],
)
def test_the_model_is_close_to_fp8(ranks: int, file: str, most: float) -> None:
    """Those that win are predicted better than the others."""
    machine = MACHINES[f"h200x{ranks}"]
    rows = measured([RESULTS / f"{file}.csv"], machine)
    known = [(one, abs(error)) for one in rows if (error := error_of(machine, one)) is not None]
    winners = [error for one, error in known if one.variant in ("warp_specialized:sm90", "copy_engine:sm90")]
    assert len(winners) >= 6
    assert statistics.median(winners) < 0.06
    assert statistics.median(error for _, error in known) < most


def test_the_model_knows_that_who_is_alone_sends_nothing() -> None:
    machine = machine_for("NVIDIA H200", 1)
    assert machine
    rows = measured([RESULTS / "tuning/small-m-bf16-1122-h200x1.csv"], machine)
    few = [one for one in rows if one.work.m in (256, 512)]
    assert median_errors(machine, few)["all_gather_gemm", "workgroup_specialized:sm90"] < 0.13


def test_the_model_of_two_predicts_one_h100() -> None:
    """No constant but launches and the rate of memory is fitted to it."""
    one = machine_for("NVIDIA H100 80GB HBM3", 1)
    assert one is not None
    rows = measured([RESULTS / "tuning/sweep-bf16-1124-h100x1.csv"], one)
    assert len(rows) == 827 + 240  # and the library's GEMM alone
    assert statistics.median(abs(error_of(one, row) or 0) for row in rows) < 0.1
    assert max(median_errors(one, rows).values()) < 0.2


def test_constants_that_are_kept_stay_as_they_are() -> None:
    slower = replace(H200, boost_tflops=H200.boost_tflops * 0.7)
    few = measured()[:20]
    assert fit(slower, few).boost_tflops != slower.boost_tflops
    assert fit(slower, few, keep=["boost_tflops"]).boost_tflops == slower.boost_tflops
    with pytest.raises(ValueError, match="unknown constant 'speed'; known constants: boost_tflops"):
        fit(H200, few, keep=["speed"])


def test_every_variant_with_kernels_is_modelled() -> None:
    assert {one.family for one in list_variants() if one.predict} == set(list_families())
    for variant in list_variants():
        if variant.has_kernels or variant.name == "library":
            assert predict_us(H200, variant.name, Work(variant.family, 64, 64, 64, 4)) is not None, variant


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
@pytest.mark.parametrize("size", [1, 127, 4096])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_every_time_is_positive_and_grows_with_the_work(machine, size: int, world_size: int) -> None:
    for family in list_families():
        for variant in modelled(family):
            us = predict_us(machine, variant, Work(family, size, 2048, 1024, world_size))
            if us is None:
                assert get_variant(family, variant).mainloop is Mainloop.SM90
                assert not machine.is_hopper
                continue
            assert us > 0
            more = predict_us(machine, variant, Work(family, 16 * size, 4 * 2048, 4 * 1024, world_size))
            assert more is not None
            assert more > us


@pytest.mark.parametrize("family", list_families())
def test_no_overlap_is_faster_than_the_link_or_the_multiplication(family: str) -> None:
    """All ranks of 8192 x 8192 x 8192 send a quarter to three peers, and multiply a quarter, whatever the family."""
    work = Work(family, 8192, 8192, 8192, 4)
    link = 3 * 8192 * 2048 * 2 / max(H200.link_gbps, H200.engine_gbps) / 1e3
    multiplication = 2 * 8192**3 / 4 / H200.boost_tflops / 1e6
    for variant in modelled(family):
        us = predict_us(H200, variant, work)
        assert us is not None
        assert us > max(link, multiplication)


def test_each_shard_has_tiles_of_its_own() -> None:
    assert [tiles_of(777, 7168, (128, 256), shards) for shards in (1, 2)] == [7 * 28, 2 * 4 * 28]
    assert tiles_of(3, 7168, (128, 256), 8) == 8 * 28  # kernels number those of ranks without rows, too


@pytest.mark.parametrize(
    ("family", "variant", "size", "us"),
    [
        ("gemm_all_reduce", "warp_specialized:sm90", (128, 8192, 8192), 35.3),  # cut by columns, in tiles of 64
        ("all_gather_gemm", "workgroup_specialized:sm90", (8192, 28672, 8192), 3046.0),  # of 128, not 256
    ],
)
def test_predictions_are_of_the_tiles_that_plans_have(
    family: str, variant: str, size: tuple[int, int, int], us: float
) -> None:
    """As measured over two H200s."""
    assert predict_us(H200X2, variant, Work(family, *size, 2)) == pytest.approx(us, rel=0.1)


@pytest.mark.parametrize(
    ("variant", "us"),
    [
        ("copy_engine:sm90", 113.6),
        ("copy_engine:portable", 117.7),
        ("workgroup_specialized:portable", 113.6),
        ("producer_consumer:portable", 115.4),
        ("bulk_synchronous:portable", 104.7),  # multiplied together, when all have come
    ],
)
def test_shards_that_come_one_after_the_other_read_weights_again(variant: str, us: float) -> None:
    """As measured over two H200s: one wave of tiles, and of 176 MB of weights the L2 cache holds 50."""
    assert predict_us(H200X2, variant, Work("all_gather_gemm", 256, 14336, 12288, 2)) == pytest.approx(us, rel=0.07)


def test_kernels_one_after_the_other_have_waves_of_their_own() -> None:
    """The peers' tiles of 512 rows are a wave, and the own ones another: 280 us over two H200s."""
    work = Work("gemm_reduce_scatter", 512, 8192, 28672, 2)
    us = {name: predict_us(H200X2, f"{name}:portable", work) or 0.0 for name in ("copy_engine", "fused_sequential")}
    assert us["copy_engine"] == pytest.approx(280, rel=0.15)
    assert us["fused_sequential"] == pytest.approx(171, rel=0.15)


def test_ranks_that_push_to_one_owner_at_a_time_wait_for_its_link() -> None:
    """Of several waves; in one, each owner has some of every rank's tiles: 1,125 and 102 us over four H200s."""
    stream_k = "fused_sequential:portable:stream_k"
    for m, k, us in ((8192, 8192, 1125), (512, 28672, 102)):
        assert predict_us(H200, stream_k, Work("gemm_reduce_scatter", m, 8192, k, 4)) == pytest.approx(us, rel=0.1)


def test_the_bytes_of_the_last_wave_are_not_hidden() -> None:
    """One wave of tiles: nothing can be sent beside it."""
    one_wave = Work("gemm_all_scatter", 1024, 4096, 65536, 4)
    slow_link = replace(H200, link_gbps=H200.link_gbps / 2)
    push = 3 * 1024 * 1024 * 2 / H200.link_gbps / 1e3
    for variant in ("warp_specialized:sm90", "fused_sequential:portable"):
        fast, slow = predict_us(H200, variant, one_wave), predict_us(slow_link, variant, one_wave)
        assert fast is not None
        assert slow is not None
        assert slow - fast == pytest.approx(push, rel=1e-6)


def test_of_several_waves_the_last_ones_bytes_alone_are_not_hidden() -> None:
    """1,024 tiles of 128 columns are seven waves of 132 and one of 100."""
    long = Work("gemm_all_scatter", 8192, 8192, 65536, 4)
    slow_link = replace(H200, link_gbps=H200.link_gbps / 2)
    push = 3 * 8192 * 2048 * 2 / H200.link_gbps / 1e3
    fast, slow = (predict_us(machine, "warp_specialized:sm90", long) for machine in (H200, slow_link))
    assert fast is not None
    assert slow is not None
    assert slow - fast == pytest.approx(push * 100 / 1024, rel=1e-6)


def test_a_constant_is_found_again_by_fitting() -> None:
    other = replace(H200, link_gbps=H200.link_gbps * 0.7, handshake_us=H200.handshake_us * 1.5)
    truth = [replace(one, us=predict_us(other, one.variant, one.work) or one.us) for one in measured(SWEEPS[:1])]
    truth = [one for one in truth if one.variant != "async_tp"]
    fitted = fit(H200, truth)
    assert fitted.link_gbps == pytest.approx(other.link_gbps, rel=0.05)
    assert fitted.handshake_us == pytest.approx(other.handshake_us, rel=0.15)
    assert statistics.median(abs(error_of(fitted, one) or 0) for one in truth) < 0.02


def test_machines_are_found_by_the_drivers_name() -> None:
    assert machine_for("NVIDIA H200", 4) is H200
    assert machine_for("NVIDIA H200", 8) is MACHINES["h200x8"]
    assert machine_for("AMD Instinct MI300X", 8) is MACHINES["mi300xx8"]
    assert machine_for("NVIDIA H100 80GB HBM3", 4) is MACHINES["h100x4"]
    others = ["NVIDIA GeForce 256", "NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb", ""]
    for other in (*others, "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert machine_for(other, 4) is None
    assert machine_for("NVIDIA H200", 2) is MACHINES["h200x2"]
    three = machine_for("NVIDIA H200", 3)
    assert three is not None
    assert not three.is_measured


def test_what_is_not_known_is_said() -> None:
    work = Work("gemm_all_scatter", 8, 8, 8, 2)
    assert predict_us(H200, "magic", work) is None
    with pytest.raises(ValueError, match="no model of family 'gemm_all_thumbs'; known families: all_gather_gemm"):
        predict_us(H200, "library", replace(work, family="gemm_all_thumbs"))
    with pytest.raises(ValueError, match="k is 0"):
        replace(work, k=0)


def test_the_model_needs_no_torch() -> None:
    look = "import sys, overlap_taxonomy.fit; sys.exit(bool({'torch', 'triton', 'iris_kernels'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", look], timeout=120).returncode == 0


def test_the_ideal_is_the_longer_of_the_gemm_and_the_bytes() -> None:
    """As measured beside the sweeps, to a few percent where that is the GEMM; and no variant is predicted ahead."""
    long = Work("all_gather_gemm", 8192, 8192, 28672, 4)
    by_bytes = predict_ideal_us(H200, long, 10**9)
    assert by_bytes == pytest.approx(1e6 / max(H200.link_gbps, H200.engine_gbps))
    records = [one for one in read_records(SWEEPS[1]) if one.variant == "gemm_alone" and one.m >= 8192]
    off = defaultdict(list)
    for one in records:
        work = Work(one.family, one.m, one.n, one.k, one.world_size)
        off[one.family].append(abs(predict_ideal_us(H200, work, 0) / one.time_us - 1))
    assert len(off) == 3
    for errors in off.values():
        assert len(errors) > 5
        assert statistics.median(errors) < 0.075
    for family in list_families():
        work = Work(family, 8192, 8192, 28672, 4)
        for variant in ("library", "bulk_synchronous:portable", "workgroup_specialized:portable"):
            assert predict_us(H200, variant, work) > predict_ideal_us(H200, work, 0)


@pytest.mark.parametrize("m", [1, 300, 8192])
def test_the_parts_of_a_time_are_all_of_it(m: int) -> None:
    for variant in list_variants():
        work = Work(variant.family, m, 8192, 8192, 4)
        parts = explain_us(H200, variant.name, work)
        assert (parts is None) == (predict_us(H200, variant.name, work) is None)
        if parts:
            assert parts.us == predict_us(H200, variant.name, work)
            assert parts.work_us + parts.wait_us + parts.latency_us == pytest.approx(parts.us)
            assert min(parts.work_us, parts.link_us, parts.latency_us) > 0
            assert -1e-6 <= parts.wait_us < 1.01 * parts.link_us + 1e-6


@pytest.mark.parametrize("options", [{"k": 8192}, {"k": 4099}, {"k": 8192, "element_bytes": 1, "sums": "promoted"}])
def test_the_link_takes_as_long_however_fast_a_gpu_multiplies(options: dict[str, Any]) -> None:
    fast = H200.with_constants({"boost_tflops": 4 * H200.boost_tflops})
    for variant in list_variants():
        work = Work(variant.family, 2048, 8192, world_size=4, **options)
        parts, others = (explain_us(machine, variant.name, work) for machine in (H200, fast))
        if parts and others:
            assert parts.link_us == pytest.approx(others.link_us, rel=0.01), variant


def test_a_part_is_what_its_constants_make_of_it() -> None:
    """Without overlap the work waits for all bytes; a slower link makes these and the wait longer, and nothing else."""
    work = Work("gemm_all_scatter", 8192, 8192, 8192, 4)
    fast, slow = (
        explain_us(machine, "bulk_synchronous:portable", work)
        for machine in (H200, replace(H200, link_gbps=H200.link_gbps / 2))
    )
    assert fast
    assert slow
    assert fast.link_us == pytest.approx(3 * 8192 * 2048 * 2 / H200.link_gbps / 1e3, rel=1e-3)
    assert fast.wait_us == pytest.approx(fast.link_us, rel=1e-3)
    assert slow.wait_us == pytest.approx(2 * fast.wait_us, rel=1e-3)
    assert (slow.work_us, slow.latency_us) == pytest.approx((fast.work_us, fast.latency_us))
    assert fast.latency_us == pytest.approx(H200.handshake_us + 2 * H200.launch_us)


@pytest.mark.parametrize(
    ("variant", "work", "copies"),
    [
        ("fused_sequential:portable:stream_k", Work("gemm_all_scatter", 8, 4096, 4097, 2), True),
        (
            "fused_sequential:portable:stream_k",
            Work("gemm_all_scatter", 8, 4097, 4096, 2),
            False,
        ),  # B by columns, as weights are
        (
            "fused_sequential:portable:stream_k",
            Work("gemm_all_scatter", 8, 4096, 4097, 2, element_bytes=4),
            False,
        ),  # read through pointers
        ("library", Work("gemm_all_scatter", 8, 4096, 4097, 2), False),
        (
            "copy_engine:portable",
            Work("gemm_reduce_scatter", 8, 4096, 8191, 2),
            True,
        ),  # 4096 on one rank, 4095 on the other
        ("copy_engine:portable", Work("gemm_reduce_scatter", 8, 4096, 8192, 2), False),
        ("copy_engine:portable", Work("a family of others", 8, 4096, 4097, 2), False),
    ],
)
def test_which_calls_begin_with_a_copy(variant: str, work: Work, copies: bool) -> None:
    assert copies_operands(H200X2, variant, work) == copies
    assert not copies_operands(MACHINES["mi300xx8"], variant, work)


def test_narrow_rows_cost_ours_a_copy_and_the_library_much() -> None:
    def us(variant: str, k: int, **options: int) -> float:
        found = predict_us(H200X2, variant, Work("gemm_all_scatter", 8192, 8192, k, 2, **options))
        assert found is not None
        return found

    assert us("library", 4097) > 4 * us("library", 4096)
    assert (
        us("warp_specialized:sm90", 4096) + 30
        < us("warp_specialized:sm90", 4097)
        < 2 * us("warp_specialized:sm90", 4096)
    )
    # Of fp32, which is read through pointers, nothing is known of the library's.
    assert us("library", 4098, element_bytes=4) < 1.1 * us("library", 4096, element_bytes=4)
    assert us("copy_engine:portable", 4098, element_bytes=4) > 4 * us("copy_engine:portable", 4096, element_bytes=4)


def test_a_machine_with_fewer_sms_multiplies_by_as_much_more_slowly() -> None:
    """Six rounds of tiles on 132 SMs are twelve on 66, each as long; what is stored to peers takes as long."""
    half, work = H200.with_sms(66), Work("gemm_all_scatter", 128 * 66, 256 * 48, 8192, 4, 2)
    assert (half.num_sms, half.world_size, half.link_gbps) == (66, 4, H200.link_gbps)
    whole, less = (
        gemm(machine, work, work.m, work.n // 4, work.k, tile=(128, 256))
        for machine in (replace(H200, hot_share=1.0), replace(half, hot_share=1.0))
    )
    assert (less.waves, less.wave_us) == (2 * whole.waves, pytest.approx(whole.wave_us))


def test_two_h100s_are_predicted_by_constants_of_their_own() -> None:
    """Held-out problems fitted none of them; one H100 by itself has others."""
    here = MACHINES["h100x2"]
    assert [machine_for("NVIDIA H100 80GB HBM3", ranks) for ranks in (1, 2)] == [MACHINES["h100x1"], here]
    found = measurements(read_records(RESULTS / "2026-11-28-h100x2" / "auto-held-out-bf16.csv"), here)
    off = sorted(abs(error) for one in found if (error := error_of(here, one)) is not None)
    assert len(off) > 600
    assert statistics.median(off) < 0.055
    assert off[len(off) * 9 // 10] < 0.15
