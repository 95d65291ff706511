"""How far a command is, where nobody looks at a bar."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from iris_bench.command import progress


class Heard(io.StringIO):
    """A file that tells of its first line."""

    def __init__(self) -> None:
        super().__init__()
        self.line = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        self.line.set()
        return written


@pytest.mark.parametrize(
    ("total", "said"), [(5, "operators warmed up, 2 of 5, "), (8.0, "up, 25 %, "), (None, "operators warmed up, ")]
)
def test_a_file_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, total: float | None, said: str) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.01)
    file = Heard()
    with progress.CommandProgress(Console(file=file, width=100)) as shown:
        shown.add_task("operators warmed up", total=total, completed=2)
        assert file.line.wait(60)
    assert said in file.getvalue()
    assert "\x1b" not in file.getvalue()


def test_a_terminal_gets_a_bar() -> None:
    file = io.StringIO()
    with progress.CommandProgress(Console(file=file, width=100, force_terminal=True)) as shown:
        shown.add_task("operators [warmed] up", total=5, completed=2)
    assert "operators [warmed] up" in file.getvalue()
    assert "2 of 5" in file.getvalue()
