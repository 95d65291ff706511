"""Models of transformers, cut by their own plans, heads of keys replicated where ranks are more."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from decoders import decoder, off, step, tokens
from layers import far
from meshes import mesh, row_of_ranks, whole
from ranks import raised
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torchs

from iris_tensor_parallel import heap_bytes, parallelize, plan_of
from iris_tensor_parallel.styles import ColwiseParallel, RowwiseParallel
from iris_tensor_parallel.tp_plan import DivideGroups

WIDTH = 8
LLAMAS = {"Llama-3-8B": (4096, 14336, 32), "Llama-3-70B": (8192, 28672, 64)}  # width, features, heads
MOST = 1 << 14  # tokens that there is room for


def follow_a_plan(rank: int, world_size: int, kind: str, is_tied: bool) -> tuple[float, float, int]:
    """Cut a model by its own plan; return how far a step is from one in fp64, beside torch's styles, and the heap."""
    exact = step(decoder(kind, is_tied=is_tied).double())
    ours, torchs_own = decoder(kind, is_tied=is_tied), decoder(kind, is_tied=is_tied)
    ctx = parallelize(ours, mesh()["tp"], max_tokens=MOST, gradients=True)
    known = {
        "colwise": torchs.ColwiseParallel(),
        "rowwise": torchs.RowwiseParallel(),
        "colwise_gather_output": torchs.ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": torchs.RowwiseParallel(input_layouts=Replicate()),
    }
    others = {path: style for path, style in plan_of(ours, 2).items() if ours.tp_plan[path] not in known}
    torchs.parallelize_module(
        torchs_own, mesh()["tp"], {path: known.get(name) or others[path] for path, name in ours.tp_plan.items()}
    )
    if is_tied:
        torchs_own.tie_weights()
    far_off = [off(step(model), exact) for model in (ours, torchs_own)]
    used = ctx.heap.allocator.used_bytes
    ctx.close()
    return far_off[0], far_off[1], used


@pytest.mark.parametrize(("kind", "is_tied"), [("Llama", False), ("Llama", True), ("Qwen3", False)])
def test_a_model_is_cut_by_its_own_plan(call: Callable[..., Any], kind: str, is_tied: bool) -> None:
    pytest.importorskip("transformers")
    model = decoder(kind)
    least, most = (heap_bytes(model, plan_of(model, 2), m, world_size=2, gradients=True) for m in (1, MOST))
    for ours, torchs_own, used in call(follow_a_plan, kind, is_tied):
        assert ours < max(2 * torchs_own, 1e-6)
        assert torchs_own < 1e-5
        assert used < most - least < 4 * used


def tie_what_is_cut_differently(rank: int, world_size: int) -> tuple[float, tuple[str, str]]:
    """Cut a tied embedding and leave the head whole: how far logits are from one process's, and what training gets."""
    expected = decoder("Llama", is_tied=True)(tokens(2, 6)).logits
    models = [decoder("Llama", is_tied=True) for _ in range(2)]
    plan = plan_of(models[0], 2)
    del plan["lm_head"]
    with parallelize(models[0], mesh()["tp"], plan, max_tokens=12), torch.no_grad():
        far_off = off([models[0](tokens(2, 6)).logits], [expected])
    return far_off, raised(parallelize, models[1], mesh()["tp"], plan, max_tokens=12, gradients=True)


def test_tied_weights_that_are_cut_differently_are_not_trained(call: Callable[..., Any]) -> None:
    pytest.importorskip("transformers")
    for far_off, (kind, message) in call(tie_what_is_cut_differently):
        assert far_off < 1e-5
        assert kind == "ValueError"
        assert re.match(r"model.embed_tokens.weight and lm_head.weight are tied.*Shard\(dim=0\).*whole", message)


def test_the_heads_output_is_most_of_the_heap() -> None:
    """docs/tensor_parallel.md has a table of them, for 8192 tokens."""
    page = (Path(__file__).parents[2] / "docs/tensor_parallel.md").read_text()
    rows = re.findall(r"^\| (Llama-3-\w+) \| (\d) \| ([\d.,| ]+) \|$", page, re.MULTILINE)
    assert [(name, ranks) for name, ranks, _ in rows] == list(itertools.product(LLAMAS, "248"))
    for name, ranks, shown in rows:
        model, found = llama(name), []
        for sharded, gradients in ((False, False), (True, False), (True, True)):
            with_head = plan_of(model, int(ranks), sequence_parallel=sharded)
            without = {**with_head, "lm_head": torchs.ColwiseParallel(output_layouts=Replicate())}
            for plan in (with_head, without):
                needed = heap_bytes(model, plan, 8192, world_size=int(ranks), gradients=gradients)
                found.append(f"{needed / 2**30:.1f}")
        assert re.findall(r"[\d.]+", shown) == found, name
    model = llama("Llama-3-70B")
    assert f"{heap_bytes(model, plan_of(model, 2), 512, world_size=2) / 2**30:.1f}" == "0.5"


