"""The command line of a file of benchmarks."""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..launcher.pool import RankPool
from .benchmark import NUM_RANKS, Benchmark, linear_range, power_of_two, registered
from .rank import Row, measure

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_HEAP_BYTES = 1 << 30


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmarks that are registered and print a table.

    ``--axis_M=1024,2048`` replaces an axis, ``--skip_M=1024`` leaves values out; ``pow2:8:12`` and ``lin:64:256:64``
    are ranges, ``fp16``, ``bf16`` and ``fp32`` dtypes. ``--help`` lists the others. Without an axis "num_ranks" there
    are as many ranks as GPUs, or two.

    Args:
        argv: the arguments; None for those of the process.
    """
    parser = argparse.ArgumentParser(description="Run benchmarks. --axis_NAME=VALUES and --skip_NAME=VALUES, too.")
    parser.add_argument("--benchmark_filter", default="", help="a regular expression of names")
    parser.add_argument("--benchmark_format", choices=list(_FORMATS), default="console")
    parser.add_argument("--benchmark_out", type=Path, help="a file to write, too")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2, help='without axis "num_ranks"')
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--heap_size", type=int, default=_HEAP_BYTES, help="bytes per rank")
    parser.add_argument("--n_warmup", type=int, help="calls before those that are timed [25; interpreted: 1]")
    parser.add_argument("--n_repeat", type=int, help="timed calls [100; interpreted: 3]")
    options, others = parser.parse_known_args(argv)
    try:
        chosen, left_out = _changes_of_axes(others)
    except ValueError as error:
        parser.error(str(error))
    benchmarks = [
        Benchmark(one.fn, _changed(one.axes, chosen, left_out))
        for one in registered()
        if re.search(options.benchmark_filter, one.fn.__name__)
    ]
    rows = list(_run(benchmarks, options))
    if not rows:
        parser.error("there is no benchmark, or no combination of values, to run")
    text = _FORMATS[options.benchmark_format](rows)
    print(text, end="")
    if options.benchmark_out:
        options.benchmark_out.write_text(text)


def _run(benchmarks: Sequence[Benchmark], options: argparse.Namespace) -> Iterator[Row]:
    """Run the benchmarks; those of one number of ranks share processes."""
    sizes = sorted({size for one in benchmarks for size in one.axes.get(NUM_RANKS, [options.ranks])})
    for world_size in sizes:
        combinations = [
            (one, dict(zip(one.axes, values, strict=True)))
            for one in benchmarks
            for values in itertools.product(*one.axes.values())
            if dict(zip(one.axes, values, strict=True)).get(NUM_RANKS, options.ranks) == world_size
        ]
        try:
            pool = RankPool(world_size, options.device)
        except ValueError as error:  # more ranks than GPUs
            yield from (Row(one.fn.__name__, world_size, params, skipped=str(error)) for one, params in combinations)
            continue
        with pool:
            for one, params in combinations:
                yield pool.call(measure, one.fn, params, options.heap_size, options.n_warmup, options.n_repeat)[0]


def _changes_of_axes(arguments: Sequence[str]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the axes that are replaced, and the values that are left out."""
    changes: dict[str, dict[str, list[Any]]] = {"axis": {}, "skip": {}}
    for argument in arguments:
        found = re.fullmatch(r"--(axis|skip)_(\w+)=(.+)", argument)
        if not found:
            raise ValueError(f"unknown argument {argument}; an axis is given as --axis_NAME=VALUES, in one word")
        changes[found[1]][found[2]] = _values(found[3])
    return changes["axis"], changes["skip"]


def _values(text: str) -> list[Any]:
    """Return the values that a text stands for."""
    kind, *numbers = text.split(":")
    ranges: dict[str, Callable[..., list[int]]] = {"pow2": power_of_two, "lin": linear_range}
    if kind in ranges:
        try:
            return ranges[kind](*map(int, numbers))
        except (TypeError, ValueError):
            raise ValueError(f"{text} is no range; ranges are pow2:FIRST:LAST and lin:FIRST:LAST:STEP") from None
    return [_value(part.strip()) for part in text.split(",")]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    dtype = _DTYPES.get(text, getattr(torch, text, None))
    return dtype if isinstance(dtype, torch.dtype) else text


def _changed(
    axes: dict[str, list[Any]], chosen: dict[str, list[Any]], left_out: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    """Return a benchmark's axes as the command line has them; the number of ranks is one of every benchmark's."""
    known = {name: chosen.get(name, values) for name, values in axes.items()}
    if NUM_RANKS in chosen:
        known[NUM_RANKS] = chosen[NUM_RANKS]
    return {name: [one for one in values if one not in left_out.get(name, [])] for name, values in known.items()}


def _cells(row: Row) -> dict[str, Any]:
    """Return a row's columns, without those that are empty in it."""
    params = {name: str(value).removeprefix("torch.") for name, value in row.params.items() if name != NUM_RANKS}
    measured = {"ms": row.time_ms, "GB/s": row.gbps, "TFLOP/s": row.tflops, **row.counters, "skipped": row.skipped}
    known = {name: value for name, value in measured.items() if value is not None}
    return {"benchmark": row.benchmark, "ranks": row.world_size, **params, **known}


def _as_csv(rows: Sequence[Row]) -> str:
    cells = [_cells(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(itertools.chain(*cells))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    return text.getvalue()


def _as_table(rows: Sequence[Row]) -> str:
    """Return a table a benchmark."""
    tables = []
    for _, group in itertools.groupby(sorted(rows, key=lambda row: row.benchmark), lambda row: row.benchmark):
        cells = [_cells(row) for row in group]
        names = list(dict.fromkeys(itertools.chain(*cells)))
        lines = [names, *([_shown(one.get(name, "")) for name in names] for one in cells)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        tables += ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
        tables.append("")
    return "\n".join(tables)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _as_json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2, default=lambda value: str(value)) + "\n"


_FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {"console": _as_table, "csv": _as_csv, "json": _as_json}
