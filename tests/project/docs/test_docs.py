"""The documentation says what is so: its code is that of the examples, its links lead somewhere, the examples run."""

from __future__ import annotations

import ast
import importlib
import io
import re
import shlex
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest
import torch
from families import module_of, stem
from prefork import Template
from ranks import skip_where_ranks_share_a_gpu
from typer.main import get_command

from iris_bench import cli
from iris_core.utils.settings import ranks_per_gpu
from overlap_taxonomy import Arrangement, list_families, list_variants

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "kernels/*/README.md", "results/**/*.md", "bench/*.md", "examples/*.md")
    for page in ROOT.glob(pattern)
    if page.stat().st_size
)
EXAMPLES = sorted((ROOT / "examples").glob("*/[!_]*.py"))
IMAGES = ROOT / "docs/img"
FOLDERS = ("iris_core", "overlap_taxonomy", "kernels", "tensor_parallel", "bench", "tests", "examples")
SOURCES = {
    f"/{file.relative_to(ROOT)}"
    for folder in ("", *FOLDERS, "docs", "results")
    for suffix in ("py", "md")
    for file in (ROOT / folder).glob(f"**/*.{suffix}" if folder else f"*.{suffix}")
}
ARGUMENTS: dict[str, list[str]] = {
    "first_program.py": [],
    "find_races.py": [],
    "race_test.py": [],
    "every_variant.py": ["--ranks", "2", "--device", "cpu", "--shape", "20", "36", "32"],
}  # of an example; two ranks on the CPU where nothing is said
FRESH = ("first_program.py",)  # and find_races.py, in a test of its own
NEEDS_CPU = ("find_races.py", "race_test.py")
NEEDS_TRANSFORMERS = ("captured_model.py", "sharded_sequences.py", "torchrun_model.py", "transformers_model.py")
NEEDS_A_GPU_A_RANK = ("parallelize_model.py", *NEEDS_TRANSFORMERS)  # they begin with torch's process groups

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@by_page
def test_code_is_an_example(page: Path) -> None:
    """Every block of Python on a page stands in an example, as it is."""
    sources = [example.read_text() for example in EXAMPLES]
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        assert any(block in source for source in sources), f"in no example:\n{block}"


def test_readme_has_the_whole_first_program() -> None:
    program = (ROOT / "examples/first_steps/first_program.py").read_text()
    assert f"```python\n{program}```" in (ROOT / "README.md").read_text()


