"""The system "async_tp" of `iris-bench decoder`: torch's pass fuses its products and collectives, as inductor runs it.

Without GPUs: torch's own fallbacks stand in for the fused operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks, context
from torch.distributed import _functional_collectives as collectives
from torch.distributed import _symmetric_memory as symmetric_memory

from iris_bench.benchmarks.decoder import float8, models, systems
from iris_bench.benchmarks.decoder import rank as bench
from iris_bench.benchmarks.decoder.plan import plan


def of_bytes(fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fallback that gathers bytes, as gloo sends no fp8."""
    gather = torch.ops._c10d_functional.all_gather_into_tensor

    def gather_bytes(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        if rows.itemsize > 1:
            return gather(rows, *others)
        return torch.ops._c10d_functional.wait_tensor(gather(rows.view(torch.uint8), *others)).view(rows.dtype)

    def run(*args: Any, **options: Any) -> Any:
        with mock.patch.object(torch.ops._c10d_functional, "all_gather_into_tensor", gather_bytes):
            return fallback(*args, **options)

    return run


FALLBACKS = {
    "fused_all_gather_scaled_matmul": of_bytes(symmetric_memory._fused_all_gather_scaled_matmul_fallback),
    "fused_scaled_matmul_reduce_scatter": symmetric_memory._fused_scaled_matmul_reduce_scatter_fallback,
    "fused_all_gather_matmul": symmetric_memory._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": symmetric_memory._fused_matmul_reduce_scatter_fallback,
}
COLLECTIVES = (
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
left: list[str] = []  # collectives that the pass has not fused, of all graphs of a rank


def passes_alone(module: Any, inputs: Any, *, options: Any) -> Any:
    """A backend that runs a graph as inductor's passes leave it, by these options, and generates no code."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    def run(graph_module: Any, inputs: Any) -> Any:
        with config.patch(options), V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            joint_graph_passes(graph_module)
            view_to_reshape(graph_module)
            post_grad_passes(graph_module, is_inference=False)
        graph_module.recompile()
        left.extend(str(node.target) for node in graph_module.graph.nodes if node.target in COLLECTIVES)
        return make_boxed_func(graph_module.forward)

    return aot_autograd(fw_compiler=run, decompositions=select_decomp_table)(module, inputs)


def replayed(call: Callable[[], Any]) -> Callable[[], Any]:
    """As a CUDA graph: what is called later gives results, and calls no operators."""
    results = call()
    return lambda: results


@contextmanager
def async_tp_on_cpus() -> Iterator[None]:
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    for name, fallback in FALLBACKS.items():
        library.impl(name, fallback)
    compile_it = torch.compile

    def without_code(fn: Any, *, options: Any, **others: Any) -> Any:
        return compile_it(fn, backend=functools.partial(passes_alone, options=options), **others)

    with (
        symmetric_memory._test_mode(),
        mock.patch.object(torch.distributed, "is_nccl_available", return_value=True),
        mock.patch.object(torch, "compile", without_code),
        mock.patch.object(systems, "_enable_async_tp"),
        mock.patch.object(bench, "context", context),
        mock.patch.object(bench, "_captured", replayed),
    ):
        yield


# Of which each rank has multiples of 16 of all features, as torch's products in fp8 must have.
SIZES = models.Sizes(width=64, features=64, heads=4, key_value_heads=2)


@mock.patch.dict(models.MODELS, tiny=SIZES)
def measure(rank: int, world_size: int, phase: str, batch: int, mode: str, dtype: str) -> Any:
    (job,) = plan(
        model="tiny",
        layers=1,
        steps={phase: f"{batch}x8"},
        systems=("async_tp",),
        modes=(mode,),
        dtype=dtype,
        rounds=1,
        burst=1,
        seed=0,
        world_size=world_size,
        device="cpu",
    )
    left.clear()
    gathered = functools.partial(collectives.all_gather_tensor, gather_dim=0)
    with async_tp_on_cpus(), mock.patch.object(float8, "_all_gather", lambda rows, group: gathered(rows, group=group)):
        (found,) = bench.measure(rank, world_size, replace(job, unsupported=()))
    return found.status, found.reason, left


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    ("phase", "batch", "mode", "dtype"),
    [
        ("train", 1, "compiled", "fp32"),
        ("prefill", 2, "compiled_replayed", "fp32"),
        ("prefill", 1, "compiled", "fp8"),
        ("prefill", 2, "compiled", "fp8"),
    ],
)
def test_torchs_pass_fuses_a_decoders_products(
    ranks: Callable[[int], Ranks], phase: str, batch: int, mode: str, dtype: str
) -> None:
    """All but the backward pass's reduce-scatters: each is of a sum of products, of which torch fuses none; and but the
    gathers of fp8's scales, one for the layers of one x.
    """
    pytest.importorskip("transformers")
    of_sums = ["_c10d_functional.reduce_scatter_tensor.default"] * 2 if phase == "train" else []
    of_scales = ["_c10d_functional.all_gather_into_tensor.default"] * 2 if dtype == "fp8" else []
    assert ranks(2).call(measure, phase, batch, mode, dtype) == [("ok", "", of_scales + of_sums)] * 2
