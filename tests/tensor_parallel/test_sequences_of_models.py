"""Models of transformers whose sequences are sharded between their layers, beside one process."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from decoders import decoder, off, step, tokens
from layers import LENGTHS, counted, local_products
from meshes import mesh, row_of_ranks, whole
from ranks import raised
from torch import nn
from torch.distributed.fsdp import fully_shard

from iris_kernels.common.operators import parts
from iris_tensor_parallel import heap_bytes, parallelize, plan_of
from iris_tensor_parallel.sequences import ShardSequences
from iris_tensor_parallel.styles import RowwiseParallel
from iris_tensor_parallel.tp_plan import SumGradients

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
MOST = 64  # tokens that there is room for
ROUNDING = 1e-5  # relative, of fp32 after two layers


def sharded(kind: str, *, gradients: bool = False, keys: int = 2) -> tuple[Any, Any]:
    """Return a model and its context; of fewer keys than four ranks on these, else on two."""
    model, ranks = decoder(kind, keys=keys), mesh()["tp"] if keys > 1 else row_of_ranks()
    ctx = parallelize(model, ranks, max_tokens=MOST, gradients=gradients, sequence_parallel=True)
    return model, ctx


def families(ctx: Any) -> set[str]:
    return {operator.family for operator in ctx.operators.values()}


def train(rank: int, world_size: int, kind: str, keys: int) -> tuple[list[float], set[str]]:
    """Return how far a step is from one in fp64, then one of a copy, and a checkpointed one."""
    exact = step(decoder(kind, keys=keys).double(), sequence=8)
    model, ctx = sharded(kind, gradients=True, keys=keys)
    used = ctx.heap.allocator.used_bytes
    found = [off(step(model, sequence=8), exact)]
    model.zero_grad()
    found.append(off(step(copy.deepcopy(model), sequence=8), exact))
    model.activation_checkpointing_enable()
    found.append(off(step(model.train(), sequence=8), exact))
    assert ctx.heap.allocator.used_bytes == used
    names = families(ctx)
    ctx.close()
    return found, names


@pytest.mark.parametrize(("kind", "keys"), [("Llama", 2), ("Qwen3", 2), ("Llama", 1)])
def test_steps_are_those_of_one_process(call: Callable[..., Any], kind: str, keys: int) -> None:
    for found, names in call(train, kind, keys):
        assert max(found) < ROUNDING
        assert {"all_gather_gemm", "gemm_reduce_scatter"} <= names


def name_variants(rank: int, world_size: int) -> tuple[list[float], set[str]]:
    """Name a variant that only sharded sequences have; return how far both kinds of steps are off, and operators."""
    whole_one, model = decoder("Llama"), decoder("Llama")
    plan = plan_of(model, 2, sequence_parallel=True)
    for path, style in plan.items():
        if isinstance(style, RowwiseParallel) and "layers" in path:
            style.options["variant"] = "producer_consumer:portable"
    with parallelize(model, mesh()["tp"], plan, max_tokens=MOST) as ctx, torch.no_grad():
        given = [tokens(2, length) for length in (8, 7)]
        found = [off([model(one).logits], [whole_one(one).logits]) for one in given]
        return found, {f"{one.family}/{one.variant}" for one in ctx.operators.values()}


def test_a_variant_of_sharded_sequences_is_of_these_alone(call: Callable[..., Any]) -> None:
    for found, called in call(name_variants):
        assert max(found) < ROUNDING
        assert "gemm_reduce_scatter/producer_consumer:portable" in called


def generate(rank: int, world_size: int, sequence: int) -> float:
    """Generate tokens; return how far the logits are from one process's, at most."""
    prompt, options = tokens(2, sequence), {"return_dict_in_generate": True, "output_logits": True}
    options |= {"do_sample": False, "max_new_tokens": 4, "attention_mask": torch.ones_like(prompt)}
    expected = decoder("Llama").generate(prompt, **options)
    model, ctx = sharded("Llama")
    used, called = ctx.heap.allocator.used_bytes, []
    model.model.layers[1].register_forward_pre_hook(lambda module, inputs: called.append(inputs[0].shape[1]))
    found = model.generate(prompt, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert (
        ctx.heap.allocator.used_bytes
        == used
        <= heap_bytes(decoder("Llama"), plan_of(model, 2, sequence_parallel=True), MOST, world_size=2)
    )
    ctx.close()
    assert called == [sequence // 2 if sequence % 2 == 0 else sequence, 1, 1, 1]
    return off(list(found.logits), list(expected.logits))


@pytest.mark.parametrize("sequence", [6, 5])
def test_prompts_of_any_length_are_decoded(call: Callable[..., Any], sequence: int) -> None:
    assert max(call(generate, sequence)) < ROUNDING


def compile_whole(rank: int, world_size: int) -> list[float]:
    """Return how far calls of a compiled model are from one process's: with gradients, then some without."""
    expected, (model, ctx) = decoder("Llama"), sharded("Llama", gradients=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = [off(step(compiled), step(expected))]
    with torch.no_grad():
        for sequence in (1, 4, 5, 8, 3):
            given = tokens(2, sequence)
            found.append(off([compiled(given, use_cache=False).logits], [expected(given).logits]))
    ctx.close()
    return found


def test_a_model_is_compiled_as_a_whole_graph(call: Callable[..., Any]) -> None:
    for found in call(compile_whole):
        assert max(found) < ROUNDING


def count_products(rank: int, world_size: int, compile_it: bool) -> tuple[dict[str, int], list[Any]]:
    """Return the products of a training step of two layers, by family, and those of several weights of one token."""
    model, ctx = sharded("Llama", gradients=True)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
    with counted() as counts:
        step(call)
    with torch.no_grad(), local_products() as several:
        call(tokens(2, 1), use_cache=False)
    ctx.close()
    return dict(counts), several


@pytest.mark.parametrize("compile_it", [False, True])
def test_layers_of_one_x_are_one_product(call: Callable[..., Any], compile_it: bool) -> None:
    """Query, key and value; gate and up; and what comes back of `o` and `down`. The head has all tokens."""
    each = 2 * (2 + 2)  # layers, by what goes forth and back
    for counts, of_one_token in call(count_products, compile_it):
        assert {"all_gather_gemm": each, "gemm_reduce_scatter": each}.items() <= counts.items()
        assert of_one_token == 2 * [(3, 1, 0), (2, 1, 0)]


def count_graphs(rank: int, world_size: int, sequence_parallel: bool) -> tuple[float, int]:
    """Return how far calls of 12 lengths of a compiled model are from one process's, and how many graphs it takes."""
    expected, model = decoder("Llama"), decoder("Llama")
    ctx = parallelize(model, mesh()["tp"], max_tokens=MOST, sequence_parallel=sequence_parallel)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, found = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True), 0.0
    with torch.no_grad():
        for length in LENGTHS:
            given = tokens(2, length)
            found = max(found, off([compiled(given, use_cache=False).logits], [expected(given).logits]))
    ctx.close()
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_twelve_lengths_take_two_graphs_at_most(call: Callable[..., Any], sequence_parallel: bool) -> None:
    for found, graphs in call(count_graphs, sequence_parallel):
        assert found < ROUNDING
        assert graphs <= 2


def train_with_fsdp(rank: int, world_size: int) -> float:
    """Return how far gradients of a step are from one process's, of two replicas of two ranks."""
    gc.collect()
    kept = len(parts._wholes)
    given, expected, (model, ctx) = tokens(4, 6), decoder("Llama"), sharded("Llama", gradients=True)
    assert len(parts._wholes) == kept + 2 * 2  # of each layer's attention, and of its MLP
    for one in (*model.model.layers, model):
        fully_shard(one, mesh=mesh()["dp"])
    gc.collect()
    assert len(parts._wholes) == kept  # what lay together has been replaced
    for one, part in ((expected, given), (model, given.chunk(2)[mesh()["dp"].get_local_rank()])):
        logits = one(part).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), part.flatten()).backward()
    found = off(*([whole(one.grad) for one in each.parameters()] for each in (model, expected)))
    ctx.close()
    return found


