"""How the loader warp paces a finished tile's stores: by the steps of the next tile that it loads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from gluon_emulator import Machine, emulated

from iris_kernels.common.hopper import epilogue_store, tile_scheduler

TILE = SimpleNamespace(PINGPONG=False, BLOCK_K=64, STAGES=5)


@pytest.mark.parametrize(
    ("steps", "subtiles", "destinations"), [(128, 8, 4), (16, 8, 4), (9, 8, 1), (3, 16, 8), (64, 2, 1)]
)
def test_subtiles_are_spread_over_the_steps_but_the_last_eighth(steps: int, subtiles: int, destinations: int) -> None:
    loaded: list[int] = []
    sent: list[int] = []

    def load(*arguments: object) -> None:
        loaded.append(len(sent))

    fakes = {
        "load_step": load,
        "_send_subtile": lambda *arguments: sent.append(len(loaded)),
        "wait_store": lambda *arguments: None,
        "pipeline_state": lambda pipeline, step: None,
        "trace_time": lambda bundle: 0,
        "trace_until": lambda *arguments: None,
    }
    warp = SimpleNamespace(pipeline=SimpleNamespace(barriers=None), store=None)
    pending = SimpleNamespace(num_subtiles=subtiles)
    first = 5
    with emulated(Machine(0), [epilogue_store, tile_scheduler], **fakes):
        number = epilogue_store.load_and_send(
            None, warp, None, 100, first, first + steps, pending, 1, None, destinations, 8, TILE
        )
    assert number == 100 + steps
    assert len(loaded) == steps
    span = max(steps - steps // 8, 1)
    due = [min((done + 1) * subtiles * destinations // span, subtiles * destinations) for done in range(steps)]
    assert loaded[1:] == due[:-1]
    assert len(sent) == subtiles * destinations
