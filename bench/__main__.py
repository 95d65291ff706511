"""``python -m iris_bench`` is ``iris-bench``: for ``torchrun -m iris_bench`` and ``mpirun python -m iris_bench``."""

import sys

EXTRA = ("matplotlib", "pandas", "rich", "typer")


def main() -> None:
    """Run the command line; without the extra that it needs, name it."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        sys.exit(f"iris-bench needs {error.name}, which is not installed: pip install 'iris-overlap[bench]'")
    run()


if __name__ == "__main__":
    main()
