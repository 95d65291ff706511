"""How far a long command is: a bar on a terminal; elsewhere, as in a file or a pipe, a plain line now and then."""

from __future__ import annotations

import threading

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

LINE_EVERY_S = 10.0


class _Done(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_done(task))


class CommandProgress(Progress):
    """Shows a command's task while it is entered.

    A task's total is a number of things (an int), a measure (a float, shown in percent), or None where only the time
    tells that the command is still at work.

    Args:
        console: where; it should be standard error.
    """

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Done(), TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._ended = threading.Event()

    def start(self) -> None:
        super().start()
        if self.disable:
            threading.Thread(target=self._print_now_and_then, daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        super().stop()

    def print_line(self) -> None:
        """Print how far each task is."""
        for task in self.tasks:
            said = filter(None, (task.description, _done(task), f"{task.elapsed or 0.0:.0f} s"))
            self.console.print(", ".join(said), markup=False, soft_wrap=True)

    def _print_now_and_then(self) -> None:
        while not self._ended.wait(LINE_EVERY_S):
            self.print_line()


def _done(task: Task) -> str:
    if task.total is None:
        return ""
    return f"{task.completed:.0f} of {task.total}" if isinstance(task.total, int) else f"{task.percentage:.0f} %"
