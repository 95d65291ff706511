"""The page docs/interactive: its table is what the cost model predicts, and a browser shows it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.tune import grid_cli
from iris_bench.tune.explain import gpu_name
from iris_bench.tune.grid import GPUS, RANKS, ROWS, SCALES, about_family, pairs, product_times, rounded, variants_of
from iris_kernels.common.choice.knowledge import Knowledge
from iris_kernels.common.choice.measured import shipped_tables
from overlap_taxonomy import Work, explain_us, list_families, machine_for

PAGE = Path(__file__).parents[3] / "docs/interactive"
OPERANDS = {"bf16": {}, "fp8": {"element_bytes": 1, "out_bytes": 2, "sums": "promoted"}}  # as the model sees them
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def table() -> Any:
    """The page's table, as it is committed."""
    text = (PAGE / "predictions.js").read_text()
    script = text.partition("const PREDICTIONS = ")[2].removesuffix(";\n")
    return json.loads(script.replace("\nabout:", '\n"about":').replace("\ntimes:", '\n"times":'))


def test_the_table_has_every_problem_of_the_grid(table: Any) -> None:
    """Where this or the next fails: make predictions."""
    families = {family: about_family(family) for family in list_families()}
    assert table["about"]["families"] == json.loads(json.dumps(families))
    assert table["about"]["rows"] == list(ROWS)
    assert table["about"]["scales"] == SCALES
    assert list(SCALES) == list(OPERANDS)
    machines = [f"{gpu.lower()}x{ranks}" for gpu, ranks in itertools.product(GPUS, RANKS)]
    assert list(table["about"]["machines"]) == machines
    places = itertools.product(machines, list_families(), OPERANDS)
    products = {f"{machine}/{family}/{dtype}/{n}x{k}" for machine, family, dtype in places for n, k in pairs(family)}
    assert set(table["times"]) == products
    assert all(len(rows) == len(ROWS) for rows in table["times"].values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPERANDS)
@pytest.mark.parametrize("family", list_families())
def test_the_table_is_what_the_model_predicts(table: Any, family: str, dtype: str) -> None:
    """The parts of each time, without what measured problems say of them."""
    for gpu, ranks in itertools.product(GPUS, RANKS):
        machine = machine_for(gpu_name(gpu), ranks)
        assert machine is not None
        for n, k in pairs(family)[::3]:
            rows = table["times"][f"{machine.name}/{family}/{dtype}/{n}x{k}"]
            for m, (_, _, _, *times) in zip(ROWS, rows, strict=True):
                work = Work(family, m, n, k, ranks, **OPERANDS[dtype])
                for variant, shown in zip(variants_of(family), times, strict=True):
                    parts = explain_us(machine, variant.name, work)
                    assert parts is not None
                    us = (parts.latency_us, parts.work_us, parts.wait_us, parts.link_us)
                    assert shown[:4] == [rounded(one) for one in us], (gpu, ranks, m, n, k, variant.name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPERANDS)
@pytest.mark.parametrize(("gpu", "ranks", "family"), [("H200", 4, "all_gather_gemm"), ("H100", 2, "gemm_all_reduce")])
def test_the_table_has_what_auto_takes(table: Any, gpu: str, ranks: int, family: str, dtype: str) -> None:
    known = Knowledge(gpu_name(gpu), {}, shipped_tables(gpu_name(gpu)))
    for n, k in pairs(family)[::4]:
        rows = table["times"][f"{gpu.lower()}x{ranks}/{family}/{dtype}/{n}x{k}"]
        today = product_times(known, ranks, family, n, k, dtype)
        for shown, (ideal, taken, why, *times) in zip(rows, today, strict=True):
            assert shown[:3] == [ideal, taken, why]
            for corrected, one in zip(shown[3:], times, strict=True):
                assert corrected[4] == pytest.approx(one[4], rel=0.02, abs=0.2)


def test_the_command_writes_the_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_cli, "grid", lambda: "const PREDICTIONS = {};\n")
    result = CliRunner().invoke(cli.app, ["predictions", "--out", str(tmp_path / "new/predictions.js")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "new/predictions.js").read_text() == "const PREDICTIONS = {};\n"
    monkeypatch.setattr(grid_cli, "PAGE", tmp_path / "none")
    for arguments, said in (["--out", str(tmp_path)], "is a folder"), ([], "give --out predictions.js"):
        refused = CliRunner().invoke(cli.app, ["predictions", *arguments])
        assert refused.exit_code == 2
        assert said in refused.stderr


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install playwright")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed here, e.g. by apt-get install chromium")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """The page, opened as a file, in which nothing may go wrong."""
    opened = browser.new_page(viewport={"width": 1100, "height": 1050})
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    opened.on("requestfailed", lambda request: wrong.append(request.url))
    opened.goto((PAGE / "index.html").as_uri())
    yield opened
    opened.close()
    assert not wrong