def test_gradients_with_fsdp_are_those_of_one_process(call: Callable[..., Any]) -> None:
    assert max(call(train_with_fsdp)) < ROUNDING


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([nn.ReLU()]), nn.Identity()


def refuse(rank: int, world_size: int) -> list[tuple[str, str]]:
    model, ctx = sharded("Llama")
    plan = plan_of(decoder("Llama"), 2, sequence_parallel=True)
    whole_tokens = plan_of(decoder("Llama"), 2) | {"model": ShardSequences()}
    errors = [
        raised(model, tokens(1, 5)),
        raised(model.model.layers[0], torch.zeros(4, 16)),
        raised(parallelize, decoder("Llama"), mesh()["tp"], plan, max_tokens=8, sequence_parallel=True),
        raised(parallelize, decoder("Llama"), mesh()["tp"], whole_tokens, max_tokens=8, ctx=ctx),
        raised(ShardSequences()._apply, Nothing(), mesh()["tp"]),
    ]
    ctx.close()
    return errors


def test_what_cannot_be_sharded_is_refused(call: Callable[..., Any]) -> None:
    parts = [
        "sequences of 5 tokens cannot be cut for 2 ranks, as gradients are to be of them: pad them to a multiple of 2",
        "the layers' input is (4, 16); it must be (batch, tokens, features)",
        "sequence_parallel is of the model's own plan, and a plan is given",
        "with Shard(1), ahead of it in the plan; LlamaModel.layers has ColumnParallelLinear(in_features=16",
        "Nothing.layers has none",
    ]
    for errors in call(refuse):
        for (kind, message), part in zip(errors, parts, strict=True):
            assert kind == "ValueError"
            assert part in message, message


def test_a_model_without_a_head_has_a_plan() -> None:
    plan = plan_of(decoder("Llama").model, 2, sequence_parallel=True)
    assert isinstance(plan[""], ShardSequences)
    assert isinstance(plan["norm"], SumGradients)


def test_layers_that_are_more_than_linear_ones_and_norms_are_refused() -> None:
    mixtral = decoder("Mixtral")
    others = dict.fromkeys(mixtral.tp_plan.values())
    with pytest.raises(ValueError, match=r"model\.layers\.\*\.mlp\.gate, a MixtralTopKRouter, is none of them"):
        plan_of(mixtral, 2, sequence_parallel=True, others=others)
    model = decoder("Llama")
    model._tp_plan = model.tp_plan | {"model.heads.*.up": "colwise"}
    with pytest.raises(ValueError, match=r"has \['model.heads', 'model.layers'\]: write a plan, with ShardSequences"):
        plan_of(model, 2, sequence_parallel=True)
