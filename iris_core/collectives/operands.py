"""What the collectives take: which tensors, which operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..context import Context

_OPERATIONS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCED = (*_FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def operation(op: Any) -> str:
    """Return "sum", "max" or "min", given that or torch's.

    Raises:
        ValueError: it is none of these.
    """
    found = op if op in _OPERATIONS.values() else _OPERATIONS.get(op)
    if found is None:
        raise ValueError(f'op is {op!r}; it takes ReduceOp.SUM, MAX or MIN, or "sum", "max", "min"')
    return found


def checked_pair(
    name: str,
    ctx: Context,
    output: torch.Tensor,
    given: torch.Tensor,
    *,
    outputs: int = 1,
    inputs: int = 1,
    parts: int = 1,
    reduces: bool = False,
) -> None:
    """Raise unless a collective can have these tensors.

    Args:
        name: the collective's.
        ctx: whose device they are to be on.
        output, given: the output and the input.
        outputs, inputs: how many parts the output and the input consist of.
        parts: by what the first dimension is divided.
        reduces: whether elements are combined.

    Raises:
        ValueError: they do not fit; says what would.
    """
    for argument, tensor in (("output_tensor", output), ("input_tensor", given)):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: {argument} is {tensor!r}; it takes a tensor")
        if tensor.device != ctx.get_device():
            raise ValueError(f"{name}: {argument} is on {tensor.device}; it takes a tensor on {ctx.get_device()}")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {argument}, {tuple(tensor.shape)} with strides {tensor.stride()}, is not contiguous; "
                "its contiguous() is"
            )
    if output.dtype != given.dtype:
        raise ValueError(
            f"{name}: the output is of {output.dtype} and the input of {given.dtype}; they must be the same"
        )
    if reduces and output.dtype not in REDUCED:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCED)
        raise ValueError(f"{name} does not combine {output.dtype}; it takes {listed}")
    if outputs * given.numel() != inputs * output.numel():
        ratio = f"{outputs} times as large as" if outputs > 1 else f"one {inputs}th of" if inputs > 1 else "as large as"
        raise ValueError(
            f"{name}: an output of {tuple(output.shape)} and an input of {tuple(given.shape)}; "
            f"the output must be {ratio} the input"
        )
    if given.numel() % parts or (parts > 1 and (not given.ndim or given.shape[0] % parts)):
        raise ValueError(f"{name}: the first dimension of {tuple(given.shape)} is not a multiple of {parts} ranks")