def test_the_page_shows_what_the_table_has(page: Any, table: Any, tmp_path: Path) -> None:
    families = table["about"]["families"]
    for family, gpu, ranks, dtype, (m, n, k) in (
        ("gemm_reduce_scatter", "H100", 2, "bf16", (64, 8192, 28672)),
        ("all_gather_gemm", "H200", 8, "bf16", (8192, 28672, 8192)),
        ("all_gather_gemm", "H200", 8, "fp8", (8192, 28672, 8192)),
        ("gemm_all_scatter", "H200", 4, "fp8", (512, 4096, 2048)),
        ("gemm_all_reduce", "H100", 8, "bf16", (1, 8192, 8192)),
    ):
        for name, value in (("family", family), ("gpu", gpu), ("ranks", str(ranks)), ("dtype", dtype)):
            page.select_option(f"[name={name}]", value)
        for name, size in (("m", m), ("n", n), ("k", k)):
            page.fill(f"[name={name}]", str(size))
        rows = table["times"][f"{gpu.lower()}x{ranks}/{family}/{dtype}/{n}x{k}"]
        ideal, taken, why, *times = rows[ROWS.index(m)]
        variants = [one["name"] for one in families[family]["variants"]]
        assert page.inner_text("#taken") == f"auto takes {variants[taken]} ({why})"
        assert page.inner_text("#shown").startswith(f"Shown: M = {m}, N = {n}, K = {k} in {dtype} on {ranks} × {gpu}.")
        assert page.is_hidden("#snapped")
        cells = [row.split("\t") for row in page.inner_text("#numbers").splitlines()[1:]]
        assert [cell[0].removesuffix(" ★") for cell in cells] == variants
        assert [cell[0].endswith("★") for cell in cells] == [index == taken for index in range(len(variants))]
        for cell, (latency, work, wait, link, corrected) in zip(cells, times, strict=True):
            numbers = [float(one.replace(",", "")) for one in cell[1:7]]
            assert numbers == pytest.approx([latency + work + wait, latency, work, wait, link, corrected], abs=0.51)
        works = _lengths(page, "work")
        assert len(works) == len(variants)
        uncut = [(us, drawn) for (_, us, *_), drawn in zip(times, works, strict=True) if us < ideal]
        for us, drawn in uncut:
            assert drawn / us == pytest.approx(uncut[0][1] / uncut[0][0], rel=0.02)
    page.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def _lengths(page: Any, lane: str) -> list[float]:
    return page.eval_on_selector_all(f"svg rect.{lane}", "all => all.map(one => Number(one.getAttribute('width')))")


def test_sizes_are_snapped_to_the_grid_and_the_page_says_so(page: Any) -> None:
    """Also with which command they are predicted; it is run."""
    page.select_option("[name=dtype]", "fp8")
    for name, size in (("m", 5000), ("n", 9000), ("k", 8192)):
        page.fill(f"[name={name}]", str(size))
    assert page.inner_text("#shown") == "Shown: M = 4096, N = 8192, K = 8192 in fp8 on 4 × H200."
    said, _, command = page.inner_text("#snapped").partition(" For the sizes as given: iris-bench ")
    assert said == (
        "M = 5000, N = 9000, K = 8192 is not on the grid. Shown instead: M = 4096 for 5000, N = 8192 for 9000; that is "
        "0.75 times the work."
    )
    result = CliRunner().invoke(cli.app, command.split())
    assert result.exit_code == 0, result.output
    assert "all_gather_gemm 5000x9000x8192, 4 x H200" in " ".join(result.output.split())
    on_grid = page.inner_text("#grid")
    assert f"M = {', '.join(map(str, ROWS))}, and N and K of the layers or of 2048, 4096, 8192, 16384 each" in on_grid
    assert page.input_value("[name=layer]") == "other sizes"
    shown = page.inner_text("#taken")
    page.fill("[name=m]", "0")  # no size: what was shown stays
    assert page.inner_text("#taken") == shown


def test_a_layer_sets_the_sizes_and_the_address_keeps_the_problem(page: Any, browser: Any) -> None:
    page.select_option("[name=layer]", "Llama-3-8B gate")
    assert [page.input_value(f"[name={name}]") for name in ("n", "k")] == ["14336", "4096"]
    page.select_option("[name=ranks]", "2")
    assert page.url.endswith("#family=all_gather_gemm&gpu=H200&ranks=2&dtype=bf16&m=8192&n=14336&k=4096")
    again = browser.new_page()
    again.goto(page.url)
    assert again.inner_text("#numbers") == page.inner_text("#numbers")
    again.goto((PAGE / "index.html").as_uri() + "#family=none&gpu=H300&m=x")  # what there is none of: the start
    again.reload()
    assert again.input_value("[name=family]") == "all_gather_gemm"
    assert again.inner_text("#shown") == "Shown: M = 8192, N = 28672, K = 8192 in bf16 on 4 × H200."
    again.close()


def test_links_lead_to_pages(page: Any) -> None:
    targets = page.eval_on_selector_all("a", "all => all.map(one => one.getAttribute('href'))")
    assert targets
    for target in targets:
        assert (PAGE / target.partition("#")[0]).is_file(), target
