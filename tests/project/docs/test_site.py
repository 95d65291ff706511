"""The documentation site: it builds strictly, needs nothing from elsewhere, and its reference has every public name."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import iris_core
import iris_tensor_parallel
import overlap_taxonomy
from iris_core import bench, checker, gluon, tracing, x
from overlap_taxonomy import list_families

pytest.importorskip("mkdocs", reason="needs the extra docs")

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[3]
OF_LOGGING = {"DEBUG", "INFO", "WARNING", "ERROR"}  # which `iris_core` hands on
PACKAGES = (iris_core, x, gluon, checker, tracing, bench, iris_tensor_parallel, overlap_taxonomy)


def config_of(folder: Path) -> Any:
    """The site's configuration, to be built into a folder."""
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    return config


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: what is to be warned of is an error."""
    folder = tmp_path_factory.mktemp("site")
    build(config_of(folder))
    return folder


def public_names() -> Iterator[tuple[str, Any]]:
    """The name in the reference of every public function and class, with what it is."""
    for package in PACKAGES:
        for name in set(package.__all__) - OF_LOGGING:
            yield name, getattr(package, name)
    for family in list_families():
        function = getattr(importlib.import_module(f"iris_kernels.{family}"), family, None)
        if function is not None:
            yield family, function


def headings(site: Path) -> set[str]:
    """The last parts of all names that have a heading of their own in the reference, of methods the last two."""
    found: set[str] = set()
    for page in site.glob("reference/*/index.html"):
        for name in re.findall(r'<h[3-6] id="([\w.]+)"', page.read_text()):
            parts = name.split(".")
            found |= {parts[-1], ".".join(parts[-2:])}
    return found


@pytest.mark.slow
def test_reference_has_every_public_name(site: Path) -> None:
    expected = {name for name, _ in public_names()}
    for name, one in public_names():
        if inspect.isclass(one) and one.__module__.startswith("iris_"):
            expected |= {f"{name}.{method}" for method in vars(one) if is_public_method(one, method)}
    assert len(expected) > 150
    assert not expected - headings(site)


def is_public_method(owner: type, name: str) -> bool:
    member = vars(owner)[name]
    return not name.startswith("_") and inspect.isfunction(member) and member.__module__.startswith("iris_")


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """Whatever a page loads, unlike what it links to, is a file of the site."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 150
    for page in pages:
        tags = re.findall(r"<(?:script|img|link|source|iframe)\b[^>]*>", page.read_text())
        for tag in tags:
            if 'rel="canonical"' in tag:
                continue
            for target in re.findall(r'\b(?:src|href)="([^"#?]+)', tag):
                if target.startswith("data:"):
                    continue
                assert not re.match(r"(?:[a-z]+:)?//", target), f"{page}: {tag}"
                base = site if target.startswith("/") else page.parent
                assert (base / target.lstrip("/")).exists(), f"{page}: {tag}"
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:[a-z]+:)?//", sheet.read_text()), sheet


@pytest.mark.slow
def test_navigation_leads_to_the_page_of_predictions(site: Path) -> None:
    """From pages of any depth; the page comes as it is, not in the theme, with its scripts beside it."""
    shown = "docs/interactive/index.html"
    for page in ("index.html", "docs/design/index.html", "kernels/gemm_all_scatter/index.html"):
        links = re.findall(
            r'<a href="([^"]+)" class="md-(\w+)__link[^"]*">(.*?)</a>', (site / page).read_text(), re.DOTALL
        )
        found = {target for target, where, text in links if where == "nav" and "Time lines, interactive" in text}
        assert {(site / page).parent.joinpath(target, "index.html").resolve() for target in found} == {site / shown}
        tabs = [target for target, where, text in links if where == "tabs" and "Concepts" in text]
        assert len(tabs) == 1
        assert not found & {*tabs}  # the section opens with its first page
    for name in ("index.html", "timelines.js", "predictions.js"):
        assert (site / shown).with_name(name).read_bytes() == (ROOT / shown).with_name(name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "is_broken"), [("one.md#m--512", False), ("nowhere.md", True), ("one.md#m-512", True), ("one", True)]
)
def test_a_broken_link_fails(tmp_path: Path, target: str, is_broken: bool, caplog: pytest.LogCaptureFixture) -> None:
    """By the site's own configuration, with two pages; anchors are those that a forge makes."""
    config = config_of(tmp_path)
    config.nav = None
    texts = {"one.md": "# One\n\n## M ≤ 512\n", "other.md": f"# Other\n\n[link]({target})\n"}

    def two_pages(files: Files, *, config: Any) -> Files:
        theme = [one for one in files if one.src_dir != config.docs_dir]
        return Files([*theme, *(File.generated(config, name, content=text) for name, text in texts.items())])

    config.plugins.events["files"] = [two_pages]
    if is_broken:
        with pytest.raises(Abort):
            build(config)
        assert target in caplog.text
    else:
        build(config)
