"""Layers that read one x gather it once, and are otherwise as before."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from layers import counted, draw, far, own_rows, parameters, released
from ranks import Ranks, context
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import parallel as theirs
from torch_compiling import compiled, if_it_compiles

from iris_kernels.common.operators import torch_op
from iris_kernels.common.operators.parts import lie_together
from iris_tensor_parallel import ColumnParallelLinear, prepare, share_gathers, styles

pytestmark = pytest.mark.parametrize("device", ["cpu"])
WIDTH, TOKENS = 8, 12


class Block(nn.Module):
    """Layers as a decoder block names them: of three that read one x, then of two; a DTensor where there is a mesh."""

    mesh: Any = None

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {name: nn.Linear(WIDTH, size, bias) for name, size in (("q", 8), ("k", 4), ("v", 4), ("o", 8))}
        )
        self.mlp = nn.ModuleDict({"gate": nn.Linear(WIDTH, 12, bias), "up": nn.Linear(WIDTH, 12, bias)})
        self.mlp["down"] = nn.Linear(12, WIDTH, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.attention, self.mlp
        given = self._given(x)
        mixed = one["q"](given) * torch.cat([one["k"](given), one["v"](given)], -1)
        x = x + one["o"](mixed)
        given = self._given(x)
        return x + two["down"](torch.relu(two["gate"](given)) * two["up"](given))

    def _given(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.mesh is None else DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)


def cut_block(seed: int, bias: bool) -> Any:
    torch.manual_seed(seed)
    block, ctx = Block(bias), context()
    into, out_of = (
        styles.ColwiseParallel(ctx, input_layouts=Shard(0)),
        styles.RowwiseParallel(ctx, output_layouts=Shard(0)),
    )
    plan = {f"attention.{name}": into for name in "qkv"} | {f"mlp.{name}": into for name in ("gate", "up")}
    plan |= {"attention.o": out_of, "mlp.down": out_of}
    return theirs.parallelize_module(block, styles.mesh_of(ctx), plan)


def step(
    block: Any, call: Callable[..., torch.Tensor], x: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, int], int]:
    """Return output and gradients of a training step, the products that it made, and the bytes kept for gradients."""
    block.zero_grad()
    leaf, kept = x.clone().requires_grad_(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with counted() as counts:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = call(leaf)
        output.square().sum().backward()
    of_parameters = [one.grad.full_tensor() for one in parameters([block])]
    return [output.detach(), leaf.grad, *of_parameters], dict(counts), sum(kept.values())


@released
def train(rank: int, world_size: int, bias: bool, mesh: bool = False) -> Any:
    block, x = cut_block(1, bias), own_rows(draw(2, TOKENS, WIDTH), rank, world_size)
    block.mesh = styles.mesh_of(context()) if mesh else None
    before = step(block, block, x)
    groups = share_gathers(block)
    after = step(block, block, x)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    optimizer.step()  # writes what the layers read
    moved, alone = step(block, block, x)[0], copy.deepcopy(block)
    for layer in alone.modules():
        if hasattr(layer, "shared"):
            layer.shared = None
    wrong = far(after[0], before[0]) + far(moved, step(alone, alone, x)[0])
    return groups, share_gathers(block), wrong, before[1], after[1], after[2] <= before[2]


def cast(block: Block) -> None:
    block.to(torch.float64).to(torch.float32)


def materialise(block: Block) -> None:
    """Move weights to the meta device, and from there to memory that is not written yet."""
    state = block.state_dict()
    block.to("meta").to_empty(device="cpu")
    block.load_state_dict(state)


def assign(block: Block) -> None:
    """Give layers tensors of their own, each."""
    block.load_state_dict(copy.deepcopy(block.state_dict()), assign=True)


@released
def copied_weights(rank: int, world_size: int, compile_it: bool) -> list[bool]:
    """Return whether layers that share copy their weights in a training step, in whatever way they were moved."""
    block, x = cut_block(1, bias=False), own_rows(draw(2, TOKENS, WIDTH), rank, world_size)
    share_gathers(block)
    call = compiled(block) if compile_it else block
    copied = []
    for move in (None, cast, materialise, assign, share_gathers):
        if move is not None:
            move(block)
        with mock.patch.object(torch_op, "joined", wraps=torch_op.joined) as joined:
            step(block, call, x)
        several = [(made.args[0], torch_op.joined(*made.args)) for made in joined.call_args_list]
        assert len(several) == 4
        copied += [any(parts[0].data_ptr() != one.data_ptr() for parts, one in several)]
    return copied


@pytest.mark.parametrize("compile_it", [False, True])
def test_weights_that_are_multiplied_at_once_are_not_copied(ranks: Callable[[int], Ranks], compile_it: bool) -> None:
    assert ranks(2).call(copied_weights, compile_it) == [[False, False, False, True, False]] * 2


@pytest.mark.parametrize("bias", [False, True])
def test_a_training_step_gathers_and_scatters_once_for_each_x(ranks: Callable[[int], Ranks], bias: bool) -> None:
    apart = {"all_gather_gemm": 5 + 2, "gemm_reduce_scatter": 2 + 5}  # forward and backward
    shared = {"all_gather_gemm": 2 + 2, "gemm_reduce_scatter": 2 + 2}
    assert ranks(2).call(train, bias) == [(2, 0, [], apart, shared, True)] * 2
    assert ranks(2).call(train, bias, True) == [(2, 0, [], apart, shared, True)] * 2


@released
def compile_shared(rank: int, world_size: int, backend: str, mesh: bool = False) -> Any:
    block, x = cut_block(1, False), own_rows(draw(2, TOKENS, WIDTH), rank, world_size)
    block.mesh = styles.mesh_of(context()) if mesh else None
    expected = step(block, block, x)[0]
    share_gathers(block)
    found, counts, _ = step(block, compiled(block, backend), x)
    return far(found, expected), counts


@if_it_compiles
def test_a_whole_graph_gathers_once_for_each_x(ranks: Callable[[int], Ranks]) -> None:
    counts = {"all_gather_gemm": 2 + 2, "gemm_reduce_scatter": 2 + 2}
    assert ranks(2).call(compile_shared, "inductor") == [([], counts)] * 2


def test_a_whole_graph_gathers_once_for_each_dtensor(ranks: Callable[[int], Ranks]) -> None:
    counts = {"all_gather_gemm": 2 + 2, "gemm_reduce_scatter": 2 + 2}
    assert ranks(2).call(compile_shared, "aot_eager", True) == [([], counts)] * 2


@released
def activate_some(rank: int, world_size: int) -> list[str]:
    """Of three layers of one x two have an activation; return what differs where gathers are shared."""
    torch.manual_seed(3)
    layers = nn.ModuleDict(
        {
            name: ColumnParallelLinear(context(), WIDTH, 8, sequence_parallel=True, activation=activation)
            for name, activation in (("q", "silu"), ("k", "silu"), ("v", None))
        }
    )
    x = own_rows(draw(2, TOKENS, WIDTH), rank, world_size)
    with torch.no_grad():
        expected = [layer(x) for layer in layers.values()]
        assert share_gathers(layers) == 1
        return far([layer(x) for layer in layers.values()], expected)


def test_layers_share_with_those_of_the_same_activation(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(activate_some) == [[]] * 2


@released
def give_other_tensors(rank: int, world_size: int) -> Any:
    """Of two layers one reads another x; and, of others, x is written between them."""
    layers = cut_block(1, False).attention
    first, second = (own_rows(draw(seed, TOKENS, WIDTH), rank, world_size) for seed in (2, 3))
    expected = [layers["q"](first), layers["k"](second), layers["v"](second)]
    share_gathers(nn.ModuleDict({"attention": layers}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [layers["q"](first), layers["k"](second), layers["v"](second)]
    said = [str(one.message) for one in caught if "share their gather" in str(one.message)]
    mlp = cut_block(1, False).mlp
    share_gathers(mlp)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = first.clone()
        mlp["gate"](x)
        x += 1
        found.append(mlp["up"](x))
        expected.append(mlp["up"](x.clone()))
    return far(found, expected), said, layers["q"].shared is None


def test_layers_that_are_given_different_tensors_share_no_longer(ranks: Callable[[int], Ranks]) -> None:
    for wrong, said, is_over in ranks(2).call(give_other_tensors):
        assert wrong == []
        assert len(said) == 1
        assert "8 to [8, 4, 4] features" in said[0]
        assert is_over


@released
def prepare_shared(rank: int, world_size: int) -> tuple[int, int]:
    """Return by how much heap and operators grow in training steps after `prepare`."""
    ctx, block = context(), cut_block(1, False)
    share_gathers(block)
    prepare(block, TOKENS, gradients=True)
    used, made = ctx.heap.allocator.used_bytes, len(ctx.operators)
    for tokens in (TOKENS, 6):
        step(block, block, own_rows(draw(2, tokens, WIDTH), rank, world_size))
    return ctx.heap.allocator.used_bytes - used, len(ctx.operators) - made


def test_what_shares_a_gather_is_prepared_together(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(prepare_shared) == [(0, 0)] * 2


@released
def share_on_meta(rank: int, world_size: int) -> Any:
    """Share gathers of layers without memory, and give them some; return what differs from layers that had it."""
    expected, x = cut_block(1, True), own_rows(draw(2, TOKENS, WIDTH), rank, world_size)
    block = copy.deepcopy(expected).to("meta")
    groups = share_gathers(block)
    block.to_empty(device="cpu").load_state_dict(expected.state_dict())
    shards = [block.mlp[name].weight.to_local() for name in ("gate", "up")]
    return groups, far([block(x)], [expected(x)]), lie_together(shards)


def test_layers_share_gathers_before_they_have_memory(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(share_on_meta) == [(2, [], True)] * 2
