"""`auto`: the fastest of what is known, never ours without a margin, and the same on every rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from choosing import CONFIG, FAMILY, GPU, problem
from families import dtype_and_options, make_problem

from iris_kernels.common.choice import auto, corrections, ranking
from iris_kernels.common.choice.corrections import NOISE, SPREAD
from iris_kernels.common.choice.knowledge import Knowledge
from iris_kernels.common.choice.measured import Key, Measured, Table, key_of, shipped_table, shipped_tables
from iris_kernels.common.choice.ranking import CAUTION, CLOSE, Ranking, _without_close_ones, work_of
from iris_kernels.common.hopper import host as hopper
from iris_kernels.common.problem import Problem
from overlap_taxonomy import Choice, Work, get_variant, list_variants, machine_for, predict_us

SHIPPED = pytest.mark.parametrize("gpu", [GPU, "NVIDIA H100 80GB HBM3"])
CANDIDATES = ["library_layout", "fused_sequential:portable", "copy_engine:portable"]


def choose(
    family: str,
    asked: Problem,
    candidates: Sequence[str],
    *,
    gpu: str = GPU,
    tables: tuple[Table, Table] = ({}, {}),
    num_sms: int | None = None,
) -> Choice:
    """What is chosen where the user's cache has the first of these tables, and the library the second."""
    known = Knowledge(gpu, tables[0], {gpu: tables[1]})
    return Ranking(known, family, asked, candidates, num_sms).choices().of(asked.m)


def chosen(times: dict[str, float], shipped: dict[str, float] | None = None, **more: Any) -> Choice:
    """What is chosen where the user's cache has these times, and the library those."""
    key = key_of(FAMILY, problem())
    tables = ({key: Measured(times, **more)} if times else {}, {key: Measured(shipped)} if shipped else {})
    return choose(FAMILY, problem(), CANDIDATES, tables=tables)


def test_the_fastest_is_chosen_if_the_noise_of_measured_times_does_not_explain_it() -> None:
    for ours_us, name in ((100.5, "library_layout"), (99.5, "library_layout"), (98.5, "copy_engine:portable")):
        times = {"library_layout": 100.0, "copy_engine:portable": ours_us, "fused_sequential:portable": 105.0}
        assert chosen(times).variant == name
    assert math.exp(-CAUTION * NOISE) == pytest.approx(0.99, abs=1e-3)


def test_the_users_times_come_first_then_the_shipped_ones() -> None:
    ours, theirs = (
        {"library_layout": 100.0, "copy_engine:portable": 90.0},
        {"library_layout": 100.0, "fused_sequential:portable": 50.0},
    )
    assert chosen(ours, theirs) == Choice("copy_engine:portable", None, "measured here")
    assert chosen({}, theirs) == Choice("fused_sequential:portable", None, "measured")


def test_the_configuration_that_was_measured_is_used() -> None:
    times = {"library_layout": 100.0, "copy_engine:portable": 90.0}
    assert chosen(times, configs={"copy_engine:portable": CONFIG}).config == CONFIG
    # One that the variant cannot do (any more) is not: the next that is known decides.
    bad = replace(CONFIG, block_m=48)
    assert chosen(
        times,
        {"library_layout": 1.0, "copy_engine:portable": 2.0, "fused_sequential:portable": 2.0},
        configs={"copy_engine:portable": bad},
    ) == Choice("library_layout", None, "measured")


def test_measured_times_without_the_librarys_decide_nothing() -> None:
    shipped = {"library_layout": 10.0, "copy_engine:portable": 20.0, "fused_sequential:portable": 20.0}
    assert chosen({"copy_engine:portable": 1.0}, shipped).variant == "library_layout"


def test_a_variant_younger_than_the_shipped_times_is_taken_where_problems_like_it_say_so() -> None:
    """By more than the doubt; where its user measured, only what has a time."""
    times = {"library_layout": 100.0, "copy_engine:portable": 98.0}
    with predicted({"library_layout": 100.0, "copy_engine:portable": 100.0, "fused_sequential:portable": 100.0}):
        for near_us, name in ((80.0, "fused_sequential:portable"), (95.0, "copy_engine:portable")):
            like = Measured({**times, "fused_sequential:portable": near_us})
            table = {key_of(FAMILY, problem()): Measured(times), key_of(FAMILY, problem(m=6144)): like}
            assert choose(FAMILY, problem(), CANDIDATES, tables=({}, table)).variant == name
            assert choose(FAMILY, problem(), CANDIDATES, tables=(table, {})).variant == "copy_engine:portable"


