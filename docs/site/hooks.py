"""The documentation site: the repository's own pages, at their own paths, and a reference made of docstrings.

Links are those that a forge follows. Where one leads to a source, the site has a page with that source; to a folder,
its README, or a page that lists it; to anything else, a copy of the file.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Link, Navigation

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("*.md", "docs/**/*.md", "kernels/*/README.md", "bench/*.md", "examples/*.md"),
    *("results/*.md", "results/tuning/README.md", "results/archive/README.md"),
)
ASSETS = (".csv", ".html", ".json", ".png", ".svg")  # of what a page links to, what a browser shows as it is
SCRIPTS = ("docs/interactive/*.js",)  # of pages of their own

# Folders of the repository, by the name that a package of theirs is imported under.
FOLDERS = {"iris_kernels": "kernels", "iris_tensor_parallel": "tensor_parallel", "iris_bench": "bench"}

# Pages of the reference: a title, and the modules that are on it, each with names, or with all that it exports.
REFERENCE = {
    "host": (
        "Host functions",
        "iris_core: iris Context launch RankPool RankInfo AllocationMismatch HeapExhausted PeerError RankError "
        "do_bench set_logger_level logger",
    ),
    "device": (
        "Device functions",
        "iris_core.device.rma",
        "iris_core.device.sync: signal signal_each wait wait_each barrier",
        "iris_core.device.context: DeviceContext",
        "iris_core.device.tracing: TraceEvent Tracing",
        "iris_core.device.intrinsics: clock_ns pause interpreted fence_before_descriptor_loads gdc_wait "
        "gdc_launch_dependents",
    ),
    "gluon": ("Gluon", "iris_core.gluon"),
    "tiles": ("Tile-level collectives", "iris_core.x"),
    "collectives": ("Collectives on whole tensors", "iris_core.collectives.ccl", "iris_core.collectives.config"),
    "checker": ("Race checker", "iris_core.checker"),
    "tracing": ("Tracing", "iris_core.tracing"),
    "benchmarks": ("Benchmarks of your own", "iris_core.bench"),
    "operators": (
        "Operators",
        "iris_kernels.gemm_all_scatter: gemm_all_scatter",
        "iris_kernels.all_gather_gemm: all_gather_gemm",
        "iris_kernels.gemm_reduce_scatter: gemm_reduce_scatter",
        "iris_kernels.gemm_all_reduce: gemm_all_reduce",
        "iris_kernels.common.problem: Problem",
        "iris_kernels.gemm_all_scatter.problem: GemmAllScatterProblem",
        "iris_kernels.all_gather_gemm.problem: AllGatherGemmProblem",
        "iris_kernels.gemm_reduce_scatter.problem: GemmReduceScatterProblem",
        "iris_kernels.gemm_all_reduce.problem: GemmAllReduceProblem",
        "iris_kernels.common.operators.operator: Operator",
        "iris_kernels.common.config: GemmConfig",
    ),
    "tensor_parallel": (
        "Layers and styles",
        "iris_tensor_parallel",
        "iris_tensor_parallel.styles: mesh_of ColwiseParallel RowwiseParallel",
        "iris_tensor_parallel.sequences: ShardSequences",
        "iris_tensor_parallel.tp_plan: DivideGroups SumGradients",
    ),
    "taxonomy": ("Taxonomy and cost model", "overlap_taxonomy"),
}


def on_config(config: MkDocsConfig) -> None:
    """Make anchors of headings as a forge does."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the site's files: the theme's, and ours in the place of what lies in `docs_dir` alone."""
    site = Files([one for one in files if one.src_dir != config.docs_dir])
    paths = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    for path in paths:
        site.append(File.generated(config, _uri(path), abs_src_path=str(path)))
    for script in (path for pattern in SCRIPTS for path in ROOT.glob(pattern)):
        site.append(File.generated(config, _uri(script), abs_src_path=str(script)))
    for linked in sorted({target for path in paths for target in _targets(path)} - set(paths)):
        if linked.suffix in ASSETS:
            site.append(File.generated(config, _uri(linked), abs_src_path=str(linked)))
        elif not (linked / "README.md").exists():
            text = _listing(linked) if linked.is_dir() else _source(linked)
            unlisted = InclusionLevel.NOT_IN_NAV
            site.append(File.generated(config, _page_of(linked), content=text, inclusion=unlisted))
    for name, parts in REFERENCE.items():
        site.append(File.generated(config, f"reference/{name}.md", content=reference(*parts)))
    return site


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Turn entries that are no Markdown into links: as pages, the theme would take index.html for its section's own."""
    for page in [one for one in nav.pages if not one.file.is_documentation_page()]:
        siblings = page.parent.children if page.parent else nav.items
        siblings[siblings.index(page)] = Link(page.title, page.url)
        if page.previous_page:
            page.previous_page.next_page = page.next_page
        if page.next_page:
            page.next_page.previous_page = page.previous_page
        nav.pages.remove(page)
    return nav


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Turn links to sources and folders into links to their pages."""
    path = ROOT / page.file.src_uri
    return _LINK.sub(lambda link: _to_page(link, path.parent), markdown) if path.exists() else markdown


def anchor(heading: str, separator: str) -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def reference(title: str, *parts: str) -> str:
    """Return a page of the reference: what mkdocstrings is to take of which modules."""
    page = [f"# {title}"]
    for part in parts:
        module, _, names = part.partition(":")
        members = "".join(f"\n        - {name}" for name in names.split() or public_names(module))
        page.append(f"## `{module}`\n\n::: {module}\n    options:\n      heading_level: 3\n      members:{members}")
    return "\n\n".join(page)


def public_names(module: str) -> list[str]:
    """Return the names that a module exports: those of ``__all__``, or what it defines without an underscore."""
    package, *rest = module.split(".")
    path = ROOT.joinpath(FOLDERS.get(package, package), *rest)
    body = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    defined = (node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)))
    return [name for name in defined if not name.startswith("_")]


_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def _targets(page: Path) -> set[Path]:
    """Return the files and folders of the repository that a page links to."""
    found = {(page.parent / link[1]).resolve() for link in _LINK.finditer(_prose(page.read_text()))}
    return {path for path in found if path.exists()}


def _prose(markdown: str) -> str:
    return re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)


def _to_page(link: re.Match[str], folder: Path) -> str:
    path = (folder / link[1]).resolve()
    if not path.exists() or path.suffix in (".md", *ASSETS):
        return link[0]
    rest = _page_of(path).removeprefix(_uri(path))
    return link[1].rstrip("/") + rest + (link[2] or "")


def _page_of(path: Path) -> str:
    """Return the page of a source or a folder."""
    if path.is_dir():
        return f"{_uri(path)}/{'README' if (path / 'README.md').exists() else 'index'}.md"
    return f"{_uri(path)}.md"


def _uri(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _source(path: Path) -> str:
    language = "python" if path.suffix == ".py" else "text"
    return _hidden(f'# `{path.name}`\n\n``````{language} title="{_uri(path)}" linenums="1"\n{path.read_text()}``````\n')


def _listing(folder: Path) -> str:
    sources = sorted(folder.rglob("*.py"))
    rows = [f"| `{one.relative_to(folder)}` | {_summary(one)} |" for one in sources if _summary(one)]
    return _hidden("\n".join([f"# `{_uri(folder)}`", "", "| file | what it has |", "|---|---|", *rows]))


def _summary(source: Path) -> str:
    docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
    return docstring.partition("\n")[0].replace("|", "\\|")


def _hidden(markdown: str) -> str:
    """Leave a page out of the search, which is for the documentation."""
    return f"---\nsearch:\n  exclude: true\n---\n{markdown}"
