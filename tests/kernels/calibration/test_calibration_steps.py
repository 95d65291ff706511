"""What follows from the times of a calibration's steps, on a machine whose constants are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Case, StubContext, compile_kernel, recorded_launches

from iris_kernels.common.calibration import calibrate, steps
from iris_kernels.common.calibration.steps import SMALL, STEPS, Sample, Setting, Sizes, Step
from iris_kernels.common.config import GemmConfig
from overlap_taxonomy import MACHINES, Machine, Mainloop
from overlap_taxonomy.gemm_cost import stream_k_us

ASSUMED = MACHINES["h100x2"]


class NoMemory:
    """A context of rank 0 of two whose tensors have sizes and nothing in them: samples are made, and not called."""

    process_group = watchdog = make_stream = get_heap_bases = get_watchdog = peer_view = mock.MagicMock()

    def get_rank(self) -> int:
        return 0

    def get_num_ranks(self) -> int:
        return 2

    def get_cu_count(self) -> int:
        return 132

    def get_device(self) -> torch.device:
        return torch.device("meta")

    def zeros(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="meta")


def variant(mainloop: Mainloop) -> SimpleNamespace:
    """The variant of this main loop, whose operators have no memory."""

    def build(ctx: Any, problem: Any, config: GemmConfig | None = None) -> Any:
        return SimpleNamespace(config=config or GemmConfig(128, 256, 64, comm_rows=32), close=lambda: None)

    return SimpleNamespace(name=f"copy_engine:{mainloop.value}", build=build, unsupported_reason=lambda *_: None)


@pytest.fixture
def samples_of() -> Iterator[Callable[[Step], list[Sample]]]:
    setting = Setting(NoMemory(), Sizes())  # type: ignore[arg-type]
    drawn = mock.patch.object(Setting, "drawn", lambda self, *size: torch.zeros(size, device="meta"))
    with mock.patch.object(steps, "_variant", variant), drawn:
        yield lambda step: list(step.prepare(setting))


def true_machine(samples: list[Sample]) -> Machine:
    """Return a machine that is slower, or faster, than is assumed in each of these constants, by other factors."""
    factors = (0.8, 0.9, 1.15, 1.1, 0.85)
    values = {
        one.constant: ASSUMED.constant(one.constant) * factors[index % len(factors)]
        for index, one in enumerate(samples)
    }
    return ASSUMED.with_constants(values | {name: min(values[name], 1.0) for name in {"portable_rate"} & values.keys()})


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_each_constant_is_what_explains_its_time(samples_of: Callable[[Step], list[Sample]], step: Step) -> None:
    """All of a step are off at once: the time of one sample depends on the constants of others."""
    samples = samples_of(step)
    assert len({sample.constant for sample in samples}) == len(samples)
    true = true_machine(samples)
    found, left = calibrate._solved(samples, [sample.predict(true) for sample in samples], ASSUMED)
    assert left == []
    for sample in samples:
        assert found[sample.constant] == pytest.approx(true.constant(sample.constant), rel=0.02), sample.constant


def test_a_launch_and_the_weights_rate_are_what_their_samples_take(samples_of: Callable[[Step], list[Sample]]) -> None:
    samples = {one.constant: one for one in samples_of(STEPS[0])}
    assert samples["launch_us"].predict(ASSUMED) == ASSUMED.launch_us
    few_rows = stream_k_us(ASSUMED, 16, 16384, 8192, 2, fits_rows=True)
    assert samples["stream_k.memory_gbps"].predict(ASSUMED) == few_rows + ASSUMED.launch_us


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_kernels_of_links_move_as_many_bytes_at_once_as_their_constant_says(target: str) -> None:
    ctx: Any = StubContext(Case("library", target, rank=0, world_size=2))
    ctx.make_stream = mock.Mock
    (links,) = (step for step in STEPS if step.name == "links")
    widths: dict[str, set[int]] = {}
    for sample in links.prepare(Setting(ctx, SMALL)):
        with recorded_launches() as launches:
            sample.call()
        for kernel, arguments in launches:
            compiled = compile_kernel(kernel, arguments, target)
            widths[sample.constant] = set().union(*compiled.stores_by_file().values())
    if target == "sm_90":
        wide = ("link_gbps", "peer_gbps", "sm_link_gbps", "pull_gbps")
        assert [widths[name] for name in wide] == [{16}] * len(wide)
        assert widths["narrow_link_gbps"] == {2}
    assert "hop_us" in widths
