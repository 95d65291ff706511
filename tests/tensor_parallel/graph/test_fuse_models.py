"""Models that torch's styles cut, fused forward and backward by the pass over the graphs of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusing import GATHER, REDUCE, SCATTER, backend, fusing
from layers import draw, far, released
from ranks import Ranks, context
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from iris_tensor_parallel.styles import mesh_of

on_cpu = pytest.mark.parametrize("device", ["cpu"])


class Pair(nn.Module):
    """Of torch's: gate and up, which read the same x, and down; x is (batch, sequence, width)."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(6, 8, bias), nn.Linear(6, 8, bias), nn.Linear(8, 6, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


@released
def train(rank: int, world_size: int, dim: int | None) -> Any:
    """Return how far a step of a model cut by torch's styles is from the same without the compiler, and the graphs."""
    into = ColwiseParallel() if dim is None else ColwiseParallel(input_layouts=Shard(dim))
    out_of = RowwiseParallel() if dim is None else RowwiseParallel(output_layouts=Shard(dim))
    model = parallelize_module(Pair(dim is None), mesh_of(context()), {"gate": into, "up": into, "down": out_of})
    x, graphs = draw(0, 2, 8, 6), []
    x = x if dim is None else x.chunk(world_size, dim)[rank].contiguous()
    torch._dynamo.reset()
    step = torch.compile(model, backend=backend(fusing(), graphs), fullgraph=True)

    def gradients(fn: Callable[..., Any]) -> list[torch.Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        output = fn(leaf)
        output.square().sum().backward()
        return [output.detach(), leaf.grad, *(one.grad.to_local().clone() for one in model.parameters())]

    expected = gradients(model)
    return far(gradients(step), expected), graphs


@on_cpu
@pytest.mark.parametrize("dim", [0, 1])
def test_a_model_of_torchs_styles_is_fused_forward_and_backward(ranks: Callable[[int], Ranks], dim: int) -> None:
    assert ranks(2).call(train, dim) == [([], [[GATHER, SCATTER], [GATHER, SCATTER, SCATTER]])] * 2


@on_cpu
def test_a_replicated_model_of_torchs_styles_is_fused_forward_and_backward(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(train, None) == [([], [[REDUCE], [REDUCE, REDUCE]])] * 2
