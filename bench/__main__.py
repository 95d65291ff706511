"""``python -m iris_bench`` is ``iris-bench``: for ``torchrun -m iris_bench`` and ``mpirun python -m iris_bench``."""

import sys

# Modules, and the distributions that have them; the extra would bring a Triton over one that is built for other GPUs.
EXTRA = {"markdown_it": "markdown-it-py", **{name: name for name in ("matplotlib", "pandas", "rich", "typer")}}


def main() -> None:
    """Run the command line; without the extra that it needs, name it."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        sys.exit(f"iris-bench needs {error.name}, which is not installed: pip install {' '.join(EXTRA.values())}")
    run()


if __name__ == "__main__":
    main()
