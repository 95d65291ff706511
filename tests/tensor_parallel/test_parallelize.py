"""Whole models, cut in one call on a mesh of two replicas of two ranks, beside one process and torch's own styles."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layers import far
from meshes import calls_on, device, mesh, whole
from ranks import raised
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torchs
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from iris_core import Context, iris
from iris_tensor_parallel import ColumnParallelLinear, RowParallelLinear, parallelize
from iris_tensor_parallel.sequences import ShardSequences
from iris_tensor_parallel.styles import ColwiseParallel, RowwiseParallel

WIDTH, TOKENS, STEPS = 8, 4, 50
each_kind = pytest.mark.parametrize("kind", ["tp", "fsdp", "ddp"])
CURVE = 1e-4  # relative, of losses in fp32 that updates of 50 steps have gone into


class Block(nn.Module):
    """An MLP beside a residual; x is (batch, tokens, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(device())


def plan(styles: Any = None) -> dict[str, Any]:
    """Return a plan in which ranks have parts of the sequence between layers."""
    column, row = (ColwiseParallel, RowwiseParallel) if styles is None else styles
    into = column(input_layouts=Shard(1))
    return {"*.gate": into, "*.up": into, "*.down": row(output_layouts=Shard(1))}


def parallelized(model: nn.Module, *args: Any, tokens: int = 2 * TOKENS, ctx: Context | None = None) -> Context:
    return parallelize(model, mesh()["tp"], *args, max_tokens=tokens, gradients=True, ctx=ctx)


def curve(model: nn.Module, *, replicas: int, ranks: int) -> list[float]:
    """Train on two sequences a step, of which each replica has its own, and each of its ranks a part of the tokens.

    Returns:
        The loss of each step, over all that is on any process.
    """
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []  # whose steps are as large as gradients
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(2, TOKENS, WIDTH, generator=random).to(device())
        x = x.chunk(replicas)[mesh()["dp"].get_local_rank() if replicas > 1 else 0]
        own = x.chunk(ranks, 1)[mesh()["tp"].get_local_rank() if ranks > 1 else 0].contiguous()
        loss = (model(own) - own.roll(1, -1)).square().sum() / x.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        for count, name in ((ranks, "tp"), (replicas, "dp")):
            if count > 1:
                dist.all_reduce(total, group=mesh()[name].get_group())
        losses.append(total.item() / replicas)
    return losses


def by_modules(model: nn.Sequential) -> Context:
    """Cut blocks by hand: their parameters are tensors, as DistributedDataParallel takes them."""
    ctx = iris(1 << 26, device(), group=mesh()["tp"].get_group())
    for block in model:
        options = {"sequence_parallel": True, "sequence_dim": 1}
        block.gate = ColumnParallelLinear.from_linear(ctx, block.gate, **options)
        block.up = ColumnParallelLinear.from_linear(ctx, block.up, **options)
        block.down = RowParallelLinear.from_linear(ctx, block.down, **options)
    return ctx


def train(rank: int, world_size: int, kind: str) -> tuple[float, float]:
    """Return how far the losses are from one process's, at most, and how far these come down, both relative."""
    expected = curve(blocks(), replicas=1, ranks=1)
    model: Any = blocks()
    ctx = by_modules(model) if kind == "ddp" else parallelized(model, plan())
    assert (model[0].gate.shared is not None) == (kind != "ddp")  # of modules it is for who makes them to say
    if kind == "fsdp":
        for one in (*model, model):
            fully_shard(one, mesh=mesh()["dp"])
    elif kind == "ddp":
        model = DistributedDataParallel(model, process_group=mesh()["dp"].get_group())
    found = curve(model, replicas=1 if kind == "tp" else 2, ranks=2)
    ctx.close()
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True)), expected[-1] / expected[0]


@each_kind
def test_losses_are_those_of_one_process(call: Callable[..., Any], kind: str) -> None:
    for off, ratio in call(train, kind):
        assert off < CURVE
        assert ratio < 0.5  # there is something to learn


@pytest.mark.gpu
@each_kind
def test_losses_on_gpus_are_those_of_one_process(kind: str) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip(f"needs 4 GPUs; there are {torch.cuda.device_count()}")
    with calls_on("cuda") as call:
        assert max(off for off, _ in call(train, kind)) < CURVE


