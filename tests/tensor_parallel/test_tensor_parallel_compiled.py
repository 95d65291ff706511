"""Layers sharded over the ranks under torch.compile: whole graphs, gradients included, for every number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import LENGTHS, SIZES, cut_pair, draw, far, parameters, released, whole_pair
from ranks import Ranks, context
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_compiling import compiled, if_it_compiles

from iris_tensor_parallel import ColumnParallelLinear, Float8, RowParallelLinear

on_cpu = pytest.mark.parametrize("device", ["cpu"])
TOKENS = (8, 12, 8)


class Block(nn.Module):
    """Two pairs of layers of one size, so of one code and of the same operators."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        pairs = [cut_pair(whole_pair(seed), sequence_parallel=sequence_parallel) for seed in range(2)]
        self.layers = nn.ModuleList(nn.Sequential(up, nn.ReLU(), down) for up, down in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], -1)[:, -SIZES[0] :]
        return x


@released
def train(
    rank: int, world_size: int, backend: str, sequence_parallel: bool, sizes: tuple[int, ...] = TOKENS
) -> tuple[list[Any], list[int]]:
    """Return how far a compiled block is from itself without the compiler, and how many graphs were made."""
    block = Block(sequence_parallel)
    step, graphs, wrong = compiled(block, backend), [], []
    torch._dynamo.utils.counters.clear()  # of other tests
    for seed, tokens in enumerate(sizes):
        x = draw(seed, tokens, SIZES[0])
        x = x.chunk(world_size)[rank] if sequence_parallel else x

        def run(fn: Callable[..., Any], x: torch.Tensor = x) -> list[torch.Tensor]:
            block.zero_grad()
            leaf = x.clone().requires_grad_()
            output = fn(leaf)
            output.square().sum().backward()
            return [one.detach().clone() for one in (output, leaf.grad, *(one.grad for one in parameters([block])))]

        expected, found = run(block), run(step)
        wrong += far(found, expected)
        with torch.inference_mode():
            wrong += far([block(x)], expected[:1])
            wrong += far([step(x)], expected[:1])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return wrong, graphs


@on_cpu
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_layers_are_part_of_a_whole_graph(ranks: Callable[[int], Ranks], sequence_parallel: bool) -> None:
    """A graph for each number of tokens, with gradients and without; none again for one that came before."""
    assert ranks(2).call(train, "aot_eager", sequence_parallel) == [([], [2, 4, 4])] * 2


