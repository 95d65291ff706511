"""What the command writes: tables inside Markdown pages, the report as HTML, pictures.

A table stands between ``<!-- report: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import quote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from ..measure.shapes import LLAMA_3_70B
from . import losses, provenance, questions, tables, targets
from .evidence import LEFT_OUT, ROOT, machines
from .markdown import table
from .paper import beside_the_paper, is_it_reached
from .pictures import pictures
from .predictions import explain_output
from .scale_out import scale_out

REPORT = Path("docs/report.md")
REPORT_HTML = Path("results/report.html")
_BLOCK = re.compile(r"^<!-- report: (?P<name>\S+) -->\n(?P<body>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"^<!-- (?:report: \S+|end) -->$", re.MULTILINE)
_HTML = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #2b2f36; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; font-size: 0.85rem; margin: 1rem 0; }}
th, td {{ border-bottom: 1px solid #d8dbe0; padding: 0.25rem 0.6rem; text-align: left; white-space: nowrap; }}
img {{ max-width: 100%; }}
code {{ font-size: 0.9em; background: #f2f3f5; padding: 0 0.2em; }}
pre code {{ display: block; padding: 0.6rem; }}
</style>
{body}</html>
"""


@functools.cache
def blocks() -> Mapping[str, Callable[[], str]]:
    """Return the function that makes each table of the documentation, by the name in its marker."""
    found: dict[str, Callable[[], str]] = {
        "front-page": partial(questions.front_page, LLAMA_3_70B),
        "front-page-steps": partial(questions.front_page_steps, LLAMA_3_70B),
        "measured": provenance.measured,
        "faster": questions.is_it_faster,
        "expect": partial(questions.what_to_expect, "Llama-3-8B", "Llama-3-70B"),
        "explain": explain_output,
        "patterns": questions.by_which_pattern,
        "limit": questions.how_far_from_the_limit,
        "gains": questions.what_the_gain_consists_of,
        "losses": losses.by_family,
        "losses-by-model": losses.by_model,
        "losses-by-problem": losses.by_problem,
        "losses-to-others": losses.to_other_operators,
        "predictions": questions.was_the_prediction_right,
        "paper": beside_the_paper,
        "paper-reached": is_it_reached,
        "layers": tables.layers,
        "decoder": tables.decoder,
        "links": tables.link_rates,
        "link-sizes": tables.link_sizes,
        "ccl": tables.collectives,
        "epilogue": tables.epilogue,
        "fp8": tables.fp8,
        "norms": tables.norms,
        "host-calls": tables.host_calls,
        "scale-out": scale_out,
        "two-hosts": tables.two_hosts,
        "columns": provenance.columns,
        "files": provenance.files,
        **{f"files-of-{folder}": partial(provenance.files, folder) for folder in LEFT_OUT if folder != "local"},
        "stress": provenance.stress,
        "pictures": _pictures,
        "targets-steps": targets.steps,
        "targets-host": targets.host_time,
        "targets-memory": targets.memory,
        "targets-choice": targets.choice,
        "targets-choice-fp8": targets.choice_in_fp8,
        "targets-few-rows": targets.few_rows,
        "targets-fp8": targets.fp8,
        "targets-norms": targets.norms,
        "targets-four": targets.efficiency_of_four,
        "targets-four-speedups": targets.speedups_of_four,
        "targets-four-steps": targets.steps_of_four,
    }
    for name, machine in machines().items():
        found[f"{name}-small-m"] = partial(tables.small_m, machine)
        found[f"{name}-host"] = partial(tables.host, machine)
        if machine.world_size > 1:
            found |= {f"{name}-layers-m{m}": partial(tables.layers_at, machine, m) for m in (8192, 64)}
    return found


def _pictures() -> str:
    """Return a row a picture, with what it shows."""
    rows = [[f"[{Path(path).name}](../{path})", one.shows] for path, one in pictures().items()]
    return table(["picture", "shows"], rows)


def rewritten(text: str, of: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with each of its tables as they are made from the CSVs today.

    Raises:
        ValueError: a marker without its other half, or that names no table.
    """
    if len(_MARKER.findall(text)) != 2 * len(list(_BLOCK.finditer(text))):
        raise ValueError("a line <!-- report: NAME --> without its <!-- end -->, or the other way round")

    def made(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in of:
            raise ValueError(f"no table is called {name!r}; known tables: {', '.join(of)}")
        return f"<!-- report: {name} -->\n{of[name]()}\n<!-- end -->"

    return _BLOCK.sub(made, text)


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages that may have tables."""
    patterns = ("*.md", "docs/**/*.md", "results/**/*.md")
    found = (page for pattern in patterns for page in root.glob(pattern))
    return sorted(page for page in found if "local" not in page.relative_to(root).parts)


def report_pages(root: Path) -> list[Path]:
    """Return the pages of the report: the questions, then those of long tables."""
    return [root / REPORT, *sorted((root / REPORT.with_suffix("")).glob("*.md"))]


def as_html(texts: Mapping[Path, str]) -> str:
    """Return the report's pages, by their paths from the root, as the one page `REPORT_HTML`.

    Pictures are in the page itself, and links from one of its pages to another stay in it: it needs no other file, but
    its links to CSVs and to the rest of the documentation do. The title is the first page's.
    """
    parser = MarkdownIt("commonmark").enable("table")
    tokens = []
    for page, text in texts.items():
        tokens += (of_page := parser.parse(text))
        next(token for token in of_page if token.tag == "h1").attrSet("id", page.stem)
        _rebase(of_page, page.parent, texts)
    title = next(tokens[index + 1].content for index, token in enumerate(tokens) if token.tag == "h1")
    return _HTML.format(title=title, body=parser.renderer.render(tokens, parser.options, {}))


def _rebase(tokens: list[Token], folder: Path, pages: Container[Path]) -> None:
    """Make relative links of a page in a folder those of `REPORT_HTML`, and put its pictures into it."""
    for token in tokens:
        _rebase(token.children or [], folder, pages)
        for name in ("href", "src"):
            target = token.attrGet(name)
            if isinstance(target, str) and not re.match(r"[a-z]+:|#", target):
                token.attrSet(name, _moved(Path(os.path.normpath(folder / target)), pages))


def _moved(target: Path, pages: Container[Path]) -> str:
    """Return what stands in `REPORT_HTML` for a link to a file, by its path from the root."""
    if target.suffix == ".svg":
        return _as_data((ROOT / target).read_text())
    return f"#{target.stem}" if target in pages else os.path.relpath(target, REPORT_HTML.parent)


def _as_data(svg: str) -> str:
    """Return an SVG as an address: base64 would be a fifth longer, and would hide from git what stays the same."""
    return "data:image/svg+xml," + quote(re.sub(r"\s*\n\s*", " ", svg), safe=" ;/?:@&=+$,-_.!~*'()[]{}|^")
