"""Functional collectives beside matrix products, fused by a pass over the graphs of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fusing import FAMILIES, GATHER, REDUCE, SCATTER, Graphs, backend, fusing, gather, logged, reduce, run, scatter
from layers import draw, far, released
from ranks import Ranks, context, raised
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch_compiling import if_it_compiles

from iris_tensor_parallel import fuse_collectives
from iris_tensor_parallel.graph import fuse_pass
from overlap_taxonomy import Choice, get_variant

on_cpu = pytest.mark.parametrize("device", ["cpu"])
if_gathers_are_traced = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="Dynamo of torch 2.11 traces no functional all-gather along another dimension than the first",
)
_ALONG_ANOTHER = (
    *("gather_along_the_second", "gather_of_one_sequence", "gather_and_bias", "gather_that_is_used", "pair"),
    "features",
)


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Return the parametrisation by these functions, those skipped that torch does not trace."""
    marks = dict.fromkeys(_ALONG_ANOTHER, if_gathers_are_traced)
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks.get(name, ())) for name in names])


def product_and_gathered(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    whole = gather(x, 1)
    return whole @ w, whole.sum(0), whole


# What is replaced: a function of x and two weights, and x's shape.
REPLACED: dict[str, tuple[Callable[..., Any], tuple[int, ...], list[str]]] = {
    "gather": (lambda x, w, v: gather(x) @ w, (4, 6), [GATHER]),
    "gather_of_three_dimensions": (lambda x, w, v: gather(x) @ w, (4, 3, 6), [GATHER]),
    "gather_along_the_second": (lambda x, w, v: gather(x, 1) @ w, (3, 4, 6), [GATHER]),
    "gather_of_one_sequence": (lambda x, w, v: gather(x, 1) @ w, (1, 4, 6), [GATHER]),
    "gather_and_bias": (lambda x, w, v: nn.functional.linear(gather(x, 1), w.t(), v[:, 0]), (3, 4, 6), [GATHER]),
    "gather_and_matrix": (lambda x, w, v: torch.addmm(v[:, :1].t(), gather(x), w), (4, 6), [GATHER]),
    "gather_before_b_is_made": (lambda x, w, v: gather(x) @ (w * 2), (4, 6), [GATHER]),
    "gather_that_is_used": (product_and_gathered, (3, 4, 6), [GATHER]),
    "scatter": (lambda x, w, v: scatter(x @ w), (4, 6), [SCATTER]),
    "scatter_of_three_dimensions": (lambda x, w, v: scatter(x @ w), (4, 3, 6), [SCATTER]),
    "scatter_along_the_second": (lambda x, w, v: scatter(x @ w, 1), (3, 4, 6), [SCATTER]),
    "reduce": (lambda x, w, v: reduce(x @ w), (3, 6), [REDUCE]),
    "reduce_of_three_dimensions": (lambda x, w, v: reduce(x @ w), (2, 3, 6), [REDUCE]),
    "reduce_of_a_view": (lambda x, w, v: reduce((x @ w).view(2, x.shape[0] // 2, -1)), (4, 6), [REDUCE]),
    "pair": (lambda x, w, v: scatter(torch.relu(gather(x, 1) @ w) @ v, 1), (3, 4, 6), [GATHER, SCATTER]),
}


@released
def replace(rank: int, world_size: int, name: str) -> Any:
    fn, shape, _ = REPLACED[name]
    return run(fn, *(draw(2 * rank + seed, *shape) for seed, shape in enumerate((shape, (6, 8), (8, 6)))))


@on_cpu
@each(REPLACED)
def test_a_product_beside_a_collective_is_fused(ranks: Callable[[int], Ranks], name: str) -> None:
    for wrong, graphs, messages in ranks(2).call(replace, name):
        assert (wrong, graphs) == ([], [REPLACED[name][2]])
        replaced = [message.rsplit(" ", 1)[1] for message in messages if message.startswith("replaced")]
        assert replaced == REPLACED[name][2]


@released
def replace_widest(rank: int, world_size: int) -> Any:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        whole = gather(x)
        return whole @ w[:, :2], whole @ w, whole @ w[:, 2:], whole

    return run(fn, draw(rank, 4, 6), draw(7, 6, 8))


@on_cpu
def test_a_gather_is_fused_with_the_widest_product_and_kept_for_the_others(ranks: Callable[[int], Ranks]) -> None:
    for wrong, graphs, messages in ranks(2).call(replace_widest):
        assert (wrong, graphs) == ([], [[GATHER]])
        assert "(4, 6) by (6, 8)" in messages[0]
        assert [message.partition(": it multiplies the A that ")[1] != "" for message in messages] == [
            False,
            True,
            True,
        ]


def used_twice(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    product = x @ w
    return reduce(product), product * 2


def multiplied_by_itself(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    whole = gather(x)
    return whole @ whole.t()


def two_parts_of_four(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    parts = (x @ w).view(1, 4, -1).split(1, 1)
    return scatter(torch.cat(parts[:2], 0))


# What is kept: a function, options, x's dtype, and why.
KEPT: dict[str, tuple[Callable[..., Any], dict[str, Any], torch.dtype, str]] = {
    "few_rows": (lambda x, w: gather(x) @ w, {"min_tokens": 9}, torch.float32, "8 rows are fewer than 9"),
    "dtype": (lambda x, w: gather(x) @ w, {}, torch.float64, "dtype torch.float64 is not supported"),
    "features": (lambda x, w: gather(x, 1) @ torch.cat([w, w]), {}, torch.float32, "along the last of 2 dimensions"),
    "scattered_features": (lambda x, w: scatter(x @ w, 1), {}, torch.float32, "along the last of 2 dimensions"),
    "no_product": (lambda x, w: gather(x) + 1, {}, torch.float32, "no matrix product has what it gathers as A"),
    "weight": (lambda x, w: x.t() @ gather(w)[:4], {}, torch.float32, "no matrix product has what it gathers as A"),
    "itself": (multiplied_by_itself, {}, torch.float32, "B depends on what it gathers"),
    "used": (used_twice, {}, torch.float32, "it sums no product that is used here alone"),
    "largest": (lambda x, w: reduce(x @ w, "max"), {}, torch.float32, "it reduces by max, not by sum"),
    "bias": (lambda x, w: reduce(torch.addmm(w[0], x, w)), {}, torch.float32, "each rank adds a bias before the sum"),
    "view": (lambda x, w: reduce((x @ w).view(2, -1)), {}, torch.float32, "a view to (2, 16) changes the features"),
    "alpha": (lambda x, w: torch.addmm(w[0], gather(x), w, alpha=2), {}, torch.float32, "its alpha is 2"),
    "parts": (two_parts_of_four, {}, torch.float32, "it takes 2 of 4 parts"),
    "beta": (lambda x, w: torch.addmm(w[0], gather(x), w, beta=0.5), {}, torch.float32, "its beta is 0.5"),
}


@released
def keep(rank: int, world_size: int, name: str) -> Any:
    fn, options, dtype, _ = KEPT[name]
    return run(fn, draw(rank, 4, 6).to(dtype), draw(rank + 2, 6, 8).to(dtype), **options)


@on_cpu
@each(KEPT)
def test_what_is_not_fused_is_logged(ranks: Callable[[int], Ranks], name: str) -> None:
    for wrong, graphs, messages in ranks(2).call(keep, name):
        assert wrong == []
        assert not any(name in FAMILIES for graph in graphs for name in graph)
        (message,) = messages
        assert message.startswith("kept ")
        assert KEPT[name][3] in message


@released
def keep_of_another_group(rank: int, world_size: int) -> Any:
    """Fuse those of one of two groups of the same ranks, then those of the other."""
    context().process_group()
    other = dist.new_group(list(range(world_size)))
    name = other.group_name

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(x, 0, name) @ w

    inputs = draw(rank, 4, 6), draw(7, 6, 8)
    found = run(fn, *inputs), run(fn, *inputs, group=other)
    dist.destroy_process_group(other)
    return found


@on_cpu
def test_collectives_of_the_group_asked_for_are_fused_and_no_others(ranks: Callable[[int], Ranks]) -> None:
    for (wrong, graphs, messages), named in ranks(2).call(keep_of_another_group):
        assert (wrong, graphs, named[:2]) == ([], [["all_gather_into_tensor"]], ([], [[GATHER]]))
        assert "the context's is" in messages[0]


@released
def ask_auto(rank: int, world_size: int) -> Any:
    """Fuse where `auto` takes the library below 20 rows."""

    def choose(ctx: Any, problem: Any, config: Any, *, alone: bool) -> Choice:
        assert alone  # what is compiled here another rank may have in its cache
        return Choice("library" if problem.m < 20 else "workgroup_specialized:portable", None, "measured")

    def variant(family: str, name: str) -> Any:
        return SimpleNamespace(choose=choose) if name == "auto" else get_variant(family, name)

    fuse_pass.get_variant = variant  # type: ignore[assignment]
    try:
        return [run(REPLACED["reduce"][0], draw(1, rows, 6), draw(2, 6, 8), draw(3, 8, 6)) for rows in (19, 20)]
    finally:
        fuse_pass.get_variant = get_variant


@on_cpu
def test_without_a_number_of_tokens_auto_decides(ranks: Callable[[int], Ranks]) -> None:
    for (_, few, messages), (wrong, many, _) in ranks(2).call(ask_auto):
        assert (few, wrong, many) == ([["all_reduce"]], [], [[REDUCE]])
        assert "for 19 rows auto takes library (measured)" in messages[0]


@released
def change_rows(rank: int, world_size: int, name: str, min_tokens: int) -> Any:
    """Call one graph with several numbers of rows; return what is wrong, and the graphs' ops."""
    fn, (*first, rows, width), _ = REPLACED[name]
    graphs: Graphs = []
    fuse = fusing(min_tokens=min_tokens)
    torch._dynamo.reset()
    one, wrong = torch.compile(fn, backend=backend(fuse, graphs), fullgraph=True, dynamic=False), []
    w, v = draw(1, 6, 8), draw(2, 8, 6)
    with torch.no_grad():
        for number in (rows, 2 * rows, 3 * rows):
            x = draw(rank, *first, number, width)
            torch._dynamo.mark_dynamic(x, len(first))
            found, expected = one(x, w, v), fn(x, w, v)
            wrong += far([found], [expected])
    return wrong, graphs


@on_cpu
@each(["gather", "gather_along_the_second", "scatter_along_the_second", "pair", "reduce", "reduce_of_a_view"])
def test_one_graph_is_fused_for_any_number_of_tokens(ranks: Callable[[int], Ranks], name: str) -> None:
    assert ranks(2).call(change_rows, name, 2) == [([], [REPLACED[name][2]])] * 2


@on_cpu
def test_of_any_number_of_tokens_those_of_the_first_call_decide(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(change_rows, "gather", 9) == [([], [["all_gather_into_tensor"]])] * 2


@released
def compile_for_any_number(rank: int, world_size: int) -> Any:
    """Return what is wrong with a pair as inductor compiles it, with a pass for this context."""
    fn, (batch, rows, width), _ = REPLACED["pair"]
    options = {"post_grad_custom_pre_pass": fusing(), "fx_graph_cache": False}
    torch._dynamo.reset()
    one, wrong = torch.compile(fn, options=options, fullgraph=True, dynamic=False), []
    with torch.no_grad(), logged() as messages:
        for number in (rows, 2 * rows):
            x = draw(rank, batch, number, width)
            torch._dynamo.mark_dynamic(x, 1)
            wrong += far([one(x, draw(1, 6, 8), draw(2, 8, 6))], [fn(x, draw(1, 6, 8), draw(2, 8, 6))])
    return wrong, len(messages)


@on_cpu
@if_it_compiles
@if_gathers_are_traced
def test_a_fused_graph_is_right_as_inductor_compiles_it(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(compile_for_any_number) == [([], 2)] * 2


@released
def identify(rank: int, world_size: int) -> list[str]:
    return [fusing(min_tokens=number).uuid() for number in (1, 1, 2, None)]


@on_cpu
def test_a_compiled_graph_is_found_by_what_the_pass_was_asked(ranks: Callable[[int], Ranks]) -> None:
    for one, again, two, auto in ranks(2).call(identify):
        assert one == again
        assert len({one, two, auto}) == 3


@released
def multiply_uneven(rank: int, world_size: int) -> Any:
    return raised(run, REPLACED["gather"][0], draw(rank, 4, 6), draw(1, 6, 3 + rank), draw(2, 8, 6))


@on_cpu
def test_weights_of_other_sizes_on_other_ranks_are_refused(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(multiply_uneven):
        assert kind == "ValueError"
        assert "must be the same on all ranks" in message


@released
def refuse(rank: int, world_size: int) -> Any:
    ctx = context()
    ctx.process_group()
    alone = dist.new_group([rank], use_local_synchronization=True)
    found = [
        raised(fuse_collectives, None),
        raised(fuse_collectives, ctx, min_tokens=0),
        raised(fuse_collectives, ctx, min_tokens=1.5),
        raised(fuse_collectives, ctx, min_tokens=rank + 1),
        raised(fuse_collectives, ctx, group="tp"),
        raised(fuse_collectives, ctx, group=alone),
    ]
    dist.destroy_process_group(alone)
    return found


@on_cpu
def test_what_cannot_be_fused_is_refused(ranks: Callable[[int], Ranks]) -> None:
    parts = [
        "ctx is a NoneType",
        "min_tokens is 0; it takes a positive number of rows, or None",
        "min_tokens is 1.5",
        "from how many tokens on collectives are fused",
        "group is a str",
        "it must be of the context's, [0, 1], in this order",
    ]
    for errors in ranks(2).call(refuse):
        for (kind, message), part in zip(errors, parts, strict=True):
            assert kind == "ValueError"
            assert part in message, message
