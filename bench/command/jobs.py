"""What commands that measure job by job have in common, once it is known what is to be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        not_begun: returns the outcomes of a job that the ranks did not end, of the reason.
        to_records: returns a job's rows, of its outcomes and the columns that all rows share.
        heap_bytes: returns what a job holds of a rank's heap, of so many ranks, at most.
        title: names a job while it runs.
        name: names it once there are rows, by the first of them.
    """

    measure: Callable[..., Any]
    not_begun: Callable[[Job, str], Any]
    to_records: Callable[[Job, Any, dict[str, Any]], list[Row]]
    heap_bytes: Callable[[Job, int], int]
    title: Callable[[Job], str]
    name: Callable[[Row], str]

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
            setting: `world_size` and `device`, columns of every row.
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
                    reason = f"the measurement ended here: {in_a_line(error)}"
                    output.add(self.to_records(job, self.not_begun(job, reason), columns))
                    raise
                records: Any = self.to_records(job, outcomes, columns)
                output.add(records)
                if not console.is_terminal:
                    what = f"{self.name(records[0])}: {report.summarise(records)}"
                    console.print(f"[{number}/{len(jobs)}] {what}", markup=False)
                progress.advance(task)
            ranks.call(measure.close_rank)
        return ended.error


def conclude(
    output: Output[Any],
    ended_early: Exception | None,
    rows: Sequence[Row],
    *,
    show: Callable[[Sequence[Row]], None],
    plot: Path | None,
    draw: Callable[[Sequence[Row], Path], None],
    launcher: Launcher | None,
) -> None:
    """Show rows, draw them if that was asked for, and end with the status that says whether all went well.

    Args:
        output: what was measured.
        ended_early: what ended that, if something did.
        rows: what is shown.
        show, draw: do it.
        plot: the picture; None for none.
        launcher: that started this rank, if one did: the first rank speaks.
    """
    if launcher is None or launcher.rank == 0:
        show(rows)
        if ended_early:
            complain("the measurement", ended_early)
        if plot:
            try:
                draw(rows, plot)
            except ValueError as error:
                warn(f"there is no {plot}: {error}")
    failed = any(record.status in ("wrong", "error") for record in output.records)
    leave(failed=failed, lost=ended_early is not None, launcher=launcher)
