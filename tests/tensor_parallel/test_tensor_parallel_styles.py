"""Our styles beside torch's own: the same plans, parameters, outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import SIZES, draw, far, released, whole_pair
from ranks import Ranks, context, raised
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as theirs
from torch.nn.utils.parametrizations import weight_norm

from iris_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from iris_tensor_parallel import styles as ours

PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # keywords of the two styles
    "replicated": ({}, {}),
    "sequence": ({"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}),
    "tokens": ({"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}),
    "dtensors": ({"input_layouts": Shard(0)}, {"output_layouts": Shard(0), "use_local_output": False}),
    "redistributed": ({}, {"use_local_output": False}),
    "head": ({"input_layouts": Shard(1), "output_layouts": Replicate()}, {"input_layouts": Replicate()}),
    "elsewhere": ({"output_layouts": Shard(0)}, {"input_layouts": Shard(0), "output_layouts": Shard(-1)}),
}


class Scaled(nn.Linear):
    """As the layers of a library are that adds to `torch.nn.Linear` and leaves its forward."""

    scale = 2.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self(x)


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def model() -> nn.Module:
    up, down = whole_pair()
    return nn.ModuleDict({"up": up, "mlp": nn.ModuleDict({"down": down})})


@released
def follow(rank: int, world_size: int, name: str) -> Any:
    """Apply one plan with both kinds of styles, take a step; return what differs."""
    mesh = ours.mesh_of(context())
    column, row = PLANS[name]
    x = draw(0, 2 * world_size, world_size, SIZES[0])
    into, placements, found = column.get("input_layouts"), [], []
    if name == "redistributed":  # as the plan does not have it: cut where all tokens are taken
        x = x.chunk(world_size)[rank]
    x = x.chunk(world_size, into.dim)[rank].contiguous() if into else x
    for styles, first in ((ours, (context(),)), (theirs, ())):
        layers: Any = model()
        plan = {"up": styles.ColwiseParallel(*first, **column), "mlp.*": styles.RowwiseParallel(*first, **row)}
        assert theirs.parallelize_module(layers, mesh, plan) is layers
        leaf = x.clone().requires_grad_()
        is_given_whole = name in ("dtensors", "redistributed")
        given = DTensor.from_local(leaf, mesh, [Shard(0)], run_check=False) if is_given_whole else leaf
        output = layers["mlp"]["down"](torch.relu(layers["up"](given)))
        output.square().sum().backward()
        torch.optim.AdamW(layers.parameters(), lr=0.1).step()
        is_whole = isinstance(output, DTensor)
        placements.append([f"{output.placements} {tuple(output.shape)}" if is_whole else "local"])
        for key, one in layers.named_parameters():
            placements[-1].append(f"{key} {one.placements} {one.grad.placements}")
        output = output.full_tensor() if is_whole else output
        found.append([output, leaf.grad, *[one.full_tensor() for one in layers.parameters()]])
        found[-1] += [one.grad.full_tensor() for one in layers.parameters()]
        if styles is ours:
            made = [type(layers["up"]), type(layers["mlp"]["down"])]
    return far(*found), placements[0] == placements[1], made == [ColumnParallelLinear, RowParallelLinear]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.usefixtures("gpu_a_rank")
def test_styles_do_what_torchs_do(ranks: Callable[[int], Ranks], name: str) -> None:
    assert ranks(2).call(follow, name) == [([], True, True)] * 2


@released
def add_dtensors(rank: int, world_size: int) -> Any:
    """Return how far a layer's sum with a residual, and that normed, are from the whole one's, given by name or not."""
    mesh, whole = ours.mesh_of(context()), whole_pair()[1]
    style = ours.RowwiseParallel(context(), output_layouts=Shard(0), use_local_output=False)
    layer: Any = theirs.parallelize_module(copy.deepcopy(whole), mesh, style)
    x, residual, weight = draw(0, 4, SIZES[1]), draw(1, 4, SIZES[2]), draw(2, SIZES[2])
    given = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(residual, mesh, [Shard(0)])
    added = whole(x) + residual
    expected = [added, added, nn.functional.rms_norm(added, weight.shape, weight, 1e-6)]
    with torch.no_grad():
        normed, output = layer(x=given[0], residual=given[1], norm_weight=weight)
        found = [layer(*given), output, normed]
    return far([one.full_tensor() for one in found], expected), [str(one.placements) for one in found]


@pytest.mark.parametrize("device", ["cpu"])
def test_residuals_are_dtensors_and_names_are_taken(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(add_dtensors) == [([], ["(Shard(dim=0),)"] * 3)] * 2


@released
def cut_unevenly(rank: int, world_size: int) -> Any:
    """Features and tokens of which ranks have different numbers, as DTensors: a loss over all of them."""
    mesh, target = ours.mesh_of(context()), torch.randint(SIZES[1], (9,), generator=torch.Generator().manual_seed(0))
    target = target.to(context().get_device())
    found = []
    for styles, first in ((ours, (context(),)), (theirs, ())):
        style = styles.ColwiseParallel(*first, input_layouts=Shard(0), use_local_output=False)
        layer = theirs.parallelize_module(whole_pair()[0], mesh, style)
        x = distribute_tensor(draw(0, 9, SIZES[0]), mesh, [Shard(0)]).requires_grad_()
        output = layer(x)
        with theirs.loss_parallel():
            loss = torch.nn.functional.cross_entropy(output, target)
            loss.backward()
        assert tuple(output.shape) == (9, SIZES[1])
        whole = [loss, output, x.grad, *[one.grad for one in layer.parameters()]]
        found.append([one.full_tensor().detach() for one in whole])
    return far(*found)


@pytest.mark.parametrize("device", ["cpu"])
def test_parts_of_different_sizes_are_known_to_be(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(4).call(cut_unevenly) == [[]] * 4


@released
def begin_on_meta(rank: int, world_size: int) -> Any:
    """Make a model without memory, cut it, and draw its parameters then, as large ones are made."""
    mesh = ours.mesh_of(context())
    with torch.device("meta"):
        layers: Any = nn.ModuleDict({"up": nn.Linear(*SIZES[:2]), "down": nn.Linear(*SIZES[1:])})
    layers["down"].weight.requires_grad_(False)
    plan = {"up": ours.ColwiseParallel(context()), "down": ours.RowwiseParallel(context())}
    theirs.parallelize_module(layers, mesh, plan, src_data_rank=None)
    layers.to_empty(device=context().get_device())
    torch.manual_seed(0)
    for one in layers.modules():
        if isinstance(one, nn.Linear):
            one.reset_parameters()
    found = [one.full_tensor() for one in layers.parameters()]
    expected = [one for whole in whole_pair() for one in whole.parameters()]
    return far(found, expected), [one.requires_grad for one in layers.parameters()]


@pytest.mark.usefixtures("gpu_a_rank")
def test_a_model_may_be_cut_before_it_has_memory(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(begin_on_meta) == [([], [True, True, False, True])] * 2


@released
def gather(rank: int, world_size: int) -> Any:
    mesh, whole = ours.mesh_of(context()), whole_pair()[0]
    x = draw(0, 4, SIZES[0])
    expected = whole(x)
    layer: Any = theirs.parallelize_module(
        whole, mesh, ours.ColwiseParallel(context(), output_layouts=Replicate(), variant="bulk_synchronous")
    )
    return far([layer(x)], [expected]), layer.sharding.gather_output, layer.sharding.variant, str(layer.bias.placements)


@pytest.mark.usefixtures("gpu_a_rank")
def test_a_style_may_gather_the_output(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(gather) == [([], True, "bulk_synchronous", "(Shard(dim=0),)")] * 2


@released
def cut_a_subclass(rank: int, world_size: int) -> Any:
    """Layers of a class of their own, cut by a style and by hand; return what differs, and what is so of them."""
    torch.manual_seed(0)
    whole = Scaled(*SIZES[:2], device=context().get_device())
    x = draw(0, 4, SIZES[0])
    expected = whole.scaled(x).chunk(world_size, -1)[rank]
    by_hand = ColumnParallelLinear.from_linear(context(), whole)
    layer: Any = theirs.parallelize_module(whole, ours.mesh_of(context()), ours.ColwiseParallel(context()))
    again = copy.deepcopy(layer)
    wrong = far([layer.scaled(x), 2 * by_hand(x), again.scaled(x)], [expected] * 3)
    return wrong, [isinstance(layer, one) for one in (ColumnParallelLinear, Scaled)], type(layer) is type(again)


@pytest.mark.usefixtures("gpu_a_rank")
def test_a_subclass_stays_what_it_is(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(cut_a_subclass) == [([], [True, True], True)] * 2


@released
def refuse(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    mesh = ours.mesh_of(ctx)
    square = DeviceMesh(mesh.device_type, torch.arange(world_size).view(1, world_size))
    style = ours.ColwiseParallel(ctx)
    of_last: Any = theirs.parallelize_module(nn.Linear(4, 4), mesh, ours.RowwiseParallel(ctx, output_layouts=Shard(2)))
    return [
        raised(of_last, draw(0, 1, 3, 2)),
        raised(theirs.parallelize_module, nn.Embedding(4, 4), mesh, style),
        raised(theirs.parallelize_module, Own(4, 4), mesh, style),
        raised(theirs.parallelize_module, weight_norm(nn.Linear(4, 4)), mesh, style),
        raised(style._apply, whole_pair()[0], square),
        raised(style._apply, whole_pair()[0], DeviceMesh(mesh.device_type, [1, 0])),
    ]


@pytest.mark.parametrize("device", ["cpu"])
def test_what_cannot_be_cut_is_refused(ranks: Callable[[int], Ranks]) -> None:
    parts = [
        "sequence_dim is 2; of x (1, 3, 2) it must be one of tokens, before the last (Shard(-1) in a style)",
        "use_local_output=True): a layer is a Embedding; it must be a torch.nn.Linear",
        "a layer is a Own, with a forward of its own",
        "a layer is a ParametrizedLinear whose weight is computed from other parameters",
        "takes a mesh of the context's ranks, [0, 1]",
        "takes a mesh of the context's ranks, [0, 1]",
    ]
    for errors in ranks(2).call(refuse):
        for (kind, message), part in zip(errors, parts, strict=True):
            assert kind == "ValueError"
            assert part in message, message


class Between(nn.Module):
    """Layers of ours between torch's: an embedding, of which a collective fills what they read, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, SIZES[0]), nn.Linear(SIZES[2], 8)
        self.up, self.down = whole_pair()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(self.embedding(tokens)))))


