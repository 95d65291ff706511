"""Whether this tree's kernels are as fast as another commit's, on the same GPUs, in turns: `make compare BASE=...`.

    python tests/compare.py BASE --out FOLDER [options that `iris-bench run` takes, such as --shapes square]

BASE is a commit, or a folder that holds its tree. In each round the base is measured, then this tree twice, then the
base again. What is compared is, of each problem, the best of our variants over the GEMM alone in the same run, so that
a clock that drifts cancels out. `ratio` is this tree's over the base's, the geometric mean of all runs; `spread` is by
how much the runs of the base differ. Nothing is slower if the geometric mean over a family's problems is at most 1.005,
and no problem's ratio above 1.02 plus its spread; and the host takes no longer for a call, by more than its own spread.
Else the exit status is 1. With --provider, this tree's heap is made of that provider's memory: `BASE=. ARGS="--provider
torch_symmetric_memory"` compares it with the heap's own.

What takes too long for one call is compared in several, each of other problems, and the last of them counts in the runs
of the others: --also FOLDER, which has the CSVs of an earlier --out.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from checkouts import TREE, checkout, environment_of

from iris_bench.records.frames import to_frame
from iris_bench.records.record import GEMM_ALONE, Record, read_records
from overlap_taxonomy import list_variants

TURNS = ("base", "now", "now", "base")
MOST_MEAN = 1.005  # of a family's problems
MOST = 1.02  # of a problem, beside the spread
PROBLEM = ["family", "m", "n", "k"]


def best_of_ours(records: Sequence[Record]) -> pd.DataFrame:
    """Return of each problem the time of the fastest of our variants over the GEMM alone, and what its call costs.

    Raises:
        ValueError: a problem has no time of the GEMM alone, or of ours; or times are a CPU's, no performance.
    """
    rows = to_frame(records)
    if (rows.device == "cpu").any():
        raise ValueError("a CPU's times are those of the interpreter; kernels are compared on GPUs")
    gemm = rows[rows.variant == GEMM_ALONE].set_index(PROBLEM).time_us.dropna()
    is_ours = [name in ours_of(family) for family, name in zip(rows.family, rows.variant, strict=True)]
    ours = rows[is_ours].dropna(subset="time_us").sort_values("time_us").groupby(PROBLEM).first()
    asked = set(rows[PROBLEM].itertuples(index=False, name=None))
    if missing := sorted(asked - (set(ours.index) & set(gemm.index))):
        raise ValueError(f"no times of ours and of the GEMM alone for {missing[0]}")
    return pd.DataFrame({"relative": ours.time_us / gemm[ours.index], "host_us": ours.host_us})


def ours_of(family: str) -> set[str]:
    """Return the names of a family's variants that are ours and choose no other."""
    return {one.name for one in list_variants(family) if one.has_kernels and not one.delegates}


def compared(runs: Sequence[tuple[str, Sequence[Record]]]) -> pd.DataFrame:
    """Return a row per problem: ratio, spread, and the same of the host's time.

    Args:
        runs: "base" or "now", and the rows of a run; several of either, of the same problems.
    """
    found = pd.concat([best_of_ours(records).assign(turn=turn) for turn, records in runs]).reset_index()
    means = found.groupby([*PROBLEM, "turn"])[["relative", "host_us"]].agg(statistics.geometric_mean).unstack("turn")
    base = found[found.turn == "base"].groupby(PROBLEM)[["relative", "host_us"]]
    spreads = base.max() / base.min() - 1
    return pd.DataFrame(
        {
            "ratio": means["relative", "now"] / means["relative", "base"],
            "spread": spreads.relative,
            "host": means["host_us", "now"] / means["host_us", "base"],
            "host_spread": spreads.host_us,
        }
    )


def slower(table: pd.DataFrame) -> list[str]:
    """Return what is slower than in the base, a line each."""
    means = table.groupby("family")[["ratio", "host"]].agg(statistics.geometric_mean)
    host_spreads = table.groupby("family").host_spread.mean()
    lines = [f"{family}: geometric mean {mean:.4f}" for family, mean in means.ratio.items() if mean > MOST_MEAN]
    lines += [
        f"{family}: host time {mean:.3f}, the base's own differ by {host_spreads[family]:.3f}"
        for family, mean in means.host.items()
        if mean > 1 + host_spreads[family]
    ]
    worse = table[table.ratio > MOST + table.spread]
    problems = zip(worse.index, worse.ratio, worse.spread, strict=True)
    return lines + [f"{' '.join(map(str, key))}: {ratio:.4f}, spread {spread:.4f}" for key, ratio, spread in problems]


def measure(
    base: str, out: Path, rounds: int, options: Sequence[str], provider: str = ""
) -> list[tuple[str, list[Record]]]:
    """Run `iris-bench run` on both trees in turns; return the rows of each run, whose files stay in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    runs = []
    with checkout(base) as tree:
        environments = {
            turn: environment_of(one, out / "packages" / turn) for turn, one in (("base", tree), ("now", TREE))
        }
        environments["now"] |= {"IRIS_PROVIDER": provider}
        for number, turn in enumerate(TURNS * rounds):
            file = out / f"{number}-{turn}.csv"
            command = [sys.executable, "-m", "iris_bench", "run", "--overwrite", "--out", str(file), *options]
            subprocess.run(command, check=True, env=environments[turn], cwd=out)
            runs.append((turn, read_records(file)))
    return runs


def runs_in(folder: Path) -> list[tuple[str, list[Record]]]:
    """Return the rows of each run of an earlier comparison, whose files are in a folder.

    Raises:
        ValueError: there are not as many runs of either tree, and one at least.
    """
    runs = [(file.stem.split("-")[1], read_records(file)) for file in sorted(folder.glob("*-*.csv"))]
    turns = [turn for turn, _ in runs]
    if not turns or turns.count("base") != turns.count("now"):
        raise ValueError(f"{folder} has runs of {turns or 'nothing'}, no whole round of base, now, now, base")
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit, or a folder with its tree")
    parser.add_argument("--out", type=Path, required=True, help="a new folder, for a CSV a run and compared.csv")
    parser.add_argument("--turns", type=int, default=2, help="how many rounds of four runs")
    parser.add_argument("--provider", default="", help="of this tree's heap, as iris(provider=...) takes it")
    parser.add_argument("--also", type=Path, action="append", default=[], help="an earlier --out, of other problems")
    asked, options = parser.parse_known_args()
    if asked.turns < 1:
        parser.error(f"--turns {asked.turns} makes no sense; it takes a positive number")
    before = [compared(runs_in(folder)) for folder in asked.also]
    now = compared(measure(asked.base, asked.out.resolve(), asked.turns, options, asked.provider))
    table = pd.concat([*before, now]).sort_index()
    table.to_csv(asked.out / "compared.csv", float_format="%.5g")
    print(table.to_string(float_format="{:.4f}".format))
    print(table.groupby("family").ratio.agg([statistics.geometric_mean, "max"]).to_string(float_format="{:.4f}".format))
    lines = slower(table)
    print(*lines, f"{len(table)} problems, {len(lines)} slower than {asked.base}", sep="\n")
    return min(1, len(lines))


if __name__ == "__main__":
    sys.exit(main())
