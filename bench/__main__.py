"""``python -m iris_bench`` is ``iris-bench``: for ``torchrun -m iris_bench`` and ``mpirun python -m iris_bench``."""

from .cli import main

if __name__ == "__main__":
    main()
