"""What parallelises a decoder, and in which mode it is called."""

from __future__ import annotations

import copy
import itertools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor import parallel as theirs

from iris_core import Context
from iris_kernels.common.config import is_fp8
from iris_kernels.common.problem import shard_bounds
from iris_tensor_parallel import Float8, prepare, share_products
from iris_tensor_parallel import styles as ours

from . import float8
from .models import Block, Sizes, block

LIMIT = "no_communication"
SYSTEMS = {
    "torch": "torch's ColwiseParallel and RowwiseParallel; in fp8 torch._scaled_mm and functional collectives",
    "torch_sequence": "torch's styles with sequence parallelism",
    "async_tp": "the same, with the compiler's pass that overlaps products and collectives",
    "iris": "the styles of iris_tensor_parallel",
    "iris_sequence": "the same with sequence parallelism",
    LIMIT: "the same shards without collectives: the limit, whose outputs are wrong and not checked",
}
TORCH, IRIS = ("torch", "torch_sequence", "async_tp"), ("iris", "iris_sequence")
MODES = {
    "eager": "as it is",
    "compiled": "torch.compile of each decoder layer",
    "replayed": "a CUDA graph of all layers",
    "compiled_replayed": "a CUDA graph of compiled layers",
}
_OF_ONE_X = [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")]
_COLUMNS = tuple(itertools.chain(*_OF_ONE_X))
_ROWS = ("self_attn.o_proj", "mlp.down_proj")
_FUSED_BY_TORCH = {
    False: ("symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter"),
    True: ("symm_mem::fused_all_gather_scaled_matmul", "symm_mem::fused_scaled_matmul_reduce_scatter"),
}  # by whether it is fp8


def is_sequence(system: str) -> bool:
    """Whether each rank has a part of every sequence between the layers."""
    return system in ("torch_sequence", "async_tp", "iris_sequence")


def why_not(
    system: str,
    mode: str,
    sizes: Sizes,
    phase: str,
    sequence: int,
    world_size: int,
    device: str,
    dtype: str = "bfloat16",
) -> str:
    """Return why a system cannot be measured so, or ""."""
    for what, count in (("key-value heads", sizes.key_value_heads), ("features", sizes.features)):
        if count % world_size:
            return f"{count} {what} cannot be cut for {world_size} ranks"
    if system == "async_tp" and (device == "cpu" or torch.version.cuda is None):
        return "torch's fused operators need NVIDIA GPUs"
    if system == "async_tp" and not mode.startswith("compiled"):
        return "torch overlaps what it compiles"
    if system == "async_tp" and phase == "train" and is_fp8(getattr(torch, dtype)):
        return "torch's pass fuses no product that is quantised behind the gather"
    if mode.endswith("replayed") and device == "cpu":
        return "CUDA graphs need GPUs"
    if is_sequence(system) and phase == "decode":
        return "a step of decoding has one token of each sequence, which cannot be cut"
    if is_sequence(system) and sequence % world_size:
        return f"sequences of {sequence} tokens cannot be cut for {world_size} ranks"
    return ""


def parallelise(ctx: Context, system: str, whole: Any, *, tokens: int, gradients: bool, in_fp8: bool = False) -> Any:
    """Return a copy of a model, cut for this rank; collective.

    Args:
        ctx: the context.
        system: one of `SYSTEMS`.
        whole: the model, the same on all ranks.
        in_fp8: whether its linear layers multiply in fp8; their weights are in it, but with gradients.
        tokens: of a step, of all ranks; ours make room for them.
        gradients: whether those of all parameters are wanted.
    """
    model = copy.deepcopy(whole)
    keeps_fp8 = in_fp8 and not gradients
    if in_fp8 and gradients and system not in IRIS:
        float8.trained(model, ctx)
    if system == LIMIT or (keeps_fp8 and system in TORCH):
        _cut(ctx, model)
    if system == LIMIT:
        return float8.as_whole(model) if keeps_fp8 else model
    if system == "async_tp":
        _enable_async_tp(ctx)
    if keeps_fp8 and system in TORCH:
        float8.with_collectives(model, _OF_ONE_X, ctx.process_group(), is_sequence=is_sequence(system))
    how = (float8.HOW if keeps_fp8 else float8.HOW_TO_TRAIN) if in_fp8 else None
    plan = _plan(ctx, system, keeps_fp8=keeps_fp8, quantize=how)
    theirs.parallelize_module(model, ours.mesh_of(ctx), plan)
    if system in IRIS:
        share_products(model)
        prepare(model, tokens, gradients=gradients)
    return model


def _plan(ctx: Context, system: str, *, keeps_fp8: bool, quantize: Float8 | None) -> dict[str, Any]:
    styles: Any = theirs
    first: tuple[Context, ...] = ()
    more: dict[str, Any] = {}
    is_cut, are_cut_already = is_sequence(system), keeps_fp8 and system in TORCH
    if system in IRIS:
        styles, first, more = ours, (ctx,), {"quantize": quantize}
    # Torch's styles gather x ahead of the layers that read it; ours, and torch's layers in fp8, within them.
    into: Placement = Shard(1) if is_cut and (system in IRIS or keeps_fp8) else Replicate()
    plan: dict[str, Any] = {}
    if not are_cut_already:
        columns = styles.ColwiseParallel(*first, input_layouts=into, **more)
        rows = styles.RowwiseParallel(*first, output_layouts=Shard(1) if is_cut else Replicate(), **more)
        plan |= {f"layers.*.{name}": columns for name in _COLUMNS}
        plan |= {f"layers.*.{name}": rows for name in _ROWS}
    if not is_cut:
        return plan
    # Attention reads the number of tokens from the shape of its input, which only a DTensor has of all of them.
    plan["layers.*.self_attn"] = theirs.PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": into}
    )
    if system not in IRIS and not keeps_fp8:
        plan["layers.*.mlp"] = theirs.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(into,))
        norm = theirs.SequenceParallel()
        plan |= {f"layers.*.{name}": norm for name in ("input_layernorm", "post_attention_layernorm")}
        plan["norm"] = theirs.SequenceParallel(use_local_output=True)
    return plan


