"""What may notice a mutant, the cheapest first: the race checker, emulated Hopper kernels, the machine code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from .mutants import Mutant
from .uses import Variant

SCHEDULES = 2  # in order, and reversed
# Of each variant a few of the cases that the tests have: one on each vendor's GPU, small problems, whose tiles programs
# share, and Hopper's switches.
COMPILED = ("sm_90-rank2-bfloat16-nk-8192]", "gfx942-rank2-bfloat16-nk-8192]", "sm_90-rank1-bfloat16-nk-1024]")
COMPILED += ("sm_90-rank1-bfloat16-nk-6144]",)  # programs split tiles
COMPILED_FOR_HOPPER = ("sm_90-rank2-bfloat16-nk-8192-w4]", "team2-w4]", "pingpong-w4]")
MOST_COMPILED = 6  # of the variants of a line that is in nearly all; the race checker runs them all
EMULATED_FIRST = "301x318x160"


def detect(mutant: Mutant, variants: Sequence[Variant]) -> str:
    """Return what notices the mutant that this process has imported, or nothing."""
    return next((found for found in _verdicts(mutant, variants) if found), "")


def _verdicts(mutant: Mutant, variants: Sequence[Variant]) -> Iterator[str]:
    of_hopper = [variant for variant in variants if variant[1].startswith("hopper/")]
    others = [variant for variant in variants if variant not in of_hopper]
    of_api = mutant.path.startswith("iris_core/")
    emulated = [] if of_api else of_hopper  # the emulator has dictionaries in the place of the device API
    if of_api:
        yield _run("core/device/test_codegen_device_api.py")
    if mutant.is_of_streams:
        yield _run("kernels/launching/test_side_streams.py")
    yield from _check(others, 2)
    yield from (_emulate(variant, EMULATED_FIRST) for variant in emulated)
    yield from (
        _compile("kernels/machine_code/test_codegen_hopper.py", variant, COMPILED_FOR_HOPPER[:1])
        for variant in of_hopper
    )
    if emulated:
        yield _run("kernels/hopper/test_hopper_trace.py")
    yield from (
        _compile("kernels/machine_code/test_codegen_hopper.py", variant, COMPILED_FOR_HOPPER[1:])
        for variant in of_hopper
    )
    yield from (_emulate(variant, "") for variant in emulated)
    for variant in others[:: -(-len(others) // MOST_COMPILED)] if others else ():
        yield _compile("kernels/machine_code/test_codegen.py", variant, COMPILED)
        yield _run("kernels/machine_code/test_codegen_order.py", only=f"[{_named(variant)[1]}")
    if any(name.endswith("_stream_k") for _, name in others) or mutant.path == "kernels/common/portable/operands.py":
        yield _run("kernels/operators/summing/test_stream_k.py", "kernels/operators/operands/test_operands.py")
    yield from _check(others, 3)
    if of_api:
        yield _run("core/device/test_sync.py", "core/device/test_device_api.py")


def _named(variant: Variant) -> Variant:
    """Return a variant, which a mutant knows by its file, under its full name."""
    family, file = variant
    folder, _, pattern = file.rpartition("/")
    mainloop, schedule = "sm90" if folder == "hopper" else "portable", ":stream_k" if file.endswith("_stream_k") else ""
    return family, f"{pattern.removesuffix('_stream_k')}:{mainloop}{schedule}"


def _check(variants: Sequence[Variant], world_size: int) -> Iterator[str]:
    """Put variants through the race checker, those that it can run."""
    from iris_bench.correctness.check.cases import make_cases, run_case

    for case in make_cases("all", "all", world_size=world_size, dtype="bf16"):
        name = (case.variant.family, case.variant.name)
        if name in map(_named, variants) and not case.unsupported_reason():
            report = run_case(case, schedules=SCHEDULES, seed=0)
            if not report.ok:
                counts = {"races": report.races, "deadlocks": report.deadlocks, "errors": report.errors}
                said = ", ".join(f"{len(found)} {what}" for what, found in counts.items() if found)
                yield f"race checker, {'/'.join(name)} on {world_size} ranks: {said}"


def _emulate(variant: Variant, case: str) -> str:
    family, name = _named(variant)
    marks = [f"[{family}-{name}-", f"[{family}-{name}]"]
    marks += ("chunks", "kept") if variant[1] == "hopper/copy_engine" else ("without_columns",)
    return _run(
        "kernels/hopper/test_hopper_emulated.py",
        only=lambda item: case in item and any(mark in item for mark in marks),
    )


def _compile(file: str, variant: Variant, cases: Sequence[str]) -> str:
    return _run(
        file, only=lambda item: any(f"[{'-'.join(_named(variant))}-" in item and case in item for case in cases)
    )


def _run(*files: str, only: str | Callable[[str], bool] = "") -> str:
    """Run the tests of files until one fails; return its name, or nothing."""
    plugin = _FirstFailure(only)
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    code = pytest.main([*options, *(f"tests/{file}" for file in files)], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not plugin.failed:
        return f"pytest {', '.join(files)}: {code.name if isinstance(code, pytest.ExitCode) else code}"
    return plugin.failed


@dataclass(eq=False)  # pytest keeps plugins by their hash
class _FirstFailure:
    """A plugin that chooses tests and notes the first that fails."""

    only: str | Callable[[str], bool]
    failed: str = field(default="", init=False)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        wanted = self.only if callable(self.only) else lambda item: str(self.only) in item
        items[:] = [item for item in items if wanted(item.nodeid)]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = f"{report.nodeid} (import)"
