"""Pytest: ``@pytest.mark.race_check(world_size=2)`` runs a test's body on every rank under the race checker.

Name it in a conftest: ``pytest_plugins = ["iris_core.checker.pytest_plugin"]``. The body takes `iris_ctx`, the rank's
context; the test fails if a rank raises, deadlocks, or two accesses race.
"""

from __future__ import annotations

from typing import Any

import pytest

from ..context import Context
from ..context.opening import iris
from .run import DEFAULT_SCHEDULES, check

_HEAP_BYTES = 2 << 20


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "race_check(world_size, schedules, seed, heap_size): run the test on every rank under the race checker; "
        "it takes the rank's context as iris_ctx",
    )


@pytest.fixture
def iris_ctx(request: pytest.FixtureRequest) -> Any:
    """The rank's context; each rank of the checked test gets its own in place of this. Other tests fail."""
    if request.node.get_closest_marker("race_check") is None:
        pytest.fail("iris_ctx is for tests that are marked @pytest.mark.race_check(world_size=2)", pytrace=False)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test under the checker in place of calling it."""
    marker = pyfuncitem.get_closest_marker("race_check")
    if marker is None:
        return None
    try:
        options = _options(*marker.args, **marker.kwargs)
    except TypeError:
        defaults = pytest.mark.race_check(**_options()).mark
        pytest.fail(f"{_written(marker)} is not understood; what there is: {_written(defaults)}", pytrace=False)
    names = pyfuncitem._fixtureinfo.argnames
    if "iris_ctx" not in names:
        pytest.fail(f"{_written(marker)}: it takes the fixture iris_ctx, its rank's context", pytrace=False)
    given = {name: pyfuncitem.funcargs[name] for name in names}

    def body(rank: int, world_size: int) -> None:
        ctx: Context = iris(options["heap_size"], "cpu")
        pyfuncitem.obj(**given | {"iris_ctx": ctx})
        ctx.close()

    report = check(body, options["world_size"], schedules=options["schedules"], seed=options["seed"])
    if not report.ok:
        pytest.fail(str(report), pytrace=False)
    return True


def _options(
    world_size: int = 2, schedules: int = DEFAULT_SCHEDULES, seed: int = 0, heap_size: int = _HEAP_BYTES
) -> dict[str, int]:
    return {"world_size": world_size, "schedules": schedules, "seed": seed, "heap_size": heap_size}


def _written(marker: pytest.Mark) -> str:
    """Return a marker as it stands in the test."""
    given = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
    return f"race_check({', '.join(given)})"