def _cut(ctx: Context, model: Any) -> None:
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            whole = linear.weight.detach()
            dim = 0 if name.endswith(_COLUMNS) else 1
            first, end = shard_bounds(whole.shape[dim], ctx.get_num_ranks(), ctx.get_rank())
            own = whole.narrow(dim, first, end - first).clone(memory_format=torch.contiguous_format)
            linear.weight = nn.Parameter(own, linear.weight.requires_grad)
            if dim == 0 and is_fp8(own.dtype):
                scale: Any = linear.weight_scale
                linear.weight_scale = scale[first:end].clone()


def _enable_async_tp(ctx: Context) -> None:
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it may be left out soon, but the pass still asks for it
        enable_symm_mem_for_group(ctx.process_group().group_name)


def compiled(system: str) -> Block:
    """Return `block`, compiled once for all layers of a system; its code no other system has, as the compiler keeps
    what it makes by code, tries one after the other at every call, and makes no more than 8.
    """
    own = types.FunctionType(block.__code__.replace(co_name=f"block_{system}"), block.__globals__)
    options: dict[str, Any] | None = None
    if system == "async_tp":
        from .gathers import PutTogether  # which imports the compiler

        options = {"_micro_pipeline_tp": True, "post_grad_custom_pre_pass": PutTogether()}
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


def why_not_fused(call: Callable[[], Any], in_fp8: bool = False) -> str:
    """Return why a step of "async_tp" is none, or "": torch's pass leaves what it does not know, and says nothing."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    there = {event.key for event in profile.key_averages()}
    missing = [name for name in _FUSED_BY_TORCH[in_fp8] if name not in there]
    return f"torch's pass left products apart: there is no {', '.join(missing)}" if missing else ""
