"""Benchmarks of your own functions, over axes and numbers of ranks, as the Iris documentation has them.

A benchmark is a function of a `State` and a context. It is called once for each combination of its axes' values, makes
tensors, says how many bytes are moved or operations done, and hands over what is to be timed. `main` starts the ranks
and prints a table.
"""

from .benchmark import Benchmark, State, axis, linear_range, power_of_two, register
from .command import main
from .rank import Row

__all__ = ["Benchmark", "Row", "State", "axis", "linear_range", "main", "power_of_two", "register"]
