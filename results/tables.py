"""Write the tables of docs/performance.md and docs/paper.md from the CSVs beside this file, between their markers.

- python results/tables.py
"""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

RESULTS = Path(__file__).parent
PAGES = tuple(RESULTS.parent / "docs" / name for name in ("performance.md", "paper.md"))
PROBLEM = ["family", "m", "n", "k"]
BASELINES = {"library", "library_layout", "library_list", "async_tp", "kraken", "gemm_alone", "communication_alone"}
FAMILIES = {
    "gemm_all_scatter": "GEMM + all-scatter",
    "all_gather_gemm": "all-gather + GEMM",
    "gemm_reduce_scatter": "GEMM + reduce-scatter",
    "gemm_all_reduce": "GEMM + all-reduce",
}
LARGE = {4: ("h200x4-large-bf16.csv",), 2: ("h200x2-large-bf16.csv", "h200x2-all-reduce-bf16.csv")}
LARGE_SETS = ("square", "llama", "paper")
SMALL = {4: "h200x4-decode-bf16.csv", 2: "h200x2-decode-bf16.csv"}
ROWS = {"1, 8": (1, 8), "32, 64": (32, 64), "128": (128,), "256, 512": (256, 512)}
LAYERS = (
    ("Llama-3-8B gate or up", "all_gather_gemm", (8192, 14336, 4096)),
    ("Llama-3-8B down", "gemm_reduce_scatter", (8192, 4096, 14336)),
    ("Llama-3-8B down", "gemm_all_reduce", (8192, 4096, 14336)),
    ("Llama-3-70B gate or up", "all_gather_gemm", (8192, 28672, 8192)),
    ("Llama-3-70B gate or up", "gemm_all_scatter", (8192, 28672, 8192)),
    ("Llama-3-70B down", "gemm_reduce_scatter", (8192, 8192, 28672)),
    ("Llama-3-70B down", "gemm_all_reduce", (8192, 8192, 28672)),
    ("Qwen2.5-72B gate or up", "all_gather_gemm", (8192, 29568, 8192)),
    ("Qwen2.5-72B down", "gemm_reduce_scatter", (8192, 8192, 29568)),
    ("square", "all_gather_gemm", (8192, 8192, 8192)),
    ("square", "gemm_reduce_scatter", (8192, 8192, 8192)),
    ("square", "gemm_all_reduce", (8192, 8192, 8192)),
)


def read(*names: str) -> pd.DataFrame:
    """Return the rows that are right of several CSVs; the last of those of one problem and variant."""
    rows = pd.concat([pd.read_csv(RESULTS / name) for name in names])
    return rows[rows.status == "ok"].drop_duplicates([*PROBLEM, "variant"], keep="last")


def times(rows: pd.DataFrame) -> pd.DataFrame:
    """Return times in µs, a row a problem, a column a variant, with the fastest fused one as ``best``."""
    table = rows.pivot_table(index=PROBLEM, columns="variant", values="time_us")
    fused = table[[name for name in table if name not in BASELINES and name != "auto"]]
    table["best"], table["best_name"] = fused.min(axis=1), fused.idxmin(axis=1)
    table["ideal"] = rows.groupby(PROBLEM).ideal_us.last()
    return table


def mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean."""
    logs = [math.log(one) for one in ratios]
    return math.exp(sum(logs) / len(logs))


def layers(world_size: int) -> list[list[str]]:
    table = times(read(*LARGE[world_size]))
    lines = [["layer", "", "M, N, K", "`library`", "`async_tp`", "`kraken`", "fastest fused", "ideal"]]
    for layer, family, sizes in LAYERS:
        if (family, *sizes) in table.index:
            row = table.loc[(family, *sizes)]
            others = [f"{row[name]:,.0f}" if row.get(name, 0) > 0 else "" for name in ("library", "async_tp", "kraken")]
            fused = f"{row.best:,.0f} ({row.library / row.best:.2f}×) `{row.best_name}`"
            lines.append([layer, FAMILIES[family], ", ".join(map(str, sizes)), *others, fused, f"{row.ideal:,.0f}"])
    return lines


def large() -> list[list[str]]:
    lines = [["", "GPUs", "problems", "over `library`", "over `async_tp`", "over `kraken`", "efficiency", "lowest"]]
    for world_size, names in LARGE.items():
        rows = read(*names)
        table = times(rows[(rows.m >= 4096) & (rows.shape_set != "ragged")])
        for family, name in FAMILIES.items():
            if family in table.index.get_level_values(0):
                own = table.loc[[family]].dropna(subset=["best"])
                ratios = [_over(own, baseline) for baseline in ("library", "async_tp", "kraken")]
                efficiency = own.ideal / own.best
                measures = f"{mean(efficiency):.2f}", f"{efficiency.min():.2f}"
                lines.append([name, f"{world_size}", f"{len(own)}", *ratios, *measures])
    return lines


def _over(table: pd.DataFrame, baseline: str) -> str:
    ratios = (table[baseline] / table.best).dropna() if baseline in table else pd.Series(dtype=float)
    return f"{mean(ratios):.2f}× ({ratios.min():.2f} – {ratios.max():.2f})" if len(ratios) else ""


def small(world_size: int) -> list[list[str]]:
    """Leaves out problems in which `library` waited for the host: see `late`."""
    rows = read(SMALL[world_size])
    table = times(rows[rows.shape_set == "decode"])
    table = table[~late(table)]
    lines = [["M", *FAMILIES.values()]]
    for title, sizes in {**ROWS, "all": sum(ROWS.values(), ())}.items():
        own = table[table.index.get_level_values("m").isin(sizes)]
        lines.append([title, *(_over(own.loc[[family]], "library") for family in FAMILIES)])
    return lines


def late(table: pd.DataFrame) -> pd.Series:
    """Return where `library` took more than 1.25 times its GEMM and its collective, each timed alone beside it."""
    return table.library > 1.25 * (table.gemm_alone + table.communication_alone)


def single() -> list[list[str]]:
    lines = [["", "H200, M ≥ 2048", "H200, M ≤ 512", "H100, M ≥ 2048", "H100, M ≤ 512"]]
    tables = []
    for large_file, small_file in (("h200-bf16.csv", "h200-decode-bf16.csv"), ("h100-bf16.csv", "h100-bf16.csv")):
        rows = read(large_file)
        tables.append(times(rows[rows.shape_set.isin(LARGE_SETS)]))
        rows = read(small_file)
        tables.append(times(rows[rows.shape_set == "decode"]))
    for family, name in FAMILIES.items():
        cells = [
            _over(table.loc[[family]], "library") if family in table.index.get_level_values(0) else "not measured"
            for table in tables
        ]
        lines.append([name, *cells])
    return lines


def paper(name: str, baseline: str) -> list[list[str]]:
    rows = read(name)
    table = times(rows[(rows.family == "gemm_all_scatter") & (rows.shape_set == "paper")])
    over = [f"over `{one}`" for one in (baseline, "library")]
    lines = [["M, N, K", f"`{baseline}`", "`library`", "`warp_specialized`", *over, "GEMM alone"]]
    for (_, *sizes), row in table.sort_index(level=["k", "n"]).iterrows():
        ours = row.warp_specialized
        cells = [f"{row[one]:,.0f}" for one in (baseline, "library", "warp_specialized")]
        ratios = [f"{row[one] / ours:.2f}×" for one in (baseline, "library")]
        lines.append([", ".join(map(str, sizes)), *cells, *ratios, f"{row.gemm_alone:,.0f}"])
    return lines


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "layers-4": lambda: layers(4),
    "layers-2": lambda: layers(2),
    "large": large,
    "small-4": lambda: small(4),
    "small-2": lambda: small(2),
    "single": single,
    "paper-4": lambda: paper("h200x4-large-bf16.csv", "library_layout"),
    "paper-2": lambda: paper("h200x2-paper-bf16.csv", "library_list"),
}


def filled(page: str) -> str:
    """Return a page with what stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` built anew."""

    def table(match: re.Match[str]) -> str:
        head, *rows = TABLES[match[1]]()
        lines = [head, ["---"] * len(head), *rows]
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"<!-- table: {match[1]} -->\n{text}\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
