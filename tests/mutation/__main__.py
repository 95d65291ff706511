"""The command behind ``make mutants``: python -m mutation, from the root, with tests/ on the path."""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from .explained import EXPLAINED
from .mutants import Mutant, make_mutants
from .uses import Uses, Variant

# What is imported is a copy under the names that the packages are installed under.
PACKAGES = {"iris_core": "iris_core", "iris_kernels": "kernels", "iris_bench": "bench"}
PACKAGES |= {"iris_tensor_parallel": "tensor_parallel", "overlap_taxonomy": "overlap_taxonomy"}
# By the process that each mutant's is forked from: nothing of ours.
IMPORTED_ONCE = ("greenlet", "hypothesis", "pandas", "pytest", "rich.progress", "torch", "typer")
IMPORTED_ONCE += ("triton.experimental.gluon.nvidia.hopper", "triton.runtime.interpreter", "triton.backends.compiler")
LIMIT_S = 420  # of one mutant
NICENESS = 5
KILLED, SURVIVED, UNDECIDED = "killed", "survived", "undecided"


class Outcome(NamedTuple):
    """What became of a mutant; `source` is the digest of the file as it was, since another file has other mutants."""

    mutant: str
    line: int
    outcome: str
    by: str
    seconds: float
    source: str


def main() -> int:
    """Run the mutants that the command line asks for; return 1 if one survives that nobody has explained."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="those whose name matches a regular expression")
    parser.add_argument("--list", action="store_true", help="show their names and what is known of them, run nothing")
    parser.add_argument("--out", type=Path, default=Path("results/local/mutants.csv"), help="read, and added to")
    parser.add_argument("--again", action="store_true", help="also those that are known to be killed, or explained")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once, each in a copy of the tree of its own")
    options = parser.parse_args()
    root = Path.cwd()
    mutants = [mutant for mutant in make_mutants(root) if re.search(options.only, mutant.name)]
    known = _read(options.out)
    digests = {path: _digest(root / path) for path in {mutant.path for mutant in mutants}}
    outcomes: dict[str, Outcome] = {}
    for mutant in mutants:
        before = known.get(mutant.name)
        if before and before.source == digests[mutant.path]:
            outcomes[mutant.name] = before
    if not options.list:
        killed = {name for name, outcome in outcomes.items() if outcome.outcome == KILLED}
        todo = [m for m in mutants if options.again or m.name not in killed | EXPLAINED.keys()]
        _run_all(root, todo, digests, options.out, outcomes, max(1, min(options.jobs, len(todo))))
    else:
        for mutant in mutants:
            print(f"{mutant.line:5} {mutant.name}  [{_said(mutant.name, outcomes.get(mutant.name))}]")
    return _sum_up(mutants, outcomes)


def _run_all(
    root: Path,
    mutants: Sequence[Mutant],
    digests: dict[str, str],
    out: Path,
    outcomes: dict[str, Outcome],
    jobs: int,
) -> None:
    for module in IMPORTED_ONCE:
        importlib.import_module(module)

    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the copies and the running mutants go, too
    uses = Uses(root)
    out.parent.mkdir(parents=True, exist_ok=True)
    fork = multiprocessing.get_context("fork")
    left, done = fork.Queue(), fork.Queue()
    for mutant in [*mutants, *[None] * jobs]:
        left.put(mutant)
    workers = [fork.Process(target=_work, args=(root, uses, digests, left, done)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        for number in range(1, len(mutants) + 1):
            outcome = _next_done(done, workers)
            outcomes[outcome.mutant] = outcome
            _append(out, outcome)
            said = _said(outcome.mutant, outcome)
            print(f"{number}/{len(mutants)} {outcome.mutant}: {said} ({outcome.seconds} s)", flush=True)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _next_done(done: Any, workers: Sequence[Any]) -> Outcome:
    while True:
        try:
            return done.get(timeout=1.0)
        except queue.Empty:
            if ended := [worker.exitcode for worker in workers if worker.exitcode]:
                raise RuntimeError(f"what runs mutants ended with {ended[0]}") from None


def _work(root: Path, uses: Uses, digests: dict[str, str], left: Any, done: Any) -> None:
    """Run mutants in a copy of the tree of its own, until there are none left."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        _copy(root, copy)
        while (mutant := left.get()) is not None:
            began = time.monotonic()
            verdict, by = _run_one(copy, mutant, uses.variants(mutant.path, mutant.function))
            seconds = round(time.monotonic() - began, 1)
            done.put(Outcome(mutant.name, mutant.line, verdict, by, seconds, digests[mutant.path]))


