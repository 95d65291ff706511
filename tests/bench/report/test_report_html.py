"""The report as HTML: one file, made from the report's pages and pictures."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest

from iris_bench.report import cli, pages, pictures
from iris_bench.report.pages import REPORT_HTML, as_html, report_pages

ROOT = Path(__file__).parents[3]
PAGES = {page.relative_to(ROOT): page.read_text() for page in report_pages(ROOT)}
HTML = (ROOT / REPORT_HTML).read_text()
MAILED_BYTES = 10e6


def test_it_is_the_report() -> None:
    assert len(PAGES) > 5
    assert as_html(PAGES) == HTML, "make report"


def test_links_lead_to_files() -> None:
    targets = re.findall(r'href="([^"#]+)', HTML)
    assert len(targets) > 20
    for target in targets:
        assert re.match("[a-z]+:", target) or (ROOT / REPORT_HTML.parent / target).exists(), target


def test_pictures_are_in_it() -> None:
    paths = [page.parent / path for page, text in PAGES.items() for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)]
    shown = re.findall(r'<img src="data:image/svg\+xml,([^"]+)"', HTML)
    assert len(shown) == HTML.count("<img ") > 5
    for path, data in zip(paths, shown, strict=True):
        assert unquote(html.unescape(data)).split() == (ROOT / path).read_text().split(), path
    assert len(HTML.encode()) < MAILED_BYTES


def test_links_between_pages_stay_in_it() -> None:
    within = set(re.findall(r'href="#([^"]+)"', HTML))
    assert len(within) > 5
    assert within <= set(re.findall(r'id="([^"]+)"', HTML))
    apart = {os.path.relpath(page, REPORT_HTML.parent) for page in PAGES}
    assert not apart & set(re.findall(r'href="([^"#]+)', HTML))


def test_it_gets_the_pictures_of_the_same_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where older ones lie there."""
    for module in (cli, pages):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    drawn = SimpleNamespace(draw=lambda path: path.write_text("<svg>today</svg>"))
    monkeypatch.setattr(pages, "blocks", dict)
    monkeypatch.setattr(pictures, "pictures", lambda: {"docs/one.svg": drawn})
    for folder in ("docs", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "docs/one.svg").write_text("<svg>before</svg>")
    (tmp_path / "docs/report.md").write_text("# One\n\n![one](one.svg)\n")
    cli.make_report()
    assert "%3Csvg%3Etoday%3C/svg%3E" in (tmp_path / REPORT_HTML).read_text()
