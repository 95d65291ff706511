"""What `make dist` does: build the sdist, and the wheel from it; check both; run the first program from the wheel.

The environment that the wheel is installed into is new: it has what the wheel asks for, and nothing of this tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from checkouts import TREE, package_folders

DIST = TREE / "dist"
PROGRAM = TREE / "examples/first_steps/first_program.py"
SHIPPED = (".py", ".json", ".typed")
WHERE = "import iris_core, iris_kernels, iris_tensor_parallel, overlap_taxonomy; print(iris_core.__file__)"


def build() -> tuple[Path, Path]:
    """Return a new wheel and sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, TREE], check=True)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def missing_files(wheel: Path, sdist: Path) -> list[str]:
    """Return what the packages have here and an archive lacks, and what more a wheel has."""
    folders = package_folders(TREE)
    listed = subprocess.check_output(["git", "ls-files", *folders.values()], cwd=TREE, text=True).splitlines()
    sources = [Path(line) for line in listed if line.endswith(SHIPPED)]
    names = {folder: name for name, folder in folders.items()}
    installed = {Path(names[one.parts[0]], *one.parts[1:]).as_posix() for one in sources}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    return [
        *(f"the wheel lacks {name}" for name in sorted(installed - in_wheel)),
        *(f"the wheel has {name}, which is none of the packages' files" for name in sorted(in_wheel - installed)),
        *(f"the sdist lacks {one}" for one in sources if one.as_posix() not in in_sdist),
    ]


def try_out(wheel: Path) -> None:
    """Install the wheel into a new environment, with what runs kernels without a GPU; run the first program there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin/python")
        _run(folder, python, "-m", "pip", "install", "-q", f"{wheel}[cpu]", "-c", TREE / "constraints-cpu.txt")
        where = _run(folder, python, "-c", WHERE).strip()
        assert Path(where).is_relative_to(folder), f"iris_core comes from {where}, not from the wheel"
        print(_run(folder, python, shutil.copy(PROGRAM, folder)))


def _run(folder: str, *command: str | Path) -> str:
    """Return what a command prints, run where nothing but the new environment is to be found."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.check_output(command, cwd=folder, env=environment | {"IRIS_DEVICE": "cpu"}, text=True)


def main() -> None:
    wheel, sdist = build()
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True)
    missing = missing_files(wheel, sdist)
    if missing:
        raise SystemExit("\n".join(missing))
    try_out(wheel)
    print(*(f"{one.relative_to(TREE)}: {one.stat().st_size / 1e6:.1f} MB" for one in (wheel, sdist)), sep="\n")


if __name__ == "__main__":
    main()
