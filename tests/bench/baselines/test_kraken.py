"""The adapters to kraken: what its functions are given, where that lies, what they refuse, and that it may be missing.

Kraken is not here, nor a GPU: functions that ask for what kraken's ask for compute the same over gloo.
"""

from __future__ import annotations

import contextlib
import json
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
from ranks import Ranks, context, raised

from iris_bench.baselines import kraken, project
from iris_bench.baselines.project import Project
from iris_kernels.common.choice import auto
from overlap_taxonomy import get_variant

cpu_alone = pytest.mark.parametrize("device", ["cpu"])
SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"
COMMIT = "90a24c24786bc50cd7dd60d289139915d34c8147"
MODULES = {
    "all_gather_gemm": "all_gather_matmul",
    "gemm_all_reduce": "gemm_one_shot_all_reduce_fused",
    "gemm_reduce_scatter": "gemm_reduce_scatter_ce_persistent",
}
SIZES = (256, 64, 128)  # that all three take on two ranks


class Stub:
    """What is in kraken's modules, on the CPU."""

    def __init__(self) -> None:
        self._tma_desc_cache: dict[int, torch.Tensor] = {}
        self.workspace_bytes = 0

    def all_gather_matmul(
        self, a_shared: torch.Tensor, b: torch.Tensor, a_out: torch.Tensor, progress: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert a_shared.is_symmetric  # type: ignore[attr-defined]
        assert a_shared.is_contiguous()
        assert b.T.is_contiguous()
        assert b.data_ptr() % 16 == 0
        assert progress.shape == (dist.get_world_size(),)
        assert progress.dtype == torch.uint32
        dist.all_gather(list(a_out.chunk(dist.get_world_size())), a_shared)
        return a_out, self._kept(a_out @ b)

    def gemm_reduce_scatter_ce_persistent(
        self, a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        partial = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
        assert self.workspace_bytes == partial.nbytes
        world_size = dist.get_world_size(group)
        output = torch.empty((len(a) // world_size, b.shape[1]), dtype=a.dtype, device=a.device)
        for _ in ("progress", "signal pad"):
            torch.zeros(world_size, dtype=torch.uint32, device=a.device)
        for matrix in (a, b.T):
            assert matrix.is_contiguous()
            assert matrix.data_ptr() % 16 == 0
        torch.mm(a, b, out=partial)
        dist.all_reduce(partial, group=group)
        return self._kept(output.copy_(partial.chunk(world_size)[dist.get_rank(group)]))

    def gemm_one_shot_all_reduce(self, a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        product = a.float() @ b.float()
        assert self.workspace_bytes == product.nbytes
        dist.all_reduce(product, group=group)
        return product

    def _kept(self, output: torch.Tensor) -> torch.Tensor:
        """As kraken keeps what it has made a descriptor of."""
        self._tma_desc_cache[output.data_ptr()] = output
        return output


@contextlib.contextmanager
def pretended(family: str, stub: Stub | None = None) -> Iterator[None]:
    """As if there were a GPU and kraken were installed."""
    stub = stub or Stub()

    def empty(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        tensor = torch.zeros(shape, **options)
        tensor.is_symmetric = True  # type: ignore[attr-defined]
        return tensor

    def workspace(group_name: str, min_size: int) -> None:
        stub.workspace_bytes = min_size

    fakes = {"empty": empty, "rendezvous": mock.Mock(), "get_symm_mem_workspace": workspace}
    with (
        mock.patch.object(Project, "missing_reason", return_value=None),
        mock.patch.object(kraken, "installed_commit", return_value=COMMIT[:12]),
        mock.patch.multiple(SYMMETRIC_MEMORY, get_signal_pad_size=lambda: 2048, **fakes),
        mock.patch.dict(sys.modules, {f"kraken.fused.{MODULES[family]}": stub}),
    ):
        yield


def call_adapter(rank: int, world_size: int, family: str) -> list[str | None]:
    ctx, stub = context(), Stub()
    problem = make_problem(family, *SIZES, world_size, torch.bfloat16)
    faults = []
    with pretended(family, stub):
        options = {"keep_gathered": True} if family == "all_gather_gemm" else {}
        operator: Any = get_variant(family, "kraken").build(ctx, problem, **options)
        for call, layout in enumerate(("kn", "nk", "strided")):
            data = make_data(family, problem, rank, call, ctx.get_device(), layout=layout)
            output, *gathered = operator.call(data.a, data.b)
            faults.append(fault(output, data, torch.bfloat16))
            assert all(torch.equal(whole.chunk(world_size)[rank], data.a) for whole in gathered)
            assert len(gathered) == len(options)
            assert not stub._tma_desc_cache
        assert operator.describe_config() == "kraken 90a24c24786b"
    return faults


@cpu_alone
@pytest.mark.parametrize("family", MODULES)
def test_operands_reach_kraken_as_it_wants_them(ranks: Callable[[int], Ranks], family: str) -> None:
    assert ranks(2).call(call_adapter, family) == [[None] * 3] * 2


def rehearse(rank: int, world_size: int) -> list[list[Any]]:
    ctx, family = context(), "gemm_reduce_scatter"
    problem = make_problem(family, *SIZES, world_size, torch.bfloat16)
    data = make_data(family, problem, rank, 0, ctx.get_device())
    requests = []

    def noted(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def note(*shape: Any, **options: Any) -> torch.Tensor:
            tensor = make(*shape, **options)
            requests.append([make.__name__, list(tensor.shape), str(tensor.dtype)])
            return tensor

        return note

    with pretended(family):
        options = {"keep_gathered": True} if family == "all_gather_gemm" else {}
        operator: Any = get_variant(family, "kraken").build(ctx, problem, **options)
        with mock.patch.multiple(torch, empty=noted(torch.empty), zeros=noted(torch.zeros)):
            operator(data.a, data.b)
    return requests


@cpu_alone
def test_memory_is_zeroed_where_kraken_will_have_its_flags(ranks: Callable[[int], Ranks]) -> None:
    """The same requests in the same order as kraken's get the same memory from the allocator."""
    for requests in ranks(2).call(rehearse):
        assert len(requests) == 8
        assert requests[:4] == requests[4:]


def refuse_group(rank: int, world_size: int) -> tuple[str, str]:
    ctx, family = context(), "all_gather_gemm"
    problem = make_problem(family, *SIZES, world_size, torch.bfloat16)
    with pretended(family), mock.patch.object(ctx, "process_group", return_value=mock.Mock()):
        return raised(get_variant(family, "kraken").build, ctx, problem)


@cpu_alone
def test_a_group_that_kraken_would_not_use_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(refuse_group):
        assert kind == "ValueError"
        assert "default group" in message


REFUSED = [
    ("all_gather_gemm", (256, 64, 128), 2, torch.float16, "takes torch.bfloat16, not torch.float16"),
    ("all_gather_gemm", (257, 64, 128), 2, torch.bfloat16, "128 rows of A or a multiple on each rank; M is 257"),
    ("all_gather_gemm", (128, 64, 128), 2, torch.bfloat16, "128 rows of A"),
    ("all_gather_gemm", (1280, 64, 128), 2, torch.bfloat16, "512 rows of A"),  # kraken groups tiles of 512 rows or more
    ("all_gather_gemm", (256, 64, 132), 2, torch.bfloat16, "K is not so long"),
    ("all_gather_gemm", (256, 72, 128), 2, torch.bfloat16, "N on each rank is not so long"),
    ("gemm_reduce_scatter", (257, 64, 128), 2, torch.bfloat16, "M (257) to be a multiple of the ranks (2)"),
    ("gemm_reduce_scatter", (256, 64, 136), 2, torch.bfloat16, "K on each rank is not so long"),
    ("gemm_reduce_scatter", (256, 64, 8), 2, torch.bfloat16, "K on each rank is not so long"),
    ("gemm_reduce_scatter", (256, 60, 128), 2, torch.bfloat16, "N is not so long"),
    ("gemm_reduce_scatter", (256, 64, 128), 2, torch.float32, "not torch.float32"),
    ("gemm_all_reduce", (256, 64, 128), 3, torch.bfloat16, "a power of two of ranks, not 3"),
    (
        "gemm_all_reduce",
        (1024, 1088, 128),
        2,
        torch.bfloat16,
        "flags for 256 tiles of kraken's kernel; this would take 272",
    ),
    ("gemm_all_reduce", (256, 64, 128), 2, torch.float32, "takes torch.bfloat16 and torch.float16, not torch.float32"),
]


@pytest.mark.parametrize(("family", "sizes", "world_size", "dtype", "reason"), REFUSED)
def test_what_kraken_does_not_take_is_refused(
    family: str, sizes: tuple[int, int, int], world_size: int, dtype: torch.dtype, reason: str
) -> None:
    with pretended(family):
        problem = make_problem(family, *sizes, world_size, dtype)
        assert reason in get_variant(family, "kraken").unsupported_reason(problem, None)


@pytest.mark.parametrize("family", MODULES)
def test_without_kraken_or_a_gpu_it_is_refused_and_nothing_imported(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = get_variant(family, "kraken")
    problem = make_problem(family, *SIZES, 2, torch.bfloat16)
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert variant.unsupported_reason(problem, None) == "kraken needs NVIDIA GPUs"
    with mock.patch.object(Project, "machine_reason", return_value=None):
        with mock.patch.object(sys, "path", []):
            assert kraken.PROJECT.how_to_install in variant.unsupported_reason(problem, None)
        other, wanted = tmp_path / "other", tmp_path / "wanted"
        for folder in (other / "kraken", wanted / "kraken" / "fused"):
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text("")
        monkeypatch.setattr(sys, "path", [str(other)])
        assert kraken.PROJECT.how_to_install in variant.unsupported_reason(problem, None)
        monkeypatch.setattr(sys, "path", [str(wanted)])
        (wanted / "kraken" / "__init__.py").write_text("raise AssertionError('imported')")
        assert variant.unsupported_reason(problem, None) is None
    assert "kraken" not in sys.modules


def test_an_older_gpu_is_refused() -> None:
    gpu = {"is_available": lambda: True, "get_device_capability": lambda: (8, 0)}
    with (
        mock.patch.multiple(torch.cuda, **gpu),
        mock.patch.object(torch.version, "cuda", "12.8"),
        mock.patch.object(project, "interpretation", SimpleNamespace(is_enabled=lambda: False)),
    ):
        assert kraken.PROJECT.machine_reason((9, 0)) == "kraken's kernel needs sm_90 or later, this is sm_80"
        assert kraken.PROJECT.machine_reason((8, 0)) is None


@pytest.mark.parametrize("family", MODULES)
def test_auto_never_chooses_it(family: str) -> None:
    problem = make_problem(family, *SIZES, 2, torch.bfloat16)
    with pretended(family):
        assert get_variant(family, "kraken").unsupported_reason(problem, None) is None
        candidates = auto._ours(family)
    assert "workgroup_specialized:portable" in candidates
    assert "kraken" not in candidates


def test_the_commit_is_what_pip_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = tmp_path / "kraken-0.0.0.dist-info"
    noted.mkdir()
    (noted / "METADATA").write_text("Metadata-Version: 2.1\nName: kraken\nVersion: 0.0.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert kraken.installed_commit() == "of an unknown commit"
    (noted / "direct_url.json").write_text(json.dumps({"url": "", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}))
    assert kraken.installed_commit() == "90a24c24786b"
