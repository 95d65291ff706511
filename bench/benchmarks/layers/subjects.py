"""The pairs of layers that are compared: ours and torch's own, cut by the same plan, and the products alone."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as theirs

from iris_core import Context
from iris_kernels.common.problem import shard_bounds
from iris_tensor_parallel import styles as ours

ALONE = "products_alone"
SUBJECTS = {
    ALONE: "this rank's multiplications, of all tokens, with nothing communicated: a yardstick",
    "torch": "torch's ColwiseParallel and RowwiseParallel",
    "torch_compiled": "the same under torch.compile",
    "torch_replayed": "the same in CUDA graphs, mode reduce-overhead",
    "async_tp": "the same, with the compiler's pass that overlaps products and collectives",
    "iris": "the styles of iris_tensor_parallel",
    "iris_compiled": "the same under torch.compile",
    "iris_replayed": "the same in CUDA graphs, mode reduce-overhead",
}
LAYOUTS = ("sequence", "replicated")
_FUSED_BY_TORCH = ("symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter")


class Pair(nn.Module):
    """Two layers without bias and what stands between them."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.up, self.down = _linear(up), _linear(down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight)
    return layer


def make(ctx: Context, subject: str, layout: str, whole: Pair) -> nn.Module:
    """Return a subject's layers; collective.

    Args:
        ctx: the context.
        subject, layout: names.
        whole: the layers, the same on all ranks.

    Raises:
        ValueError: this cannot be done here.
    """
    if subject == ALONE:
        return _own(ctx, whole)
    if subject == "async_tp":
        _enable_async_tp(ctx, layout)
    styles, first = (ours, (ctx,)) if subject.startswith("iris") else (theirs, ())
    outside = Shard(0) if layout == "sequence" else Replicate()
    plan = {
        "up": styles.ColwiseParallel(*first, input_layouts=outside),
        "down": styles.RowwiseParallel(*first, output_layouts=outside),
    }
    return theirs.parallelize_module(_with_own_code(copy.deepcopy(whole), subject), ours.mesh_of(ctx), plan)


def compiled(subject: str, pair: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what is called: the layers, or what the compiler made of them."""
    if subject == "async_tp":
        return torch.compile(pair, fullgraph=True, options={"_micro_pipeline_tp": True})
    if subject.endswith("_replayed"):
        return torch.compile(pair, fullgraph=True, mode="reduce-overhead")
    return torch.compile(pair, fullgraph=True) if subject.endswith("_compiled") else pair


def why_not_fused(call: Callable[[], Any], times: int) -> str:
    """Return why a call of "async_tp" is none, or "": torch's pass leaves what it does not know, and says nothing.

    Args:
        call: a call of what was compiled.
        times: how often each of its operators is to be there.
    """
    call()  # which compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    counts = {event.key: event.count for event in profile.key_averages()}
    missing = [name for name in _FUSED_BY_TORCH if counts.get(name, 0) < times]
    return f"torch's pass left some apart: of {', '.join(missing)} there are less than {times}" if missing else ""


def _with_own_code(pair: Pair, subject: str) -> Pair:
    """Return a pair whose code no other has: the compiler keeps what it makes by code, tries one after the other at
    every call, and makes no more than 8.
    """
    forward = types.FunctionType(Pair.forward.__code__.replace(co_name=f"forward_{subject}"), globals())
    pair.__class__ = type(f"Pair_{subject}", (Pair,), {"forward": forward})
    return pair


def _own(ctx: Context, whole: Pair) -> Pair:
    first, end = shard_bounds(whole.up.out_features, ctx.get_num_ranks(), ctx.get_rank())
    up, down = whole.up.weight.detach()[first:end], whole.down.weight.detach()[:, first:end]
    return Pair(up.clone(), down.clone(memory_format=torch.contiguous_format))


def _enable_async_tp(ctx: Context, layout: str) -> None:
    if ctx.is_interpreted() or torch.version.cuda is None:
        raise ValueError("torch's fused operators need NVIDIA GPUs")
    if layout != "sequence":
        raise ValueError("torch overlaps what is gathered and scattered, and nothing else: layout sequence")
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it may be left out soon, but the pass still asks for it
        enable_symm_mem_for_group(ctx.process_group().group_name)
