"""What commands that measure job by job have in common, once it is known what is to be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..measure import environment
from ..measure import job as measure
from ..records import report
from ..records.csv_rows import Output, in_a_line
from ..records.resume import check_same_device
from .exits import complain, interrupted, leave, warn
from .progress import CommandProgress
from .ranks import Launcher, Ranks, ending, start_ranks

Job = TypeVar("Job")
Row = TypeVar("Row")


@dataclass(frozen=True)
class Measurement(Generic[Job, Row]):
    """What a command measures.

    Args:
        measure: what each rank does for a job: ``measure(rank, world_size, job)`` returns its outcomes.
        to_records: returns a job's rows, of its outcomes and the columns that all rows share.
        heap_bytes: returns what a job holds of a rank's heap, of so many ranks, at most.
        title: names a job while it runs.
        name: names it once there are rows, by the first of them.
        not_begun: returns the outcomes of a job that the ranks did not end, of the reason; None if it has no rows then.
        summarise: says what came out, of a job's rows.
    """

    measure: Callable[..., Any]
    to_records: Callable[[Job, Any, dict[str, Any]], list[Row]]
    heap_bytes: Callable[[Job, int], int]
    title: Callable[[Job], str]
    name: Callable[[Row], str]
    not_begun: Callable[[Job, str], Any] | None = None
    summarise: Callable[[Sequence[Row]], str] = report.summarise

    def run(
        self,
        jobs: Sequence[Job],
        output: Output[Row],
        setting: dict[str, Any],
        *,
        launcher: Launcher | None,
        speak: bool,
    ) -> Exception | None:
        """Measure jobs, if there are any, and keep their rows as each ends; return what ended this early.

        Args:
            jobs: what is to be done.
            output: where rows go.
            setting: columns of every row, `world_size` and `device` among them; those of the machine are added.
            launcher: that started this rank; None where ranks are started here.
            speak: whether this process says what an interrupt leaves.
        """
        if not jobs:
            return None
        try:
            ranks = start_ranks(launcher, setting["world_size"], setting["device"])
            return self._run_on(ranks, jobs, output, setting | environment.versions())
        except KeyboardInterrupt:
            interrupted(output.left(), launcher=launcher, speak=speak)

    def _run_on(
        self, ranks: Ranks, jobs: Sequence[Job], output: Output[Row], columns: dict[str, Any]
    ) -> Exception | None:
        console = report.make_console(stderr=True)
        console.quiet = not ranks.is_first
        with CommandProgress(console) as progress, ending(ranks) as ended:
            task = progress.add_task("starting", total=len(jobs))
            needed = max(self.heap_bytes(job, columns["world_size"]) for job in jobs)
            columns |= ranks.call(measure.open_rank, needed, columns["device"])
            done: Sequence[Any] = output.done
            check_same_device(done, columns["device"], columns["device_name"])
            for number, job in enumerate(jobs, 1):
                progress.update(task, description=self.title(job))
                try:
                    outcomes = ranks.call(self.measure, job)
                except Exception as error:
                    if self.not_begun:
                        reason = f"the measurement ended here: {in_a_line(error)}"
                        output.add(self.to_records(job, self.not_begun(job, reason), columns))
                    raise
                records = self.to_records(job, outcomes, columns)
                output.add(records)
                if not console.is_terminal:
                    what = f"{self.name(records[0])}: {self.summarise(records)}"
                    console.print(f"[{number}/{len(jobs)}] {what}", markup=False)
                progress.advance(task)
            ranks.call(measure.close_rank)
        return ended.error


def plain_records(kind: Callable[..., Row]) -> Callable[[Any, Sequence[Any], dict[str, Any]], list[Row]]:
    """Return `to_records` of rows that have their outcome's fields and the columns alone; outcomes are dataclasses."""

    def to_records(job: Any, outcomes: Sequence[Any], columns: dict[str, Any]) -> list[Row]:
        now = environment.timestamp()
        return [kind(**asdict(outcome), **columns, timestamp=now) for outcome in outcomes]

    return to_records


def conclude(
    output: Output[Any],
    ended_early: Exception | None,
    rows: Sequence[Row],
    *,
    show: Callable[[Sequence[Row]], None],
    launcher: Launcher | None,
    plot: Path | None = None,
    draw: Callable[[Sequence[Row], Path], None] | None = None,
) -> None:
    """Show rows, draw them if that was asked for, and end with the status that says whether all went well.

    Args:
        output: what was measured.
        ended_early: what ended that, if something did.
        rows: what is shown.
        show, draw: do it, where there are rows.
        launcher: that started this rank, if one did: the first rank speaks.
        plot: the picture; None for none.
    """
    if launcher is None or launcher.rank == 0:
        if rows:
            show(rows)
        if ended_early:
            complain("the measurement", ended_early)
        if plot and draw and rows:
            try:
                draw(rows, plot)
            except ValueError as error:
                warn(f"there is no {plot}: {error}")
    failed = any(record.status in ("wrong", "error") for record in output.records)
    leave(failed=failed, lost=ended_early is not None, launcher=launcher)
