"""The race checker as a pytest marker, on the kernel of find_races.py.

``pytest -p iris_core.checker.pytest_plugin examples/first_steps/race_test.py``, or as a program.
"""

import pytest
from find_races import exchange


@pytest.mark.race_check(world_size=4, schedules=8)
def test_exchange(iris_ctx):
    exchange(iris_ctx, with_signal=True)


if __name__ == "__main__":
    raise SystemExit(pytest.main(["-q", "-p", "iris_core.checker.pytest_plugin", __file__]))
