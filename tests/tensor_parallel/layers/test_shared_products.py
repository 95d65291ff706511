"""Layers that read one x are multiplied as one, and are otherwise as before."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from layers import counted, draw, far, local_products, own_rows, parameters, released
from ranks import Ranks, context
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as theirs
from torch.utils.checkpoint import checkpoint
from torch_compiling import compiled, if_it_compiles

from iris_kernels.common.operators import torch_op
from iris_kernels.common.operators.parts import lie_together
from iris_tensor_parallel import ColumnParallelLinear, prepare, share_products, styles

pytestmark = pytest.mark.parametrize("device", ["cpu"])
WIDTH, TOKENS = 8, 12
OF_SEQUENCES, OF_ALL_TOKENS = Shard(0), Replicate()  # how x lies
each_layout = pytest.mark.parametrize("layout", [OF_SEQUENCES, OF_ALL_TOKENS], ids=["sequences", "all tokens"])


class Block(nn.Module):
    """Layers as a decoder block names them: of three that read one x, then of two; a DTensor where there is a mesh."""

    mesh: Any = None
    layout: Any = OF_SEQUENCES

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
        return x + two["down"](nn.functional.silu(two["gate"](given)) * two["up"](given))

    def _given(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.mesh is None else DTensor.from_local(x, self.mesh, [self.layout], run_check=False)


def cut_block(seed: int, bias: bool, layout: Any = OF_SEQUENCES) -> Any:
    torch.manual_seed(seed)
    block, ctx = Block(bias), context()
    block.layout = layout
    into, out_of = (
        styles.ColwiseParallel(ctx, input_layouts=layout),
        styles.RowwiseParallel(ctx, output_layouts=layout),
    )
    plan = {f"attention.{name}": into for name in "qkv"} | {f"mlp.{name}": into for name in ("gate", "up")}
    plan |= {"attention.o": out_of, "mlp.down": out_of}
    return theirs.parallelize_module(block, styles.mesh_of(ctx), plan)


def drawn(layout: Any, rank: int, world_size: int) -> torch.Tensor:
    """Return a rank's x."""
    x = draw(2, TOKENS, WIDTH)
    return own_rows(x, rank, world_size) if layout == OF_SEQUENCES else x


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
def train(rank: int, world_size: int, bias: bool, layout: Any, mesh: bool = False) -> Any:
    block, x = cut_block(1, bias, layout), drawn(layout, rank, world_size)
    block.mesh = styles.mesh_of(context()) if mesh else None
    before = step(block, block, x)
    groups = share_products(block)
    after = step(block, block, x)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    optimizer.step()  # writes what the layers read
    moved, alone = step(block, block, x)[0], copy.deepcopy(block)
    for layer in alone.modules():
        if hasattr(layer, "shared"):
            layer.shared = None
    wrong = far(after[0], before[0]) + far(moved, step(alone, alone, x)[0])
    assign(block)  # weights lie apart
    wrong += far(step(block, block, x)[0], moved)
    return groups, share_products(block), wrong, before[1], after[1], after[2] <= before[2]


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
    share_products(block)
    call = compiled(block) if compile_it else block
    copied = []
    for move in (None, cast, materialise, assign, share_products):
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


def products(layout: Any, *, groups: int) -> dict[str, int]:
    """Return the products of a training step, of two row-parallel layers and so many groups of column-parallel ones."""
    if layout == OF_SEQUENCES:
        return {"all_gather_gemm": groups + 2, "gemm_reduce_scatter": 2 + groups}  # forward and backward
    return {"gemm_all_reduce": 2 + groups}


@each_layout
@pytest.mark.parametrize("bias", [False, True])
def test_a_training_step_communicates_once_for_each_x(ranks: Callable[[int], Ranks], bias: bool, layout: Any) -> None:
    expected = (2, 0, [], products(layout, groups=5), products(layout, groups=2), True)
    assert ranks(2).call(train, bias, layout) == [expected] * 2
    assert ranks(2).call(train, bias, layout, True) == [expected] * 2