@released
def stand_between(rank: int, world_size: int, batch: int, layout: Any) -> list[str]:
    """Train a step of ours between torch's styles; return how far it, and a step without gradients, are from whole."""
    torch.manual_seed(1)
    whole, mesh = Between(), ours.mesh_of(context())
    plan = {
        "embedding": theirs.RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
        "up": ours.ColwiseParallel(context(), input_layouts=layout),
        "down": ours.RowwiseParallel(context(), output_layouts=layout),
        "head": theirs.ColwiseParallel(input_layouts=layout, output_layouts=Replicate()),
    }
    cut: Any = theirs.parallelize_module(copy.deepcopy(whole), mesh, plan)
    tokens = torch.arange(batch * 4 * world_size).view(batch, -1) % 16
    expected = whole(tokens)
    with torch.no_grad():
        wrong = far([cut(tokens), cut(tokens)], [expected] * 2)  # the second one's checks are the first one's
    for model in (whole, cut):
        model(tokens).square().sum().backward()
    gradients = [one.grad.full_tensor() for one in cut.parameters()]
    return wrong + far(gradients, [one.grad for one in whole.parameters()])


@pytest.mark.parametrize("layout", [Shard(1), Replicate()], ids=["sequences", "all tokens"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("device", ["cpu"])
def test_our_styles_stand_between_torchs(ranks: Callable[[int], Ranks], batch: int, layout: Any) -> None:
    assert ranks(2).call(stand_between, batch, layout) == [[]] * 2


@released
def call_by_name(rank: int, world_size: int) -> Any:
    layer: Any = theirs.parallelize_module(whole_pair()[0], ours.mesh_of(context()), ours.ColwiseParallel(context()))
    x = draw(0, 4, SIZES[0])
    return far([layer(input=x), layer(x=x)], [layer(x)] * 2), raised(layer)


@pytest.mark.parametrize("device", ["cpu"])
def test_x_may_be_given_by_the_name_that_torch_has_for_it(ranks: Callable[[int], Ranks]) -> None:
    for wrong, error in ranks(2).call(call_by_name):
        assert wrong == []
        assert "missing 1 required positional argument: 'x'" in error[1]