def test_a_younger_variant_is_said_to_be_like_others_only_where_it_was_measured_near() -> None:
    times = {"library_layout": 100.0, "copy_engine:portable": 98.0}
    for elsewhere, why in ((6144, "predicted by problems like it"), (1, "predicted")):
        like = Measured({**times, "fused_sequential:portable": 50.0})
        table = {key_of(FAMILY, problem()): Measured(times), key_of(FAMILY, problem(m=elsewhere)): like}
        with predicted({**times, "fused_sequential:portable": 50.0}):
            assert choose(FAMILY, problem(), CANDIDATES, tables=({}, table)) == Choice(CANDIDATES[1], None, why)


def test_a_variant_that_is_no_candidate_is_not_chosen() -> None:
    assert chosen({"library_layout": 100.0, "warp_specialized:sm90": 1.0}).variant == "library_layout"


def test_other_sizes_dtypes_and_worlds_are_other_problems() -> None:
    table = {key_of(FAMILY, problem()): Measured({"library_layout": 1.0, "copy_engine:portable": 100.0})}
    for other in (problem(m=512), problem(world_size=2)):
        assert choose(FAMILY, other, CANDIDATES, gpu=GPU, tables=(table, {})).why == "predicted"
    in_fp32 = choose(FAMILY, problem(dtype=torch.float32), CANDIDATES, gpu=GPU, tables=(table, {}))
    assert in_fp32 == Choice("library_layout", None, "nothing like it was measured in fp32")


def test_problems_like_it_correct_what_is_predicted() -> None:
    like = Measured({"library_layout": 1000.0, "copy_engine:portable": 10.0, "fused_sequential:portable": 1000.0})
    unlike = Measured({"library_layout": 10.0, "copy_engine:portable": 1000.0, "fused_sequential:portable": 1000.0})
    for measured, name in ((like, "copy_engine:portable"), (unlike, "library_layout")):
        table = {key_of(FAMILY, problem(m=6144)): measured}
        choice = choose(FAMILY, problem(), CANDIDATES, gpu=GPU, tables=({}, table))
        assert choice == Choice(name, None, "predicted by problems like it")
        assert (
            choose(FAMILY, problem(), CANDIDATES, gpu=GPU, tables=(table, {key_of(FAMILY, problem(m=6144)): like}))
            == choice
        )


def predicted(times: dict[str, float]) -> Any:
    """Have the model predict these times, whatever the problem."""
    return mock.patch.object(corrections, "predict_us", lambda machine, name, work: times.get(name, 1000.0))


@pytest.mark.parametrize("gpu", [GPU, "AMD Instinct MI300X"])
def test_where_nothing_was_measured_the_model_must_promise_more(gpu: str) -> None:
    promised = math.exp(-CAUTION * SPREAD)
    for ours_us, name in ((105 * promised, "library_layout"), (95 * promised, "copy_engine:portable")):
        with predicted({"library_layout": 100.0, "copy_engine:portable": ours_us}):
            assert choose(FAMILY, problem(), CANDIDATES, gpu=gpu) == Choice(name, None, "predicted")


def test_the_nearer_a_measured_problem_is_the_less_the_model_must_promise() -> None:
    """Those that were measured took as long as the model says, the fused one a little less than the library's."""
    times = {"library_layout": 100.0, "copy_engine:portable": 96.0, "fused_sequential:portable": 100.0}
    with predicted(times):
        for m, name in ((6144, "copy_engine:portable"), (1, "library_layout")):
            table = {key_of(FAMILY, problem(m=m)): Measured(times)}
            assert choose(FAMILY, problem(), CANDIDATES, tables=({}, table)).variant == name


def test_of_two_that_promise_the_same_the_one_that_is_better_known_is_chosen() -> None:
    times = {"library_layout": 100.0, "copy_engine:portable": 60.0, "fused_sequential:portable": 60.0}
    for known in CANDIDATES[1:]:
        table = {key_of(FAMILY, problem(m=6144)): Measured({name: times[name] for name in ("library_layout", known)})}
        with predicted(times):
            assert choose(FAMILY, problem(), CANDIDATES, tables=({}, table)).variant == known


def test_a_variant_whose_gains_are_small_everywhere_is_not_made() -> None:
    """Of baseline, two that gain much, and one that gains 2 or 5 % over them at one number of rows."""
    for gain in (0.02, 0.05):
        may_be = np.array([[0.0, 0.0, 0.0, -0.9], [-0.3, -0.2, -0.2, 0.0], [-0.1, -0.2, -0.3, 0.0], [-0.1] * 4])
        may_be[3, 1] = -0.2 - gain
        taken = may_be.argsort(axis=0, kind="stable")[0]
        assert taken.tolist() == [1, 3, 2, 0]
        without = _without_close_ones(may_be, taken).tolist()
        assert without == ([1, 1, 2, 0] if gain < CLOSE else [1, 3, 2, 0])


