"""The walk from a call to the peers in docs/design.md: eight files, and no call runs through one that it leaves out."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from driving import build, case_of, driven, operands, through_triton
from ranks import Ranks, context

import iris_core
from iris_kernels.gemm_all_scatter import gemm_all_scatter
from overlap_taxonomy import get_variant

ROOT = Path(iris_core.__file__).parents[1]
SECTION = re.search(r"\n## From a call to the peers\n(.*?)\n## ", (ROOT / "docs/design.md").read_text(), re.DOTALL)
assert SECTION
NAMED = {link.removeprefix("../") for link in re.findall(r"\]\((\.\./[\w/]+\.py)\)", SECTION[1])}


def files_of(call: Callable[[], object]) -> set[str]:
    """Return the files of the library's kernels and of the taxonomy that functions run in, from the root."""
    found = set()

    def note(frame: Any, event: str, what: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    inside = [Path(file).relative_to(ROOT) for file in found if Path(file).is_relative_to(ROOT)]
    return {str(file) for file in inside if file.parts[0] in ("kernels", "overlap_taxonomy")}


def files_of_an_interpreted_call(rank: int, world_size: int) -> set[str]:
    """Return those of a call that was made before, its kernel's included: the interpreter runs it."""
    ctx = context()
    a, b = (torch.ones(32, 32, device=ctx.get_device()) for _ in range(2))

    def call() -> None:
        gemm_all_scatter(ctx, a, b, variant="fused_sequential:portable")

    call()
    return files_of(call)


def test_it_has_eight_files() -> None:
    assert SECTION
    assert re.findall(r"^\| (\d) \| \[", SECTION[1], re.MULTILINE) == [*"12345678"]


def test_it_names_each_file_that_an_interpreted_call_runs_through(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).call(files_of_an_interpreted_call):
        assert found <= NAMED


def test_it_names_each_file_that_queues_the_call_of_the_walk() -> None:
    case = case_of(get_variant("gemm_all_scatter", "warp_specialized:sm90"))
    with driven(case) as (ctx, log, _):
        operator, data = build(case, ctx), operands(case)
        through_triton(operator, log, *data)
        assert files_of(lambda: through_triton(operator, log, *data)) <= NAMED