def test_every_example_is_in_the_index() -> None:
    table = re.findall(r"^\| \[(.+?)\]\((.+?)\) \|", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    assert [path for _, path in table if path.endswith(".py")] == [
        str(one.relative_to(ROOT / "examples")) for one in EXAMPLES
    ]
    assert all(path.endswith(f"/{name}") for name, path in table)


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link is a file or folder of the repository, and its anchor a heading there."""
    text = _without_blocks(page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in _anchors(linked), target


@by_page
def test_commands_are_understood(page: Path) -> None:
    """Every iris-bench in a block or in a line, with its arguments: parsed, not run."""
    text = page.read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    lines += [" ".join(one.split()) for one in re.findall(r"`(iris-bench [^`]*)`", _without_blocks(text))]
    command: Any = get_command(cli.app)
    for line in lines:
        if re.match(r"iris-bench [a-z]+ .", line):
            name, *arguments = shlex.split(line, comments=True)[1:]
            command.commands[name].make_context(name, arguments)


@by_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert not _missing_files(_without_blocks(page.read_text()))


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_that_docstrings_and_comments_name_exist(folder: str) -> None:
    missing = {str(file.relative_to(ROOT)): _missing_files(_prose_of(file)) for file in (ROOT / folder).rglob("*.py")}
    assert not {file: names for file, names in missing.items() if names}


def test_files_that_the_makefile_names_exist() -> None:
    assert not _missing_files((ROOT / "Makefile").read_text())


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs/decisions"
    files = {file.name for file in folder.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", (folder / "README.md").read_text())) == files
    assert sorted(int(name.split("_")[0]) for name in files) == list(range(1, len(files) + 1))


@by_page
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`(test_\w+\.py)?(?:::(test_\w+))?`", page.read_text())
    file = ""
    for name, test in named:
        file = name or file  # `::test_x` is of the file named before
        if name or test:
            (path,) = (ROOT / "tests").rglob(file)
            assert f"def {test}" in path.read_text(), f"{file}::{test}"


@by_page
def test_names_no_path_of_a_machine(page: Path) -> None:
    assert not re.findall(r"(?<![\w.])/(?:home|root|work|tmp|Users|mnt|opt)/\S*", page.read_text())


@pytest.mark.parametrize("family", list_families())
def test_family_page_names_every_variant(family: str) -> None:
    """Other projects' functions are on the page of the benchmarks, where they are called."""
    for variant in list_variants(family):
        page = "bench/README.md" if variant.arrangement is Arrangement.OTHERS else f"kernels/{family}/README.md"
        table = [line for line in (ROOT / page).read_text().splitlines() if line[:1] == "|"]
        assert any(f"`{variant.name}`" in line.split("|")[1] for line in table), variant.name


def test_endings_of_the_handshake_are_those_of_the_kernels() -> None:
    """design.md says by which function each variant ends a call; each of them calls the one that it names."""
    table = (ROOT / "docs/design.md").read_text().split("\n### Endings of the handshake\n")[1].split("\n| variant |")[1]
    families, _, *rows = (line.split("|") for line in table.split("\n\n")[0].splitlines())
    named = {}
    for _, variant, *endings, _ in rows:
        for family, ending in zip(families[:-1], endings, strict=True):
            if ending.strip():
                named[family.strip(" `"), variant.strip(" `")] = ending.strip(" `")
    kernels = {(one.family, one.name) for family in list_families() for one in list_variants(family) if one.has_kernels}
    assert named.keys() == kernels
    for (family, variant), ending in named.items():
        module = module_of(variant)
        package, _, name = module.partition(".")
        file = Path(package, f"{name}.py")
        source = (ROOT / "kernels" / family / file).read_text()
        if f"gemm_reduce_scatter.{module} import" in source or f"gemm_reduce_scatter.{package} import {name}" in source:
            source = (ROOT / "kernels/gemm_reduce_scatter" / file).read_text()  # the two-shot variants have its kernels
        assert f" {ending}(" in source, f"{family}/{variant}: {ending}"


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that draws the time lines."""
    monkeypatch.syspath_prepend(IMAGES)
    return importlib.import_module("draw_timelines")


def test_time_lines_are_of_the_variants_there_are(drawings: Any) -> None:
    """Every variant with kernels has a picture, with a panel for each of its families, and no other has one."""
    families: dict[str, set[str]] = {"library": set(list_families())}
    for family in list_families():
        for variant in list_variants(family):
            if variant.has_kernels:
                families.setdefault(stem(variant.name), set()).add(family)
    assert {pattern.__name__: set(pattern()) for pattern in drawings.PATTERNS} == families


def test_time_lines_are_drawn_anew(drawings: Any) -> None:
    """Where this fails: python docs/img/draw_timelines.py."""
    for pattern in drawings.PATTERNS:
        assert f">{drawings.digest()}<" in (IMAGES / f"{pattern.__name__}.svg").read_text(), pattern.__name__


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs(example: Path, template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    """One from a fresh start, as users start them; the others from where all is imported."""
    if example.name in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers")
    arguments = ARGUMENTS.get(example.name, ["--ranks", "2", "--device", "cpu"])
    for gpus in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(gpus, "")
    if example.name in FRESH:
        shown = _run(example, arguments)
    else:
        status, shown = template.run(example, arguments, timeout_s=200)
        assert status == 0, shown
        assert shown.strip(), "an example shows something"
    if example.name == "find_races.py":
        assert _without_lines(_race_in_readme()) in _without_lines(shown)


def test_the_front_pages_race_is_found_without_what_only_developers_have() -> None:
    example = ROOT / "examples/first_steps/find_races.py"
    code = f"import runpy, sys; sys.modules['pytest'] = None; runpy.run_path({str(example)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_example_that_fails_is_noticed(tmp_path: Path, template: Template) -> None:
    example = tmp_path / "example.py"
    example.write_text("print('begun', flush=True)\nraise ValueError('wrong')\n")
    status, shown = template.run(example, [], timeout_s=200)
    assert status == 1
    assert shown.startswith("begun\n")
    assert shown.endswith("ValueError: wrong\n")


def _race_in_readme() -> str:
    (race,) = re.findall(r"```\n(race at .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return race


def _without_lines(text: str) -> str:
    """A report without the numbers of lines, which move."""
    return re.sub(r"(\.py):\d+", r"\1", text)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "example", [one for one in EXAMPLES if one.name not in NEEDS_CPU], ids=lambda example: example.name
)
def test_example_runs_on_gpus(example: Path) -> None:
    if torch.cuda.device_count() * ranks_per_gpu() < 2:
        pytest.skip("needs 2 GPUs")
    if example.name in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers")
    if example.name in NEEDS_A_GPU_A_RANK:
        skip_where_ranks_share_a_gpu()
    has_options = example.name != "first_program.py"
    _run(example, ["--ranks", "2", "--device", "cuda"] if has_options else [])


def _run(example: Path, arguments: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, str(example), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip(), "an example shows something"
    return done.stdout


def _without_blocks(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _missing_files(text: str) -> list[str]:
    """The sources and pages that a text names, by a path or the end of one, and that are not there."""
    named = re.findall(r"(?<![\w./*<-])[\w./-]*\w\.(?:py|md)\b(?!\w|\.\w)", text)
    return [one for one in dict.fromkeys(named) if not any(file.endswith(f"/{_plain(one)}") for file in SOURCES)]


def _plain(name: str) -> str:
    """A path without the steps up that it begins with."""
    return re.sub(r"^(?:\.\.?/)+", "", name)


def _prose_of(source: Path) -> str:
    """The docstrings and comments of a file."""
    text = source.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
