"""The documentation says what is so: its code is that of the examples, its links lead somewhere, the examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from ranks import skip_where_ranks_share_a_gpu

from iris_core.utils.settings import ranks_per_gpu
from overlap_taxonomy import list_families, list_variants

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "kernels/*/README.md", "results/*.md")
    for page in ROOT.glob(pattern)
    if page.stat().st_size
)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ARGUMENTS: dict[str, list[str]] = {
    "first_program.py": [],
    "find_races.py": [],
    "every_variant.py": ["--ranks", "2", "--device", "cpu", "--shape", "48", "64", "64"],
}  # of an example; two ranks on the CPU where nothing is said
NEEDS_CPU = ("find_races.py",)
NEEDS_A_GPU_A_RANK = ("parallelize_model.py",)  # it begins with torch's process groups

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@by_page
def test_code_is_an_example(page: Path) -> None:
    """Every block of Python on a page stands in an example, as it is."""
    sources = [example.read_text() for example in EXAMPLES]
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        assert any(block in source for source in sources), f"in no example:\n{block}"


def test_readme_has_the_whole_first_program() -> None:
    assert f"```python\n{(ROOT / 'examples/first_program.py').read_text()}```" in (ROOT / "README.md").read_text()


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link is a file or folder of the repository, and its anchor a heading there."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in _anchors(linked), target


@by_page
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`(test_\w+\.py)?(?:::(test_\w+))?`", page.read_text())
    file = ""
    for name, test in named:
        file = name or file  # `::test_x` is of the file named before
        if name or test:
            assert f"def {test}" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


@by_page
def test_names_no_path_of_a_machine(page: Path) -> None:
    assert not re.findall(r"(?<![\w.])/(?:home|root|work|tmp|Users|mnt|opt)/\S*", page.read_text())


@pytest.mark.parametrize("family", list_families())
def test_family_page_names_every_variant(family: str) -> None:
    table = [line for line in (ROOT / "kernels" / family / "README.md").read_text().splitlines() if line[:1] == "|"]
    for variant in list_variants(family):
        assert any(f"`{variant.name}`" in line.split("|")[1] for line in table), variant.name


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs(example: Path) -> None:
    arguments = ARGUMENTS.get(example.name, ["--ranks", "2", "--device", "cpu"])
    _run(example, arguments, os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""})


@pytest.mark.gpu
@pytest.mark.parametrize(
    "example", [one for one in EXAMPLES if one.name not in NEEDS_CPU], ids=lambda example: example.name
)
def test_example_runs_on_gpus(example: Path) -> None:
    if torch.cuda.device_count() * ranks_per_gpu() < 2:
        pytest.skip("needs 2 GPUs")
    if example.name in NEEDS_A_GPU_A_RANK:
        skip_where_ranks_share_a_gpu()
    has_options = example.name != "first_program.py"
    _run(example, ["--ranks", "2", "--device", "cuda"] if has_options else [], os.environ)


def _run(example: Path, arguments: list[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(example), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip(), "an example shows something"


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