@on_cpu
@if_it_compiles
def test_a_graph_of_layers_is_right_where_steps_are_merged(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(train, "inductor", True, TOKENS[:1]) == [([], [2])] * 2


# How a training step calls what is compiled before its backward pass; each returns the losses' terms.


def blocks_one_by_one(blocks: list[Callable[..., Any]], x: torch.Tensor) -> list[torch.Tensor]:
    for block in blocks:
        x = torch.cat([x, block(x)], -1)[:, -SIZES[0] :]
    return [x]


def model_twice(blocks: list[Callable[..., Any]], x: torch.Tensor) -> list[torch.Tensor]:
    return [blocks_one_by_one(blocks, x)[0] * blocks_one_by_one(blocks, x * 2 - 1)[0]]


def inference_before_backward(blocks: list[Callable[..., Any]], x: torch.Tensor) -> list[torch.Tensor]:
    loss = blocks_one_by_one(blocks, x)
    with torch.no_grad():
        blocks_one_by_one(blocks, x + 1)
    return loss


def microbatches(blocks: list[Callable[..., Any]], x: torch.Tensor) -> list[torch.Tensor]:
    return [blocks_one_by_one(blocks, x * scale)[0] for scale in (1, 2, 3)]


STEPS = {step.__name__: step for step in (blocks_one_by_one, model_twice, inference_before_backward, microbatches)}


@released
def train_by_blocks(rank: int, world_size: int, backend: str, sequence_parallel: bool, *steps: str) -> list[Any]:
    """Return how far training steps of blocks, compiled one by one, are from the same steps in eager mode."""
    layers = Block(sequence_parallel).layers
    blocks = [compiled(layer, backend) for layer in layers]
    x = draw(1, 8, SIZES[0])
    x = x.chunk(world_size)[rank] if sequence_parallel else x

    def run(blocks: Any, step: str) -> list[torch.Tensor]:
        layers.zero_grad()
        leaf = x.clone().requires_grad_()
        losses = STEPS[step](blocks, leaf)
        sum(loss.square().sum() for loss in losses).backward()
        return [one.detach().clone() for one in (*losses, leaf.grad, *(one.grad for one in parameters(layers)))]

    expected = {step: run(layers, step) for step in steps}
    return [(step, wrong) for step in steps for _ in range(2) if (wrong := far(run(blocks, step), expected[step]))]


sequence_parallel_or_not = pytest.mark.parametrize("sequence_parallel", [True, False])


@on_cpu
@sequence_parallel_or_not
def test_calls_before_a_backward_pass_leave_it_right(ranks: Callable[[int], Ranks], sequence_parallel: bool) -> None:
    """Autograd keeps what a compiled call was given; a later call must not have changed it."""
    assert ranks(2).call(train_by_blocks, "aot_eager", sequence_parallel, *STEPS) == [[]] * 2


@on_cpu
@if_it_compiles
def test_calls_before_a_backward_pass_leave_it_right_where_steps_are_merged(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(train_by_blocks, "inductor", True, "model_twice") == [[]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("mode", ["inductor", "reduce-overhead"])
@pytest.mark.parametrize("step", STEPS)
@sequence_parallel_or_not
def test_calls_before_a_backward_pass_leave_it_right_on_gpus(
    ranks: Callable[[int], Ranks], step: str, sequence_parallel: bool, mode: str
) -> None:
    assert ranks(2).call(train_by_blocks, mode, sequence_parallel, step) == [[]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_steps_are_replayed_where_overhead_is_reduced(ranks: Callable[[int], Ranks], sequence_parallel: bool) -> None:
    """Both ways, in CUDA graphs of two numbers of tokens, in turn."""
    sizes, graphs = (8,) * 4 + (12,) * 4 + (8, 12), [2] * 4 + [4] * 6
    assert ranks(2).call(train, "reduce-overhead", sequence_parallel, sizes) == [([], graphs)] * 2


@released
def train_in_fp8(rank: int, world_size: int, backend: str, sequence_parallel: bool) -> list[Any]:
    """Return how far the gradients of layers in fp8 are, compiled, from those that they have in eager mode."""
    torch.manual_seed(5)
    where: dict[str, Any] = {"dtype": torch.bfloat16, "device": context().get_device()}
    up, down = nn.Linear(64, 128, **where), nn.Linear(128, 64, **where)
    how: dict[str, Any] = {"quantize": Float8(training=True), "sequence_parallel": sequence_parallel}
    layers = nn.Sequential(
        ColumnParallelLinear.from_linear(context(), up, **how), RowParallelLinear.from_linear(context(), down, **how)
    )
    x = draw(1, 32, 64).bfloat16()
    x = x.chunk(world_size)[rank] if sequence_parallel else x

    def run(fn: Callable[..., Any]) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        return list(torch.autograd.grad(fn(leaf).square().sum(), [leaf, *layers.parameters()]))

    return far(run(compiled(layers, backend)), run(layers), limit=4e-2)


@on_cpu
@sequence_parallel_or_not
def test_layers_in_fp8_have_gradients_in_a_graph(ranks: Callable[[int], Ranks], sequence_parallel: bool) -> None:
    assert ranks(2).call(train_in_fp8, "aot_eager", sequence_parallel) == [[]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@sequence_parallel_or_not
def test_layers_in_fp8_have_gradients_in_a_graph_on_gpus(
    ranks: Callable[[int], Ranks], sequence_parallel: bool
) -> None:
    """With torch 2.11 those of what a product by torch's own operator came from were zeros."""
    assert ranks(2).call(train_in_fp8, "inductor", sequence_parallel) == [[]] * 2


@released
def keep_in_fp8(rank: int, world_size: int) -> list[torch.dtype]:
    """Return in what the gathered x of a compiled layer in fp8 is kept for gradients."""
    where: dict[str, Any] = {"dtype": torch.bfloat16, "device": context().get_device()}
    how: dict[str, Any] = {"quantize": Float8(training=True), "sequence_parallel": True}
    layer = ColumnParallelLinear.from_linear(context(), nn.Linear(64, 256, **where), **how)
    x, kept = draw(1, 32, 64).bfloat16().chunk(world_size)[rank].requires_grad_(), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(layer, "aot_eager")(x).square().sum().backward()
    return [one.dtype for one in kept if one.shape == (32, 64)]


@on_cpu
def test_in_a_graph_what_was_gathered_in_fp8_is_kept_in_fp8(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(keep_in_fp8) == [[torch.float8_e4m3fn]] * 2


@released
def take_any_length(rank: int, world_size: int, sequence_parallel: bool) -> tuple[list[Any], int, list[str], bool]:
    """Of a block that was never called before: what is wrong, and how many graphs and operators it takes."""
    ctx, block = context(), Block(sequence_parallel)
    step = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        found = []
        for tokens in LENGTHS:
            x = draw(tokens, tokens, SIZES[0])
            x = x.chunk(world_size)[rank] if sequence_parallel else x
            torch._dynamo.mark_dynamic(x, 0)
            found.append((step(x), x))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        made = sorted(one.family for one in ctx.operators.values())
        most = 2 * max(LENGTHS)
        is_bounded = all(one.problem.m <= most for one in ctx.operators.values())
        return far([one for one, _ in found], [block(x) for _, x in found]), graphs, made, is_bounded


@on_cpu
@pytest.mark.parametrize(
    ("sequence_parallel", "families"),
    [(True, ["all_gather_gemm", "gemm_reduce_scatter"]), (False, ["gemm_all_reduce"])],
)
def test_any_number_of_tokens_is_one_graph_and_one_operator_a_product(
    ranks: Callable[[int], Ranks], sequence_parallel: bool, families: list[str]
) -> None:
    """Ranks make operators, and make room in them, while the graph runs: no call outside of it comes before."""
    assert ranks(2).call(take_any_length, sequence_parallel) == [([], 1, families, True)] * 2


@released
def export(rank: int, world_size: int) -> tuple[list[Any], list[str]]:
    """Export a pair for any number of tokens; return how far that is from the pair, and what it calls of ours."""
    pair = nn.Sequential(*cut_pair(whole_pair(), sequence_parallel=True))
    tokens = torch.export.Dim("tokens", min=2, max=1024)
    with torch.no_grad():
        program = torch.export.export(pair, (draw(0, 4, SIZES[0]),), dynamic_shapes=({0: tokens},))
        given = [draw(count, count, SIZES[0]) for count in (4, 6, 10)]
        wrong = far([program.module()(x) for x in given], [pair(x) for x in given])
    called = [str(node.target) for node in program.graph.nodes if "iris" in str(node.target)]
    return wrong, called


@on_cpu
def test_layers_can_be_exported_for_any_number_of_tokens(ranks: Callable[[int], Ranks]) -> None:
    ours = ["iris_overlap.all_gather_gemm.default", "iris_overlap.gemm_reduce_scatter.default"]
    assert ranks(2).call(export) == [([], ours)] * 2


@released
def call_with_fake_tensors(rank: int, world_size: int, sequence_parallel: bool) -> tuple[bool, list[Any]]:
    """Return whether layers give fake tensors of the right shapes, as memory estimators do, and what is wrong then."""
    layers = cut_pair(whole_pair(), sequence_parallel=sequence_parallel)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [draw(seed, 4, layer.weight.shape[1]) for seed, layer in enumerate(layers)]
    with torch.no_grad():
        expected = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
        with mode:
            fake = [layer(mode.from_tensor(x)) for layer, x in zip(layers, inputs, strict=True)]
        again = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    return [one.shape for one in fake] == [one.shape for one in expected], far(again, expected)


@on_cpu
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_take_fake_tensors(ranks: Callable[[int], Ranks], sequence_parallel: bool) -> None:
    assert ranks(2).call(call_with_fake_tensors, sequence_parallel) == [(True, [])] * 2