def _run_one(copy: Path, mutant: Mutant, variants: Sequence[Variant]) -> tuple[str, str]:
    """Make the mutant in the copy, run what may notice it, and mend the copy again."""
    file = copy / "packages" / _installed(mutant.path)
    source = file.read_bytes()
    file.write_bytes(mutant.apply(source))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(copy, mutant, variants, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT_S):
            return UNDECIDED, f"after {LIMIT_S} s"
        by = receiver.recv()
        return (KILLED, by) if by else (SURVIVED, "")
    except EOFError:
        process.join()
        return UNDECIDED, f"the process ended with {process.exitcode}"
    finally:
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        file.write_bytes(source)


def _child(copy: Path, mutant: Mutant, variants: Sequence[Variant], sender: Connection) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    # Ahead of where they are installed; for ranks that are processes, too.
    sys.path.insert(0, str(copy / "packages"))
    os.environ.update(PYTHONPATH=str(copy / "packages"), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    sys.dont_write_bytecode = True
    try:
        from .detectors import detect

        iris_core = importlib.import_module("iris_core")
        assert str(iris_core.__file__).startswith(str(copy)), iris_core.__file__
        sender.send(detect(mutant, variants))
    except Exception as error:
        sender.send(f"{type(error).__name__} as it is imported: {error}"[:200])


def _copy(root: Path, copy: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "mutation")
    for name, folder in PACKAGES.items():
        shutil.copytree(root / folder, copy / "packages" / name, ignore=ignored)
    shutil.copytree(root / "tests", copy / "tests", ignore=ignored)
    shutil.copy(root / "pyproject.toml", copy)


def _installed(path: str) -> Path:
    folder, *rest = Path(path).parts
    name = next(name for name, of in PACKAGES.items() if of == folder)
    return Path(name, *rest)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Outcome]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = [Outcome(**{**row, "line": int(row["line"])}) for row in csv.DictReader(file)]  # type: ignore[arg-type]
    return {row.mutant: row for row in rows}  # the last one counts


def _append(path: Path, outcome: Outcome) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(Outcome._fields)
        writer.writerow(outcome)


def _said(name: str, outcome: Outcome | None) -> str:
    if outcome and outcome.outcome == KILLED:
        return f"killed by {outcome.by}"
    said = outcome.outcome.upper() if outcome else "not run"
    return f"{said}, explained: {EXPLAINED[name]}" if name in EXPLAINED else said


def _sum_up(mutants: Sequence[Mutant], outcomes: dict[str, Outcome]) -> int:
    killed = {name for name, outcome in outcomes.items() if outcome.outcome == KILLED}
    explained = EXPLAINED.keys() & {mutant.name for mutant in mutants}
    unexplained = outcomes.keys() - killed - explained
    for name in sorted(unexplained):
        print(f"{outcomes[name].outcome.upper()}: {name} (line {outcomes[name].line})")
    for name in sorted(explained & killed):
        print(f"explained, but killed: {name}")
    not_run = len(mutants) - len(killed | explained | unexplained)
    print(
        f"{len(mutants)} mutants: {len(killed)} killed, {len(explained - killed)} explained, "
        f"{len(unexplained)} survived or undecided, {not_run} not run"
    )
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
