"""What works without the optional parts of an installation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
# In a process of its own, as what is imported here has greenlet.
WITHOUT_GREENLET = """
import importlib, sys
sys.modules["greenlet"] = None
import iris_bench.cli
from iris_core.checker import check
for name in {names!r}:
    importlib.import_module(name)
try:
    check(print, 1)
except ImportError as error:
    print(error)
"""


def test_without_greenlet_only_interpreting_fails() -> None:
    """A machine with GPUs may lack it: there tests can be collected, and measurements be made."""
    names = sorted(path.stem for path in TESTS.glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GREENLET.format(names=names)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "greenlet is not installed: pip install 'greenlet>=3'" in done.stdout