def test_what_is_taken_for_some_rows_does_not_depend_on_those_that_were_asked_for_first() -> None:
    """Ranks may ask in another order, and one alone: all must take the same."""
    known, sizes = Knowledge(GPU, {}, shipped_tables(GPU)), (37, 300, 777, 5000)
    tables = [Ranking(known, FAMILY, problem(m=m), CANDIDATES, is_here=False) for m in sizes]
    for m in sizes:
        assert len({one.of(m) for one in tables} | {one.choices().of(m) for one in tables}) == 1


def test_a_new_number_of_rows_asks_the_model_nothing() -> None:
    asked = mock.Mock(side_effect=lambda machine, name, work: 100.0)
    with mock.patch.object(corrections, "predict_us", asked), mock.patch.object(ranking, "predict_us", asked):
        table = Ranking(Knowledge(GPU, {}, {}), FAMILY, problem(m=300), CANDIDATES).choices()
        assert 10 * len(CANDIDATES) < asked.call_count <= 30 * len(CANDIDATES)
        asked.reset_mock()
        assert table.most == 16384
        for m in range(1, 16385, 7):
            table.of(m)
        assert not asked.called


@pytest.mark.parametrize(("m", "row"), [(1, 1), (2, 16), (129, 160), (300, 320), (512, 512), (777, 832), (5000, 6144)])
def test_a_call_has_the_next_number_of_rows_of_the_table(m: int, row: int) -> None:
    """There the fused variant is faster, and with all other numbers of rows it is slower."""

    def us(machine: Any, name: str, work: Work) -> float:
        return 10.0 if name == "copy_engine:portable" and work.m == row else 100.0

    with mock.patch.object(corrections, "predict_us", us):
        table = Ranking(Knowledge(GPU, {}, {}), FAMILY, problem(m=20000), CANDIDATES).choices()
    assert table.of(m).variant == "copy_engine:portable"
    assert table.of(row + 1).variant == "library_layout"
    assert table.most >= 20000


def test_an_unknown_gpu_gets_the_library() -> None:
    choice = choose(FAMILY, problem(), CANDIDATES, gpu="NVIDIA GeForce 256")
    assert choice == Choice("library_layout", None, "neither measured nor modelled")


def asked_for(key: Key) -> Problem:
    dtype, options = dtype_and_options(key.dtype)
    return make_problem(key.family, key.m, key.n, key.k, key.world_size, dtype, **options)


def library_and_others(key: Key, measured: Measured) -> list[str]:
    """Return the candidates for a shipped problem, the library's first."""
    baseline = "library_layout" if key.family == FAMILY else "library"
    return [baseline, *(name for name in measured.times_us if get_variant(key.family, name).has_kernels)]


@pytest.fixture
def on_hopper() -> Iterator[None]:
    with mock.patch.object(hopper, "machine_reason", return_value=None):
        yield


@SHIPPED
@pytest.mark.usefixtures("on_hopper")
def test_on_the_shipped_problems_it_is_never_slower_than_the_library(gpu: str) -> None:
    table = shipped_table(gpu)
    assert len(table) > 200
    known = Knowledge(gpu, {}, {gpu: table})
    for key, measured in table.items():
        names = ["library", *(name for name in measured.times_us if get_variant(key.family, name).has_kernels)]
        choice = Ranking(known, key.family, asked_for(key), names).choices().of(key.m)
        assert choice.why == "measured"
        assert measured.times_us[choice.variant] <= measured.times_us["library"]
        assert measured.times_us[choice.variant] <= min(measured.times_us[name] for name in names) * 1.021


