"""What works without the optional parts of an installation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.command.ranks import choose_device

TESTS = Path(__file__).parents[1]
# In a process of its own, as what is imported here has greenlet; nor has a developer's installation transformers.
WITHOUT_GREENLET = """
import importlib, sys
sys.path += {folders!r}
sys.modules["greenlet"] = sys.modules["transformers"] = None
import iris_bench.cli
from iris_core.checker import check
for name in {names!r}:
    importlib.import_module(name)
try:
    check(print, 1)
except ImportError as error:
    print(error)
"""


WITHOUT_EXTRAS = """
import sys
for name in ("greenlet", "matplotlib", "pandas", "rich", "typer"):
    sys.modules[name] = None
import iris_core, iris_tensor_parallel
from overlap_taxonomy import list_variants
assert any(variant.name == "kraken" for variant in list_variants())
from iris_bench.__main__ import main
main()
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=120, check=False)


def test_the_library_needs_no_extra_and_the_benchmarks_name_theirs() -> None:
    done = run(WITHOUT_EXTRAS)
    assert done.returncode == 1, done.stdout
    assert done.stderr.splitlines()[-1].endswith(
        "which is not installed: pip install markdown-it-py matplotlib pandas rich typer"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["run", "--device", "cpu"], ["check"]])
def test_what_interprets_kernels_names_its_extra(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 2
    assert "greenlet, which is not installed: pip install 'iris-overlap[cpu]'" in result.output


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(cli.app, ["run", "--device", "cpu", "--plot", "x.png"])
    assert result.exit_code == 2
    assert "pip install 'iris-overlap[bench]'" in result.output


def test_make_measures_nothing_with_a_torch_for_another_machine(tmp_path: Path) -> None:
    """Where there is ROCm, .venv would get a torch for CPUs."""
    for name in ("Makefile", "pyproject.toml", "constraints-cpu.txt"):
        (tmp_path / name).write_text((TESTS.parent / name).read_text())
    command = ["make", "-C", str(tmp_path), "bench", "ROCM=/opt/rocm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "bring torch 2.11 or later built for it" in done.stderr
    assert "make bench PY=python3" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_torch_that_is_not_for_the_machines_gpus_is_not_taken_for_none() -> None:
    if torch.version.hip is not None:
        pytest.skip("this torch is for AMD GPUs")
    with pytest.raises(ValueError, match="this machine has ROCm, and this torch is not built for it"):
        choose_device("auto", {}, 0, has_rocm=True)
    assert choose_device("auto", {"IRIS_DEVICE": "cpu"}, 0, has_rocm=True) == "cpu"
    assert choose_device("cpu", {}, 0, has_rocm=True) == "cpu"


def test_without_greenlet_only_interpreting_fails() -> None:
    """A machine with GPUs may lack it: there tests can be collected, and measurements be made."""
    files = [path for path in TESTS.rglob("*.py") if path.parent.name not in ("mutation", "programs")]
    folders, names = sorted({str(path.parent) for path in files}), sorted(path.stem for path in files)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GREENLET.format(folders=folders, names=names)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "greenlet is not installed: pip install 'greenlet>=3'" in done.stdout