def llama(name: str) -> Any:
    """A layer and the head of a model, without memory."""
    transformers = pytest.importorskip("transformers")
    width, features, heads = LLAMAS[name]
    sizes = {"hidden_size": width, "intermediate_size": features, "num_hidden_layers": 1, "vocab_size": 128256}
    with torch.device("meta"):
        config = transformers.LlamaConfig(num_attention_heads=heads, num_key_value_heads=8, **sizes)
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def replicate(rank: int, world_size: int, kind: str, keys: int, folder: Path) -> Any:
    """Cut a model of fewer heads of keys than ranks; exchange checkpoints with torch's styles on two ranks.

    Returns:
        How far a step is from one in fp64; the heads of a rank's keys; what differs in the checkpoints.
    """
    exact, ours = step(decoder(kind, keys=keys).double()), decoder(kind, keys=keys)
    ctx = parallelize(ours, row_of_ranks(), max_tokens=12, gradients=True)
    far_off = off(step(ours), exact)
    heads = ours.model.layers[0].self_attn.k_proj.weight.to_local().shape[0] / 4
    torchs_own = decoder(kind, keys=keys)
    plan = {path: torchs.ColwiseParallel() for path, name in ours.tp_plan.items() if name == "colwise"}
    torchs.parallelize_module(torchs_own, mesh()["tp"], plan if keys > 1 else {})
    wrong = []
    for number, (saved, loaded) in enumerate([(ours, torchs_own), (torchs_own, ours)]):
        is_ours, tp = saved is ours, mesh()["tp"].get_group()
        where = str(folder / f"{number}-{0 if is_ours else mesh()['dp'].get_local_rank()}")
        dcp.save(saved.state_dict(), checkpoint_id=where, process_group=None if is_ours else tp)
        dist.barrier()
        with torch.no_grad():
            for one in loaded.parameters():
                one.zero_()
        state = loaded.state_dict()
        dcp.load(state, checkpoint_id=str(folder / f"{number}-0"))
        loaded.load_state_dict(state)
        expected = decoder(kind, keys=keys).parameters()
        wrong += far([whole(one) for one in loaded.parameters()], expected)
    wrong += far([step(ours)[0]], [exact[0]])
    ctx.close()
    return far_off, heads, wrong


@pytest.mark.parametrize(("kind", "keys"), [("Llama", 2), ("Llama", 1), ("Qwen3", 2)])
def test_heads_of_keys_are_replicated_where_ranks_are_more(
    call: Callable[..., Any], kind: str, keys: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    for far_off, heads, wrong in call(replicate, kind, keys, tmp_path):
        assert far_off < 1e-5
        assert heads == 1
        assert wrong == []


class Queries(nn.Module):
    """Four heads of queries, two of keys; x is (tokens, width)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.o_proj = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 8), nn.Linear(16, WIDTH)
        self.num_key_value_groups = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.k_proj(x).unflatten(-1, (-1, 4)).repeat_interleave(self.num_key_value_groups, -2).flatten(-2)
        return self.o_proj(self.q_proj(x) * keys)


def replicate_shared(rank: int, world_size: int, compile_it: bool) -> Any:
    """Cut queries and fewer keys, which gather x once; return what is far from one process's."""
    whole_one, model, x = Queries(), Queries(), torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    column = {"input_layouts": Shard(0)}
    plan = {
        "q_proj": ColwiseParallel(**column),
        "k_proj": ColwiseParallel(**column, replicas=2),
        "o_proj": RowwiseParallel(output_layouts=Shard(0)),
        "": DivideGroups(2),
    }
    ctx = parallelize(model, row_of_ranks(), plan, max_tokens=8, gradients=True)
    assert model.k_proj.shared is not None
    expected = whole_one(x)
    expected.square().sum().backward()
    output = (torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model)(x.chunk(4)[rank])
    output.square().sum().backward()
    wrong = far([output], [expected.chunk(4)[rank]])
    wrong += far([whole(one.grad) for one in model.parameters()], [one.grad for one in whole_one.parameters()])
    ctx.close()
    return wrong


@pytest.mark.parametrize("compile_it", [False, True])
def test_replicated_heads_share_a_gather(call: Callable[..., Any], compile_it: bool) -> None:
    assert call(replicate_shared, compile_it) == [[]] * 4


def test_heads_that_cannot_be_cut_are_refused() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="num_attention_heads is 4, which cannot be cut for 3 ranks"):
        plan_of(decoder("Llama"), 3)
    model = decoder("Llama")
    model.config.num_key_value_heads = 3
    with pytest.raises(ValueError, match="num_key_value_heads is 3, which can be neither cut nor replicated for 4"):
        plan_of(model, 4)
    model = decoder("Llama")
    model._tp_plan = {"lm_head": "colwise"}
    with pytest.raises(ValueError, match="2 ranks for each head of keys and values, and the tp_plan has no k_proj"):
        plan_of(model, 4)
    model._tp_plan = {"lm_head": "packed_colwise"}
    with pytest.raises(ValueError, match=r"\{'lm_head': 'packed_colwise'\}; give some"):
        plan_of(model, 2)
    style = torchs.ColwiseParallel()
    assert plan_of(model, 2, others={"packed_colwise": style}) == {"lm_head": style}
