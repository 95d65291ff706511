"""Styles of layers in fp8: parameters as DTensors, checkpoints, plans of models, torchao's layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layers import draw, far, released
from ranks import Ranks, context, raised
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch_compiling import compiled

from iris_kernels.common.fp8.scales import dequantised, quantise
from iris_tensor_parallel import Float8, heap_bytes, parallelize, plan_of, prepare, share_products
from iris_tensor_parallel.styles import ColwiseParallel, RowwiseParallel, mesh_of

pytestmark = pytest.mark.parametrize("device", ["cpu"])
WIDTH, FEATURES, TOKENS = 48, 64, 8


class Block(nn.Module):
    """Gate, up and down; x is (tokens, width)."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(WIDTH, FEATURES, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(FEATURES, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def cut(whole: nn.Module, how: Float8, tokens_are_cut: bool) -> Any:
    """Return a copy of a block cut by styles, prepared; gate and up share their gather, if there is one."""
    ctx, into = context(), Shard(0) if tokens_are_cut else Replicate()
    column, row = (
        ColwiseParallel(ctx, input_layouts=into, quantize=how),
        RowwiseParallel(ctx, output_layouts=into, quantize=how),
    )
    model = parallelize_module(copy.deepcopy(whole), mesh_of(ctx), {"gate": column, "up": column, "down": row})
    share_products(model)
    prepare(model, TOKENS, gradients=how.training)
    return model


def in_fp8(whole: Block) -> Block:
    """Return a block whose weights have been quantised by another: plain layers of fp8 weights and their scales."""
    quantised = copy.deepcopy(whole)
    for linear in (quantised.gate, quantised.up, quantised.down):
        small, scale = quantise(linear.weight.detach(), torch.float8_e4m3fn, "row")
        linear.weight = nn.Parameter(small, requires_grad=False)
        linear.register_buffer("weight_scale", scale)
    return quantised


def exactly(whole: Block, x: torch.Tensor) -> torch.Tensor:
    """Return a block's output in fp64, of the weights as they are once they are quantised."""
    wide = copy.deepcopy(whole).double()
    for linear, own in zip((wide.gate, wide.up, wide.down), (whole.gate, whole.up, whole.down), strict=True):
        linear.weight.data = dequantised(*quantise(own.weight.detach(), torch.float8_e4m3fn, "row")).double()
    return wide(x.double())


@released
def follow(rank: int, world_size: int, tokens_are_cut: bool, folder: Path) -> Any:
    """Return how far cut blocks are from the whole one in fp64, and from each other; their parameters; checkpoints."""
    whole, x = Block(), draw(1, TOKENS, WIDTH).bfloat16()
    own = x.chunk(world_size)[rank] if tokens_are_cut else x
    models = [cut(one, Float8(), tokens_are_cut) for one in (whole, in_fp8(whole))]
    models.append(copy.deepcopy(models[0]))
    with torch.no_grad():
        outputs = [model(own) for model in models]
        outputs.append(compiled(models[0])(own))
        exact = exactly(whole, x)
        # Of the quantised x and hidden features, each within 2**-4 of a number.
        wrong = far([outputs[0].double()], [exact.chunk(world_size)[rank] if tokens_are_cut else exact], limit=5e-2)
        wrong += far(outputs[1:], outputs[:1] * 3)
        placements = {name: str(one.placements[0]) for name, one in models[0].named_parameters()}
        # A checkpoint of the cut block, and one of the whole block in fp8. Nothing is gathered: gloo sends no fp8.
        group = context().process_group()
        dcp.save(models[0].state_dict(), checkpoint_id=folder / "cut", process_group=group)
        if rank == 0:
            dcp.save(in_fp8(whole).state_dict(), checkpoint_id=folder / "whole", no_dist=True)
        context().barrier()
        for name in ("cut", "whole"):
            for one in models[2].parameters():
                one.zero_()
            state = models[2].state_dict()
            dcp.load(state, checkpoint_id=folder / name, process_group=group)
            models[2].load_state_dict(state)
            wrong += far([models[2](own)], outputs[:1])
        read = {name: torch.zeros_like(one) for name, one in in_fp8(whole).state_dict().items()}
        dcp.load(read, checkpoint_id=folder / "cut", no_dist=True)
        wrong += [name for name, one in in_fp8(whole).state_dict().items() if not _same(read[name], one)]
    return wrong, placements


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.float(), other.float())


@pytest.mark.parametrize("tokens_are_cut", [True, False])
def test_a_plan_quantises_whole_weights_and_takes_such_as_are(
    ranks: Callable[[int], Ranks], tokens_are_cut: bool, tmp_path: Path
) -> None:
    column, row = "Shard(dim=0)", "Replicate()"
    placements = {f"{name}.{which}": column for name in ("gate", "up") for which in ("weight", "weight_scale")}
    placements |= {"down.weight": "Shard(dim=1)", "down.weight_scale": row, "down.bias": row}
    shorter = {"S(0)": column, "S(1)": "Shard(dim=1)", "R": row}  # as newer versions of torch write them
    for wrong, found in ranks(2).call(follow, tokens_are_cut, tmp_path):
        assert wrong == []
        assert {name: shorter.get(one, one) for name, one in found.items()} == placements