@released
def multiply_all_tokens(rank: int, world_size: int, compile_it: bool) -> Any:
    """Return what differs with weights together, then apart; and the products of several that it took."""
    block, x = cut_block(1, True, OF_ALL_TOKENS), draw(2, TOKENS, WIDTH)
    expected, wrong = step(block, block, x)[0], []
    share_products(block)
    call = compiled(block) if compile_it else block
    with local_products() as made:
        for move in (None, assign):
            if move is not None:
                move(block)
            wrong += far(step(block, call, x)[0], expected)
    return wrong, made


@pytest.mark.parametrize("compile_it", [False, True])
def test_layers_that_have_all_tokens_are_one_product(ranks: Callable[[int], Ranks], compile_it: bool) -> None:
    """Of query, key and value, and of gate and up; weights are not copied, where they lie together as where not."""
    expected = [(3, 1, 0), (2, 1, 0), (3, 3, 0), (2, 2, 0)]
    assert ranks(2).call(multiply_all_tokens, compile_it) == [([], expected)] * 2


@released
def compile_shared(rank: int, world_size: int, backend: str, layout: Any, mesh: bool = False) -> Any:
    block, x = cut_block(1, False, layout), drawn(layout, rank, world_size)
    block.mesh = styles.mesh_of(context()) if mesh else None
    expected = step(block, block, x)[0]
    share_products(block)
    found, counts, _ = step(block, compiled(block, backend), x)
    return far(found, expected), counts


@if_it_compiles
@each_layout
def test_a_whole_graph_communicates_once_for_each_x(ranks: Callable[[int], Ranks], layout: Any) -> None:
    assert ranks(2).call(compile_shared, "inductor", layout) == [([], products(layout, groups=2))] * 2


@each_layout
def test_a_whole_graph_communicates_once_for_each_dtensor(ranks: Callable[[int], Ranks], layout: Any) -> None:
    assert ranks(2).call(compile_shared, "aot_eager", layout, True) == [([], products(layout, groups=2))] * 2


@released
def checkpoint_in_a_graph(rank: int, world_size: int, layout: Any) -> list[str]:
    """Return what differs in a graph of the whole block, of which the activations are computed again."""
    block, x = cut_block(1, False, layout), drawn(layout, rank, world_size)
    expected = step(block, block, x)[0]
    share_products(block)
    call = compiled(functools.partial(checkpoint, block, use_reentrant=False))
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        return far(step(block, call, x)[0], expected)


@each_layout
def test_a_graph_may_have_checkpoints_of_activations(ranks: Callable[[int], Ranks], layout: Any) -> None:
    assert ranks(2).call(checkpoint_in_a_graph, layout) == [[]] * 2


@released
def activate_some(rank: int, world_size: int) -> list[str]:
    """Of three layers of one x two have an activation; return what differs where products are shared."""
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
        assert share_products(layers) == 1
        return far([layer(x) for layer in layers.values()], expected)


