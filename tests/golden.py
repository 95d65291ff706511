"""The golden record of machine code: a hash of each kernel that the codegen tests compile, and what has changed since.

    python tests/golden.py record --out FILE [--only PATTERN]
    python tests/golden.py diff BASE [--only PATTERN]        (make codegen-diff BASE=...)

A hash is of the assembly without symbols and line information, so that renaming and moving code leave it as it is.
`diff` checks out the commit BASE beside this tree, records both and lists each case whose kernels differ; it exits with
1 if one does. A record of all cases takes about 15 minutes on two cores; what is compiled already is in Triton's cache.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkouts import TREE, checkout, environment_of

TESTS = Path(__file__).resolve().parent
_MODULES = ("test_codegen", "test_codegen_hopper")  # which list cases
_COMMENT = re.compile(r"\s*(?://|;).*")


def normalised(code: str, name: str) -> str:
    """Return assembly (PTX or AMD's) without comments, empty lines and the kernel's name."""
    lines = (_COMMENT.sub("", line).rstrip() for line in code.splitlines())
    return re.sub(rf"\b{re.escape(name)}", "kernel", "\n".join(line for line in lines if line))


def record_case(case: Any) -> tuple[str, list[Any] | str]:
    """Return a case's name, and of each kernel a hash of its code, its shared memory, registers and spills."""
    compiling = importlib.import_module("compiling")
    name = f"{case}-w{case.world_size}"
    try:
        kernels = compiling.compile_case(case)
    except Exception as error:
        return name, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return name, [
        [
            hashlib.sha256(normalised(one.code, one.name).encode()).hexdigest()[:16],
            *(one.shared_bytes, one.registers, one.scratch_bytes),
        ]
        for one in kernels
    ]


def cases(only: str) -> list[Any]:
    """Return the codegen tests' cases, each once, whose name a pattern is found in."""
    found: dict[str, Any] = {}
    for name in _MODULES:
        module = importlib.import_module(name)
        listed = getattr(module, "CASES", None)
        listed = listed or [case for variant in module.VARIANTS for case in module.cases_of(variant)]
        found |= {f"{case}-w{case.world_size}": case for case in listed}
    return [case for name, case in found.items() if re.search(only, name)]


def record(only: str) -> dict[str, list[Any] | str]:
    """Compile all cases, a process a core; return what `record_case` returns, by name."""
    chosen, kept = cases(only), {}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for done, (name, kernels) in enumerate(pool.imap_unordered(record_case, chosen), start=1):
            kept[name] = kernels
            if done % 20 == 0 or done == len(chosen):
                print(f"{done} of {len(chosen)} cases compiled", file=sys.stderr, flush=True)
    return dict(sorted(kept.items()))


def record_of(tree: Path, folder: Path, only: str) -> dict[str, Any]:
    """Return the record of a checkout, made by this file with that tree's packages and tests."""
    out = folder / "record.json"
    environment = environment_of(tree, folder / "packages") | {"TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, __file__, "record", "--out", str(out), "--tests", str(tree / "tests"), "--only", only]
    subprocess.run(command, check=True, env=environment, cwd=folder)
    return json.loads(out.read_text())


def differences(base: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Describe each case that two records do not have alike."""
    for name in sorted(base.keys() | now.keys()):
        if base.get(name) != now.get(name):
            yield f"{name}\n  base {base.get(name, 'no such case')}\n  now  {now.get(name, 'no such case')}"


def diff(base: str, only: str) -> int:
    """Record a commit and this tree; print what differs. Returns how many cases do."""
    with tempfile.TemporaryDirectory() as folder, checkout(base) as tree:
        before = record_of(tree, Path(folder) / "of-base", only)
        now = record_of(TREE, Path(folder) / "of-now", only)
    found = list(differences(before, now))
    print(*found, f"{len(now)} cases, {len(found)} differ from {base}", sep="\n")
    return len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_record, to_diff = commands.add_parser("record"), commands.add_parser("diff")
    to_record.add_argument("--out", type=Path, required=True)
    to_record.add_argument("--tests", default=str(TESTS), help="the folder of the tests whose cases are compiled")
    to_diff.add_argument("base", help="a commit")
    for command in (to_record, to_diff):
        command.add_argument("--only", default="", help="a regular expression that a case's name must match")
    asked = parser.parse_args()
    if asked.command == "diff":
        return min(1, diff(asked.base, asked.only))
    # Ahead of this file's folder; worker processes get the same path.
    sys.path[:0] = [asked.tests, *map(str, sorted({path.parent for path in Path(asked.tests).rglob("*.py")}))]
    asked.out.write_text(json.dumps(record(asked.only), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