@released
def train(rank: int, world_size: int) -> list[Any]:
    """Return how far gradients are from those of the whole block, which is not quantised."""
    whole, x = Block(torch.float32), draw(1, TOKENS, WIDTH)
    model = cut(whole, Float8(training=True), True)
    for one, given in ((whole, x), (model, x.chunk(world_size)[rank])):
        one(given).square().sum().backward()
    found = [one.grad.full_tensor() for one in model.parameters()]
    # Gradients are rounded to two bits, 2**-3 of a number, and add up over terms of both signs.
    return far(found, [one.grad for one in whole.parameters()], limit=0.15)


def test_styles_train(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(train) == [[]] * 2


def llama() -> Any:
    """Return a small model of transformers', the same on every rank."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).bfloat16().eval()


@released
def follow_a_models_plan(rank: int, world_size: int) -> Any:
    """Return how far logits are from the whole model's, the dtypes of weights, and the bytes of the heap."""
    whole, model = llama(), llama()
    plan = plan_of(model, world_size, quantize=Float8())
    needed = heap_bytes(model, plan, 8, world_size=world_size)
    ids = torch.randint(32, (2, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = whole(ids).logits
        parallelize(model, mesh_of(context()), plan, max_tokens=8, ctx=context())
        found = model(ids).logits
    layer = model.model.layers[0]
    dtypes = [str(one.weight.dtype) for one in (layer.self_attn.q_proj, layer.mlp.down_proj, model.lm_head)]
    return far([found], [expected], limit=0.1), dtypes, needed > context().heap.allocator.used_bytes


def test_a_models_plan_quantises_all_but_its_head(ranks: Callable[[int], Ranks]) -> None:
    pytest.importorskip("transformers")
    fp8 = "torch.float8_e4m3fn"
    assert ranks(2).call(follow_a_models_plan) == [([], [fp8, fp8, "torch.bfloat16"], True)] * 2


@released
def take_torchaos(rank: int, world_size: int) -> Any:
    """Return how far outputs are from those of torchao's dequantised weights, and of our layers in training."""
    from torchao.float8 import convert_to_float8_training
    from torchao.quantization import Float8Tensor, PerRow, PerTensor

    whole, x = Block(), draw(1, TOKENS, WIDTH).bfloat16()
    with torch.no_grad():
        wrong, kinds = [], []
        for granularity in (PerRow(), PerTensor()):
            theirs, wide = copy.deepcopy(whole), copy.deepcopy(whole).double()
            for linear, exact in zip(theirs.children(), wide.children(), strict=True):
                weight = Float8Tensor.from_hp(linear.weight.detach(), granularity=granularity)
                linear.weight = nn.Parameter(weight, requires_grad=False)
                exact.weight.data = weight.qdata.double() * weight.scale.double()
            kinds.append(type(theirs.up.weight).__name__)
            model = cut(theirs, Float8(), False)
            wrong += far([model(x).double()], [wide(x.double())], limit=5e-2)
            own = theirs.down.weight.qdata.chunk(world_size, 1)[rank]
            wrong += far([model.down.weight.to_local().float()], [own.float()], limit=0.0)
    trained = convert_to_float8_training(copy.deepcopy(whole))
    kinds.append(type(trained.up).__name__)
    how = Float8(training=True)
    wrong += far([cut(trained, how, False)(x)], [cut(whole, how, False)(x)])
    return wrong, kinds


def test_layers_of_torchao_are_taken(ranks: Callable[[int], Ranks]) -> None:
    pytest.importorskip("torchao")
    assert ranks(2).call(take_torchaos) == [([], ["Float8Tensor", "Float8Tensor", "Float8Linear"])] * 2


@released
def refuse(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx, quantised = context(), in_fp8(Block())
    bare = copy.deepcopy(quantised.up)
    del bare.weight_scale
    blocks = copy.deepcopy(bare)
    blocks.weight_scale = torch.ones(2, 2)
    mesh = mesh_of(ctx)
    return [
        raised(parallelize_module, quantised.up, mesh, ColwiseParallel(ctx)),
        raised(parallelize_module, bare, mesh, ColwiseParallel(ctx, quantize=Float8())),
        raised(parallelize_module, blocks, mesh, RowwiseParallel(ctx, quantize=Float8())),
        raised(parallelize_module, quantised.up, mesh, RowwiseParallel(ctx, quantize=Float8(training=True))),
    ]


def test_what_cannot_be_quantised_is_refused(ranks: Callable[[int], Ranks]) -> None:
    parts = [
        "a layer's weight is a Parameter of torch.float8_e4m3fn, and quantize is None; fp8 weights take",
        "a layer's weight is torch.float8_e4m3fn, and it has no weight_scale; fp8 takes one",
        "a layer's weight_scale is (2, 2); for 64 output features it takes one for all, (), or (64, 1)",
        "quantize is Float8(weight_scales='row', training=True, use_fast_accum=False); fp8 weights take",
    ]
    for errors in ranks(2).call(refuse):
        for (kind, message), part in zip(errors, parts, strict=True):
            assert kind == "ValueError"
            assert message.startswith(("ColwiseParallel(", "RowwiseParallel("))
            assert part in message, message
