"""The first use inside a real capture or compilation: nothing is calibrated; and ranks that calibrated differently."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from calibrations import FACTS, NEW
from ranks import Ranks, close_context, context, raised

from iris_core import Context
from iris_kernels.common.calibration import first_use
from iris_kernels.common.calibration.calibrate import Calibration, facts_of
from iris_kernels.common.choice import auto
from overlap_taxonomy import assumed_machine


@contextlib.contextmanager
def on_unknown_gpus(folder: str) -> Iterator[tuple[mock.MagicMock, mock.MagicMock]]:
    """Take the GPUs, or the CPU for some, of which nothing is known; gives what would calibrate, and what is said."""
    facts = facts_of(context()) | {"gpu": NEW}
    with contextlib.ExitStack() as changed:
        changed.enter_context(mock.patch.dict(os.environ, {"IRIS_CACHE_DIR": folder}))
        os.environ.pop("IRIS_CALIBRATE", None)
        for patch in (
            mock.patch.object(auto, "device_name", return_value=NEW),
            mock.patch.object(first_use, "facts_of", return_value=facts),
            mock.patch.object(first_use, "busy_reason", return_value=""),  # which is asked last
            mock.patch.object(Context, "is_interpreted", return_value=False),
        ):
            changed.enter_context(patch)
        calibrate = changed.enter_context(mock.patch.object(first_use, "calibrate", side_effect=AssertionError))
        yield calibrate, changed.enter_context(mock.patch.object(Context, "info"))


def check_nothing_measured(found: list[tuple[Any, bool, list[str]]], why: str, folder: Path) -> None:
    """Check what two ranks returned: what they know, whether they measured or spoilt anything, what they said."""
    (known, has_acted, lines), (other, has_other_acted, _) = found
    assert known is None
    assert other is None
    assert not has_acted
    assert not has_other_acted
    assert lines == [f"the cost model does not know {NEW}, and it is not measured now: {why}"]
    assert not list(folder.glob("calibration*"))


def use_in_a_capture(rank: int, world_size: int, folder: str) -> tuple[Any, bool, list[str]]:
    """Ask for what is known while a graph is captured; return it, whether that calibrated, and what was said."""
    close_context()
    ctx, counted = context(), torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with on_unknown_gpus(folder) as (calibrate, said):
        with torch.cuda.graph(graph):
            counted += 1
            known = auto.known_of(ctx)
        lines = [call.args[-1] for call in said.call_args_list]
    graph.replay()  # it was not spoilt
    was_captured = counted.item() == 1
    close_context()
    return known.calibrated, calibrate.called or not was_captured, lines


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_in_a_capture_nothing_is_measured(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    check_nothing_measured(ranks(2).call(use_in_a_capture, str(tmp_path)), "a stream is being captured", tmp_path)


def use_in_a_compilation(rank: int, world_size: int, folder: str) -> tuple[Any, bool, list[str]]:
    """Ask for what is known where torch.compile has a backend compile a graph, as a pass over the graph may."""
    close_context()
    ctx, found = context(), []
    torch._dynamo.reset()

    def compiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        found.append(auto.known_of(ctx).calibrated)
        return graph.forward

    with on_unknown_gpus(folder) as (calibrate, said):
        torch.compile(lambda x: x + 1, backend=compiled)(torch.zeros(1, device=ctx.get_device()))
        lines = [call.args[-1] for call in said.call_args_list]
    torch._dynamo.reset()
    close_context()
    (known,) = found
    return known, calibrate.called, lines


def test_in_a_compilation_nothing_is_measured(ranks: Callable[[int], Ranks], device: str, tmp_path: Path) -> None:
    check_nothing_measured(ranks(2).call(use_in_a_compilation, str(tmp_path)), "a graph is being compiled", tmp_path)


def calibrate_differently(rank: int, world_size: int, folder: str) -> tuple[tuple[str, str], bool]:
    """Calibrate to what differs between the ranks, as where one has other code; return the error, what is kept."""
    own = {"link_gbps": [300.0, 400.0][rank]}
    result = Calibration(assumed_machine(**FACTS), own)
    close_context()
    ctx = context()
    with on_unknown_gpus(folder) as (calibrate, _), mock.patch.object(ctx, "broadcast", lambda value, source: value):
        calibrate.side_effect = None
        calibrate.return_value = result
        error = raised(first_use._measured, ctx, NEW)
    ctx.barrier()
    close_context()
    return error, bool(list(Path(folder).glob("calibration*")))


@pytest.mark.parametrize("device", ["cpu"])
def test_ranks_that_calibrated_differently_are_told(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    for (kind, said), is_kept in ranks(2).call(calibrate_differently, str(tmp_path)):
        assert kind == "ValueError"
        assert "the calibration" in said
        assert "rank 1" in said
        assert not is_kept
