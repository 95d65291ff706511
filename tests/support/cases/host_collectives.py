"""The collectives of `Context.ccl` for tests: how each is called, and what it must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from iris_core import Context


@dataclass(frozen=True)
class Case:
    """A call: `size` elements of a part; `root` is the rank that sends or receives alone."""

    name: str
    size: int
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    root: int = 0
    in_place: bool = False
    symmetric: bool = False
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Collective:
    """A collective.

    Args:
        expected: of all members' inputs, this one's index, and a case whose root is an index, what the output is.
        outputs, inputs: whether the output and the input have a part a member.
        reduces: whether it takes an operation.
        root: the name of the argument that names a rank.
        only_root: whether only the root has an output.
    """

    expected: Callable[[list[torch.Tensor], int, Case], torch.Tensor]
    outputs: bool = False
    inputs: bool = False
    reduces: bool = False
    root: str = ""
    only_root: bool = False


def combined(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Combine in the order of the members, floats of at most 32 bits in fp32."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total = inputs[0].to(wide)
    for one in inputs[1:]:
        value = one.to(wide)
        total = (
            total + value
            if op == "sum"
            else torch.maximum(total, value)
            if op == "max"
            else torch.minimum(total, value)
        )
    return total.to(dtype)


def _part(tensor: torch.Tensor, index: int, members: int) -> torch.Tensor:
    return tensor.view(members, -1)[index]


def _sum_of_parts(given: list[torch.Tensor], index: int, op: str) -> torch.Tensor:
    return combined([_part(one, index, len(given)) for one in given], op)


COLLECTIVES = {
    "all_reduce": Collective(lambda given, index, case: combined(given, case.op), reduces=True),
    "all_gather": Collective(lambda given, index, case: torch.cat(given), outputs=True),
    "reduce_scatter": Collective(
        lambda given, index, case: _sum_of_parts(given, index, case.op), inputs=True, reduces=True
    ),
    "all_to_all": Collective(
        lambda given, index, case: torch.cat([_part(one, index, len(given)) for one in given]),
        outputs=True,
        inputs=True,
    ),
    "broadcast": Collective(lambda given, index, case: given[case.root], root="src"),
    "reduce": Collective(lambda given, index, case: combined(given, case.op), reduces=True, root="dst", only_root=True),
    "gather": Collective(lambda given, index, case: torch.cat(given), outputs=True, root="dst", only_root=True),
    "scatter": Collective(
        lambda given, index, case: _part(given[case.root], index, len(given)), inputs=True, root="src"
    ),
}


def drawn(case: Case, size: int, rank: int, call: int) -> torch.Tensor:
    """Return a rank's input of a call."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    values = torch.randn(size, generator=generator) * 40
    if case.dtype is torch.bfloat16:  # sums must be exact: the interpreter does not round to bf16, it truncates
        values = values.round().clamp(-30, 30)
    return values > 0 if case.dtype is torch.bool else values.clamp(-120, 120).to(case.dtype)


def check_call(
    ctx: Context, case: Case, ccl: Any, members: Sequence[int], group: Any, calls: int = 2
) -> torch.Tensor | None:
    """Make some calls with new data and poisoned outputs; compare what comes with the definition, bit by bit."""
    one, index = COLLECTIVES[case.name], members.index(ctx.get_rank())
    device, root = ctx.get_device(), members.index(case.root) if one.root else 0
    in_size, out_size = (case.size * (len(members) if parts else 1) for parts in (one.inputs, one.outputs))
    keywords = dict(case.options) | ({"op": case.op} if one.reduces else {}) | ({"group": group} if group else {})
    keywords |= {one.root: case.root} if one.root else {}
    buffers = [ctx.empty(size, dtype=case.dtype) for size in (out_size, in_size)] if case.symmetric else []
    output = None
    for call in range(calls):
        inputs = [drawn(case, in_size, rank, call) for rank in members]
        expected = one.expected(inputs, index, replace(case, root=root))
        given, output = buffers[::-1] or [
            torch.empty(size, dtype=case.dtype, device=device) for size in (in_size, out_size)
        ]
        if case.in_place and (index == root or in_size == out_size or not one.root):
            if in_size <= out_size:
                given = output if in_size == out_size else _part(output, index, len(members))
            else:
                output = _part(given, index, len(members))
        else:
            output.view(torch.uint8).fill_(77)
        given.copy_(inputs[index])
        getattr(ccl, case.name)(output, given, **keywords)
        if not one.only_root or index == root:
            same = output.cpu().view(torch.uint8) == expected.contiguous().view(torch.uint8)
            assert same.all(), f"{case}, call {call}: {output} is not {expected}"
    for buffer in buffers:
        ctx.free(buffer)
    return output
