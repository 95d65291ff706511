"""The adapter to QuACK: what its GEMM and its gathering are given, what they refuse, and that it may be missing.

QuACK is not here, nor a GPU: classes that ask for what QuACK's ask for compute the same over gloo.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checking import fault, make_data
from families import make_problem
from ranks import Ranks, context

from iris_bench.baselines import quack
from iris_bench.baselines.project import Project
from iris_kernels.common.choice import auto
from overlap_taxonomy import get_variant

cpu_alone = pytest.mark.parametrize("device", ["cpu"])
FAMILY = "all_gather_gemm"
SIZES = (256, 64, 128)


class Runner:
    """As QuACK's: two buffers in turn, of which one is whole once the GEMM has been launched."""

    def __init__(
        self, shard_m: int, k: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.shard, self.group = (shard_m, k), group
        rows = shard_m * dist.get_world_size(group)
        self.buffers = [torch.empty(rows, k, dtype=dtype, device=device) for _ in range(2)]

    @contextlib.contextmanager
    def gather(self, a: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
        assert a.shape == self.shard
        assert a.is_contiguous()
        self.buffers.reverse()
        dist.all_gather(list(self.buffers[0].chunk(dist.get_world_size(self.group))), a, group=self.group)
        yield self.buffers[0], "flags"


def gemm(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *more: Any, ag_args: str) -> None:
    no_c, no_semaphore, tile_m, _, cluster_m, cluster_n = more
    assert no_c is no_semaphore is None
    assert len(a) // dist.get_world_size() % (tile_m * cluster_m) == 0
    assert cluster_n == 1
    assert ag_args == "flags"
    assert b.shape == (d.shape[1], a.shape[1])
    d.copy_(a @ b.t())


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """As if there were a GPU and QuACK were installed."""
    modules = {
        "quack.distributed": SimpleNamespace(AllGatherRunner=Runner),
        "quack.gemm": SimpleNamespace(gemm=gemm),
    }
    with (
        mock.patch.object(Project, "missing_reason", return_value=None),
        mock.patch.object(quack.metadata, "version", return_value="1.2.3"),
        mock.patch.dict(sys.modules, modules),
    ):
        yield


def call_adapter(rank: int, world_size: int, rows: int, keep: bool) -> list[str | None]:
    ctx = context()
    problem = make_problem(FAMILY, rows * world_size, *SIZES[1:], world_size, torch.bfloat16)
    faults = []
    with pretended():
        operator: Any = get_variant(FAMILY, "quack").build(ctx, problem, keep_gathered=keep)
        for call, layout in enumerate(("kn", "nk", "strided")):
            data = make_data(FAMILY, problem, rank, call, ctx.get_device(), layout=layout)
            output, *gathered = operator.call(data.a, data.b)
            faults.append(fault(output, data, torch.bfloat16))
            assert all(torch.equal(whole.chunk(world_size)[rank], data.a) for whole in gathered)
            assert len(gathered) == keep
        assert operator.describe_config() == "quack 1.2.3"
    return faults


@cpu_alone
@pytest.mark.parametrize(("rows", "keep"), [(128, False), (256, True), (384, False)])
def test_operands_reach_quack_as_it_wants_them(ranks: Callable[[int], Ranks], rows: int, keep: bool) -> None:
    assert ranks(2).call(call_adapter, rows, keep) == [[None] * 3] * 2


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ((257, 64, 128), torch.bfloat16, "128 rows of A or a multiple on each rank; M is 257"),
        ((128, 64, 128), torch.bfloat16, "128 rows of A"),
        ((256, 64, 132), torch.bfloat16, "K is not so long"),
        ((256, 72, 128), torch.float16, "N on each rank is not so long"),
        ((256, 64, 128), torch.float32, "not torch.float32"),
    ],
)
def test_what_quack_does_not_take_is_refused(sizes: tuple[int, int, int], dtype: torch.dtype, reason: str) -> None:
    with pretended():
        problem = make_problem(FAMILY, *sizes, 2, dtype)
        assert reason in get_variant(FAMILY, "quack").unsupported_reason(problem, None)


def test_without_quack_or_a_gpu_it_is_refused_and_nothing_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, problem = get_variant(FAMILY, "quack"), make_problem(FAMILY, *SIZES, 2, torch.bfloat16)
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert variant.unsupported_reason(problem, None) == "quack needs NVIDIA GPUs"
    with mock.patch.object(Project, "machine_reason", return_value=None):
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert quack.PROJECT.how_to_install in variant.unsupported_reason(problem, None)
        (tmp_path / "quack" / "distributed").mkdir(parents=True)
        (tmp_path / "quack" / "__init__.py").write_text("raise AssertionError('imported')")
        assert variant.unsupported_reason(problem, None) is None
    assert "quack" not in sys.modules


def test_auto_never_chooses_it() -> None:
    with pretended():
        assert (
            get_variant(FAMILY, "quack").unsupported_reason(make_problem(FAMILY, *SIZES, 2, torch.bfloat16), None)
            is None
        )
        assert "quack" not in auto._ours(FAMILY)
