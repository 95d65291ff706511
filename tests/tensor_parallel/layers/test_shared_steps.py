"""Layers that share a product, of which a step calls some, or a graph ends between them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import draw, far, own_rows, released
from ranks import Ranks, context
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as theirs
from torch_compiling import compiled

from iris_tensor_parallel import share_products, styles

pytestmark = pytest.mark.parametrize("device", ["cpu"])
WIDTH, TOKENS = 8, 12


class Heads(nn.Module):
    """Two layers of one x, of which a call takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return getattr(self, name)(x)


class Pair(nn.Module):
    """Two layers of one x, between which a graph ends."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        torch._dynamo.graph_break()
        return torch.relu(gate) * self.up(x)


def cut(model: nn.Module, layout: Any) -> Any:
    style = styles.ColwiseParallel(context(), input_layouts=layout)
    cut_model = theirs.parallelize_module(copy.deepcopy(model), styles.mesh_of(context()), {"*": style})
    assert share_products(cut_model) == 1
    return cut_model


@released
def take_turns(rank: int, world_size: int, how: str) -> tuple[list[str], int]:
    """Call a head in one step, change x or the weights in place, and call the other one in the next step."""
    torch.manual_seed(1)
    whole = Heads()
    heads, wrong = cut(whole, Replicate()), []
    call = compiled(heads) if how == "compiled" else heads
    mode = torch.inference_mode if how == "inference" else torch.no_grad
    with mode():
        x = draw(2, TOKENS, WIDTH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("policy", "value", "policy"):
            if how == "trained":
                for model in (whole, heads):
                    model.zero_grad()
                    model(x, name).square().sum().backward()
                    torch.optim.SGD(model.parameters(), lr=0.1).step()
            else:
                with mode():
                    wrong += far([call(x, name)], [whole(x, name).chunk(world_size, 1)[rank]])
                    x.copy_(draw(3 + len(wrong), TOKENS, WIDTH))
    parts = [one.full_tensor() for one in heads.parameters()]
    return wrong + far(parts, list(whole.parameters())), sum("multiplied as one" in str(one.message) for one in caught)


@pytest.mark.parametrize("how", ["eager", "inference", "compiled", "trained"])
def test_what_one_step_leaves_is_not_for_the_next(ranks: Callable[[int], Ranks], how: str) -> None:
    assert ranks(2).call(take_turns, how) == [([], int(how != "compiled"))] * 2


@released
def break_between(rank: int, world_size: int, layout: Any) -> list[str]:
    """Train a step of layers between which the graph ends; return how far it is from the step without a compiler."""
    torch.manual_seed(1)
    pair, found = cut(Pair(), layout), []
    x = draw(2, TOKENS, WIDTH) if layout == Replicate() else own_rows(draw(2, TOKENS, WIDTH), rank, world_size)
    for call in (pair, compiled(pair, whole=False)):
        pair.zero_grad()
        leaf = x.clone().requires_grad_()
        output = call(leaf)
        output.square().sum().backward()
        found.append([output.detach(), leaf.grad, *[one.grad.full_tensor() for one in pair.parameters()]])
    return far(*found)


@pytest.mark.parametrize("layout", [Shard(0), Replicate()], ids=["sequences", "all tokens"])
def test_a_graph_may_end_between_layers_that_share(ranks: Callable[[int], Ranks], layout: Any) -> None:
    assert ranks(2).call(break_between, layout) == [[]] * 2