class GpuContext:
    """A context of rank 0 on a GPU that is not there."""

    reserve_sms = 0

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def is_interpreted(self) -> bool:
        return False

    def get_device(self) -> torch.device:
        return torch.device("cuda")

    def get_rank(self) -> int:
        return 0

    def get_num_ranks(self) -> int:
        return 4

    def collective_section(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def broadcast(self, value: Any, source_rank: int) -> Any:
        return value


def test_on_a_gpu_the_cache_is_read_once_a_context() -> None:
    key = key_of(FAMILY, problem())
    table = {key: Measured({"library_layout": 100.0, "copy_engine:portable": 90.0})}
    with (
        mock.patch.object(auto, "device_name", return_value=GPU),
        mock.patch.object(auto, "read_cache", return_value=table) as read,
    ):
        for ctx in (GpuContext(), GpuContext()):
            for _ in range(3):
                choice = auto.decide(ctx, FAMILY, problem(), baseline="library_layout")  # type: ignore[arg-type]
                assert choice == Choice("copy_engine:portable", None, "measured here")
    assert [call.args for call in read.call_args_list] == [(GPU,)] * 2


def test_where_sms_are_reserved_measured_times_and_configurations_are_of_fewer() -> None:
    ours = "copy_engine:portable"
    times = {"library_layout": 1000.0, ours: 800.0}
    table = {key_of(FAMILY, problem()): Measured(times, {ours: replace(CONFIG, num_sms=132)})}

    def choice(num_sms: int | None) -> Choice:
        return choose(FAMILY, problem(), CANDIDATES, gpu=GPU, tables=(table, {}), num_sms=num_sms)

    assert choice(None) == Choice(ours, replace(CONFIG, num_sms=132), "measured here")
    with mock.patch.object(
        ranking, "predict_us", lambda machine, name, work: 132 / machine.num_sms if name == ours else 1
    ):
        assert choice(120) == Choice(ours, replace(CONFIG, num_sms=120), "measured here")
        assert choice(100).variant == "library_layout"  # 800 µs of 132 SMs are 1056 of 100


def test_where_sms_are_reserved_the_model_sees_the_smaller_machine() -> None:
    for num_sms in (None, 100):
        with mock.patch.object(corrections, "predict_us", return_value=1.0) as predict:
            choose(FAMILY, problem(), CANDIDATES, num_sms=num_sms)
        assert {call.args[0].num_sms for call in predict.call_args_list} == {num_sms or 132}


def test_a_context_says_how_many_sms_are_free() -> None:
    ctx: Any = GpuContext()
    ctx.reserve_sms, ctx.get_cu_count = 12, lambda: 120
    with (
        mock.patch.object(auto, "device_name", return_value=GPU),
        mock.patch.object(auto, "read_cache", return_value={}),
        mock.patch.object(auto, "Ranking", side_effect=Ranking) as ranking_of,
    ):
        auto.decide(ctx, FAMILY, problem(), baseline="library_layout")
    assert ranking_of.call_args.args[-1] == 120


def test_nothing_is_chosen_by_its_time_where_ranks_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hopper, "machine_reason", lambda: "there is no GPU here")
    monkeypatch.setenv("IRIS_RANKS_PER_GPU", "2")
    assert "one rank a GPU" in (get_variant(FAMILY, "library").unsupported_reason(problem(), None) or "")
    choice = auto.decide(GpuContext(), FAMILY, problem(), baseline="library_layout")  # type: ignore[arg-type]
    assert choice.variant == "workgroup_specialized:portable"
    assert choice.why == "ranks may share a GPU"


@pytest.mark.usefixtures("on_hopper")
def test_what_the_library_cannot_do_is_the_fastest_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    machine = machine_for(GPU, 4)
    assert machine
    chosen = set()
    for m in (16, 8192):
        odd = problem(m=m, n=8200, dtype=torch.float8_e4m3fn)
        able = [one.name for one in list_variants(FAMILY) if one.has_kernels and not one.unsupported_reason(odd, None)]
        times = {name: predict_us(machine, name, work_of(FAMILY, odd)) or math.inf for name in able}
        key = key_of(FAMILY, odd)
        for tuned, expected, why in (
            ({}, min(times, key=times.__getitem__), "predicted"),
            ({key: Measured({"copy_engine:portable": 2.0, able[0]: 3.0})}, "copy_engine:portable", "measured here"),
        ):
            with (
                mock.patch.object(auto, "device_name", return_value=GPU),
                mock.patch.object(auto, "read_cache", return_value=tuned),
                mock.patch.object(auto, "shipped_tables", return_value={}),  # which correct what is predicted
            ):
                choice = auto.decide(GpuContext(), FAMILY, odd, baseline="library_layout")  # type: ignore[arg-type]
            assert choice == Choice(expected, None, why)
            chosen.add(choice.variant)
    assert len(chosen) == 3


def test_the_library_is_not_chosen_for_what_it_cannot_do() -> None:
    family, slow = "all_gather_gemm", ["library", "bulk_synchronous:portable"]
    asked, known = make_problem("all_gather_gemm", 64, 8192, 8192, 4, torch.bfloat16), Knowledge(GPU, {}, {})
    assert Ranking(known, family, asked, slow).of(64).variant == "library"
    choice = Ranking(known, family, asked, slow, instead=slow[1]).of(64)
    assert choice == Choice("bulk_synchronous:portable", None, "predicted")


def test_what_neither_the_library_nor_the_model_knows_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    odd = problem(n=8200, dtype=torch.float8_e4m3fn)
    unknown = Knowledge("NVIDIA GeForce 256", {}, {})
    choice = Ranking(unknown, FAMILY, odd, ["library_layout", *CANDIDATES], instead="copy_engine:portable").of(64)
    assert choice == Choice("copy_engine:portable", None, "neither measured nor modelled")