class Gated(nn.Module):
    """The MLP alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes) for sizes in ((64, 256), (64, 256), (256, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """An attention alone, which keeps its value and not what query and key are made of, as with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            one(x).unflatten(-1, (-1, 16)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(2 * query, 2 * key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Return how much memory a forward pass keeps for the backward pass, beside parameters."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        kept[local.untyped_storage().data_ptr()] = local
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x.requires_grad_()).sum().backward()
    for one in model.parameters():
        kept.pop(one.to_local().untyped_storage().data_ptr() if isinstance(one, DTensor) else one.data_ptr(), None)
    return sum(one.untyped_storage().nbytes() for one in kept.values())


def keep_for_gradients(rank: int, world_size: int, kind: type[nn.Module], batch: int) -> tuple[int, int]:
    """Return what is kept under sequence parallelism: by these styles, and by torch's where x is gathered once."""
    tp, tokens, ours, torchs_own = mesh()["tp"], Shard(1), kind(), kind()
    *first, last = [name for name, _ in ours.named_children()]
    column = ColwiseParallel(input_layouts=tokens)
    plan = {**dict.fromkeys(first, column), last: RowwiseParallel(output_layouts=tokens)}
    ctx = parallelize(ours, tp, plan, max_tokens=64, gradients=True)
    plan_of_torch = {
        "": torchs.PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate()),
        **{name: torchs.ColwiseParallel() for name in first},
        last: torchs.RowwiseParallel(output_layouts=tokens),
    }
    torchs.parallelize_module(torchs_own, tp, plan_of_torch)
    found = [kept_bytes(model, torch.ones(batch, 32 // batch, 64)) for model in (ours, torchs_own)]
    ctx.close()
    return found[0], found[1]


@pytest.mark.parametrize(("kind", "batch"), [(Gated, 2), (Attention, 1)])
def test_no_more_is_kept_for_gradients_than_by_torchs_styles(
    call: Callable[..., Any], kind: type[nn.Module], batch: int
) -> None:
    for ours, torchs_own in call(keep_for_gradients, kind, batch):
        assert 64 * 64 * 4 < ours <= torchs_own


def exchange_checkpoints(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Save what one kind of styles has cut, and load it into what the other has; return what differs."""
    tp, wrong = mesh()["tp"], []
    ctx = iris(1 << 26, "cpu", group=tp.get_group())
    for number, saved_by_torch in enumerate((True, False)):
        ours, torchs_own = blocks(), blocks()
        assert parallelized(ours, plan(), ctx=ctx) is ctx
        torchs.parallelize_module(torchs_own, tp, plan((torchs.ColwiseParallel, torchs.RowwiseParallel)))
        saved, loaded = (torchs_own, ours) if saved_by_torch else (ours, torchs_own)
        with torch.no_grad():
            for one in loaded.parameters():
                one.zero_()
        where = {"checkpoint_id": folder / f"{number}-{mesh()['dp'].get_local_rank()}", "process_group": tp.get_group()}
        dcp.save(saved.state_dict(), **where)
        state = loaded.state_dict()
        dcp.load(state, **where)
        loaded.load_state_dict(state)
        wrong += far([whole(one) for one in loaded.parameters()], blocks().parameters())
    ctx.close()
    return wrong


def test_checkpoints_go_from_torchs_styles_to_these_and_back(call: Callable[..., Any], tmp_path: Path) -> None:
    assert call(exchange_checkpoints, tmp_path) == [[]] * 4


class Scaled(nn.Linear):
    """With a forward of its own, as of an adapter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def cut_all(rank: int, world_size: int) -> list[str]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with parallelized(model, {"*": ColwiseParallel(output_layouts=Replicate())}):
        return [type(one).__name__ for one in model]


def test_a_pattern_is_of_what_is_in_a_model(call: Callable[..., Any]) -> None:
    assert call(cut_all) == [["ColumnParallelLinear"] * 2] * 4


def give_other_tokens(rank: int, world_size: int) -> tuple[tuple[str, str], bool]:
    """Give each rank of a mesh another number of tokens, then all the same."""
    model = nn.Sequential(nn.Embedding(16, WIDTH), Block())
    layers = {"1.gate": ColwiseParallel(), "1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    with mock.patch.dict(os.environ, IRIS_DEBUG="1"):
        ctx = parallelized(model, {"0": torchs.RowwiseParallel(input_layouts=Replicate()), **layers})
    error = raised(model, torch.zeros(1, 2 + mesh()["tp"].get_local_rank(), dtype=torch.long))
    output = model(torch.zeros(1, 3, dtype=torch.long))
    ctx.close()
    return error, output.shape == (1, 3, WIDTH)


def test_in_debug_mode_ranks_with_other_inputs_are_told(call: Callable[..., Any]) -> None:
    """Ahead of an embedding by torch, which gloo ends the process for."""
    for (kind, message), is_right in call(give_other_tokens):
        assert kind == "ValueError"
        for said in ("the sizes of the inputs of Sequential", "[1, 2]", "[1, 3]"):
            assert said in message
        assert is_right


def draw_again(rank: int, world_size: int) -> bool:
    """Return whether new parameters of a layer that two ranks have alike are those of the whole one."""
    model = nn.Sequential(nn.Linear(WIDTH, 4)).to(device())
    with parallelize(model, mesh()["tp"], {"0": ColwiseParallel(replicas=2)}, max_tokens=8):
        torch.manual_seed(1)
        model[0].reset_parameters()
        torch.manual_seed(1)
        expected = nn.Linear(WIDTH, 4)
        own = [model[0].weight.to_local().cpu(), model[0].bias.to_local().cpu()]
        return all(map(torch.equal, own, [expected.weight, expected.bias]))


def test_new_parameters_are_the_same_on_replicas(call: Callable[..., Any]) -> None:
    assert call(draw_again) == [True] * 4


class Mlp(Block):
    """One without a residual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """An MLP, a module of its own, beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Checkpointed(nn.Module):
    """Two layers between which sequences are sharded, of which only x is kept for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([Layer(), Layer()]), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.norm(x)


def decode_between(rank: int, world_size: int) -> list[float]:
    """Return how far gradients are from one process's, with a step of one token ahead of the backward pass."""
    torch.manual_seed(0)
    whole = Checkpointed().to(device())
    model, grads, given = copy.deepcopy(whole), [], torch.randn(1, TOKENS, WIDTH, device=device())
    of_layers = {name.replace("*", "layers.*.mlp"): style for name, style in plan().items()}
    with parallelized(model, {**of_layers, "": ShardSequences()}):
        for one in (whole, model):
            x = given.clone().requires_grad_()
            output = one(x)
            with torch.no_grad():
                one(x[:, :1])
            output.square().sum().backward()
            assert x.grad is not None
            grads.append(x.grad)
        return far(grads[1:], grads[:1])


def test_a_step_of_one_token_may_come_before_the_backward_pass(call: Callable[..., Any]) -> None:
    assert call(decode_between) == [[]] * 4


def refuse(rank: int, world_size: int) -> list[tuple[str, str]]:
    tp, cut, cut_by_torch, scaled = mesh()["tp"], blocks(), blocks(), blocks()
    scaled[1].down = Scaled(4 * WIDTH, WIDTH)
    torchs.parallelize_module(cut_by_torch, tp, {"1.up": torchs.ColwiseParallel()})
    with parallelized(cut, plan()):
        again = raised(parallelize, cut, tp, plan(), max_tokens=8)
    messages = [
        again,
        raised(parallelize, cut_by_torch, tp, plan(), max_tokens=8),
        raised(parallelize, scaled, tp, plan(), max_tokens=8),
        raised(parallelize, blocks(), mesh(), plan(), max_tokens=8),
        raised(parallelize, blocks(), tp, max_tokens=8),
        raised(parallelize, blocks(), tp, {"*.up": torchs.ColwiseParallel()}, max_tokens=8),
        raised(parallelize, blocks(), tp, plan(), max_tokens=0),
        raised(torchs.parallelize_module, blocks(), tp, plan()),
        raised(parallelize, blocks(), tp, {"*.up": ColwiseParallel(replicas=3)}, max_tokens=8),
        raised(ColwiseParallel, output_layouts=Replicate(), replicas=2),
        raised(parallelize, scaled, tp, {"0.up": ColwiseParallel(), "*.up": ColwiseParallel()}, max_tokens=8),
        raised(parallelize, blocks(), tp, {"*.up": ColwiseParallel(quantize=True)}, max_tokens=8),
        raised(parallelize, scaled, tp, {"0.up": ColwiseParallel()}, max_tokens=2.5),
    ]
    assert not any(isinstance(one, DTensor) for one in scaled.parameters())  # as it was
    iris(1 << 20, "cpu").close()  # which a process with an open context is refused
    return messages


def test_what_cannot_be_cut_is_refused(call: Callable[..., Any]) -> None:
    parts = [
        "0.gate: a layer is a ColumnParallelLinear that is cut already",
        "1.up: a layer is a Linear that is cut already, as by tp_plan=",
        "1.down: a layer is a Scaled, with a forward of its own",
        'it takes one of a single dimension, such as mesh["tp"]',
        "Sequential has no tp_plan",
        "no style of iris_tensor_parallel in the plan is for a linear layer of this Sequential",
        "max_tokens is 0",
        "has no context",
        "replicas is 3; it must divide the 2 ranks, and what is left of them the 32 output features",
        "replicas is 2; it takes a positive number, and 1 with output_layouts=Replicate()",
        "0.up is in the plan twice",
        "quantize is True; it takes Float8(...), or None",
        "max_tokens is 2.5; it takes a positive integer",
    ]
    for errors in call(refuse):
        for (kind, message), part in zip(errors, parts, strict=True):
            assert kind == "ValueError"
            assert part in message, message