def test_layers_share_with_those_of_the_same_activation(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(activate_some) == [[]] * 2


@released
def give_other_tensors(rank: int, world_size: int, layout: Any) -> Any:
    """Of two layers one reads another x; and, of others, x is written between them."""
    layers, first = cut_block(1, False, layout).attention, drawn(layout, rank, world_size)
    second = first + 1
    expected = [layers["q"](first), layers["k"](second), layers["v"](second)]
    share_products(nn.ModuleDict({"attention": layers}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [layers["q"](first), layers["k"](second), layers["v"](second)]
    said = [str(one.message) for one in caught if "multiplied as one" in str(one.message)]
    mlp = cut_block(1, False, layout).mlp
    share_products(mlp)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = first.clone()
        mlp["gate"](x)
        x += 1
        found.append(mlp["up"](x))
        expected.append(mlp["up"](x.clone()))
    return far(found, expected), said, layers["q"].shared is None


@each_layout
def test_layers_that_are_given_different_tensors_share_no_longer(ranks: Callable[[int], Ranks], layout: Any) -> None:
    for wrong, said, is_over in ranks(2).call(give_other_tensors, layout):
        assert wrong == []
        assert len(said) == 1
        assert "8 to [8, 4, 4] features" in said[0]
        assert is_over


@released
def prepare_shared(rank: int, world_size: int) -> tuple[int, int]:
    """Return by how much heap and operators grow in training steps after `prepare`."""
    ctx, block = context(), cut_block(1, False)
    share_products(block)
    prepare(block, TOKENS, gradients=True)
    used, made = ctx.heap.allocator.used_bytes, len(ctx.operators)
    for tokens in (TOKENS, 6):
        step(block, block, own_rows(draw(2, tokens, WIDTH), rank, world_size))
    return ctx.heap.allocator.used_bytes - used, len(ctx.operators) - made


def test_what_shares_a_product_is_prepared_together(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(prepare_shared) == [(0, 0)] * 2


@released
def share_on_meta(rank: int, world_size: int) -> Any:
    """Share products of layers without memory, and give them some; return what differs from layers that had it."""
    expected, x = cut_block(1, True), own_rows(draw(2, TOKENS, WIDTH), rank, world_size)
    block = copy.deepcopy(expected).to("meta")
    groups = share_products(block)
    block.to_empty(device="cpu").load_state_dict(expected.state_dict())
    shards = [block.mlp[name].weight.to_local() for name in ("gate", "up")]
    return groups, far([block(x)], [expected(x)]), lie_together(shards)


def test_layers_share_products_before_they_have_memory(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(share_on_meta) == [(2, [], True)] * 2


class CrossAttention(nn.ModuleDict):
    """A query of one tensor, a key and a value of another."""

    def forward(self, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return torch.cat([self["q"](x), self["k"](states), self["v"](states)], -1)


@released
def compile_cross_attention(rank: int, world_size: int, layout: Any) -> Any:
    """Return what differs in two calls, and how many products each made, with a collective and of several weights."""
    block, x = cut_block(1, False, layout), drawn(layout, rank, world_size)
    layers, states = CrossAttention(block.attention), x + 1
    expected = layers(x, states)
    share_products(layers)
    call, wrong, made = compiled(layers), [], []
    for _ in range(2):
        with counted() as counts, local_products() as several:
            wrong += far([call(x, states)], [expected])
        made.append((sum(counts.values()), len(several)))
    return wrong, made


@pytest.mark.parametrize(("layout", "products_of_one"), [(OF_SEQUENCES, 3), (OF_ALL_TOKENS, 0)])
def test_a_graph_multiplies_alone_what_is_given_different_tensors(
    ranks: Callable[[int], Ranks], layout: Any, products_of_one: int
) -> None:
    """From its second call on: in the first, of which it learns that, one product was of all three."""
    first = (products_of_one, 1 if layout == OF_ALL_TOKENS else 0)
    assert ranks(2).call(compile_cross_attention, layout) == [([], [first, (products_of_one, 0)])] * 2


@released
def write_output(rank: int, world_size: int) -> list[str]:
    """Write an output in place, and call one layer under autocast alone; return what differs once they share."""
    found = []
    for is_shared in (False, True):
        mlp, x = cut_block(1, False, OF_ALL_TOKENS).mlp, draw(2, TOKENS, WIDTH)
        if is_shared:
            share_products(mlp)
        output = torch.relu_(mlp["gate"](x)) * mlp["up"](x)
        output.sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            narrow = mlp["gate"](x)
        wide = mlp["up"](x)
        assert wide.dtype == torch.float32
        found.append([output, mlp["gate"].weight.grad.to_local(), narrow.float(), wide])
    return far(*found)


@pytest.mark.filterwarnings("ignore:layers of")
def test_an_output_may_be_written(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(write_output) == [[]] * 2


@released
def call_one(rank: int, world_size: int, layout: Any) -> Any:
    """Call one layer of two; return whether they share after each call, what was said, and a copy's first call."""
    mlp, x, shared = cut_block(1, False, layout).mlp, drawn(layout, rank, world_size), []
    expected = mlp["gate"](x)
    share_products(mlp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrong = far([mlp["gate"](x)], [expected])
        copied = copy.deepcopy(mlp)  # while another's output is kept, which has gradients
        shared.append(mlp["up"].shared is not None)
        wrong += far([mlp["gate"](x), copied["gate"](x)], [expected] * 2)
        shared.append(mlp["up"].shared is not None)
    expected.sum().backward()
    return wrong, shared, [str(one.message) for one in caught if "multiplied as one" in str(one.message)]


@each_layout
def test_a_group_of_which_one_is_called_alone_ends(ranks: Callable[[int], Ranks], layout: Any) -> None:
    for wrong, shared, said in ranks(2).call(call_one, layout):
        assert wrong == []
        assert shared == [True, False]
        assert ["the others were not called" in one for one in said] == [True]
