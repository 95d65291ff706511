"""Matrix products beside a functional collective, as AOTAutograd's graphs have them; found by torch's pattern matcher.

A gather along another dimension than the first is a gather along that, then split and cat; so is a scatter, before
which it is split and cat. DTensor views activations of three dimensions as matrices: before and behind the product.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, Ignored, KeywordArg, ListOf, Match, PatternExpr
from torch.fx import Graph, Node

aten, functional = torch.ops.aten, torch.ops._c10d_functional
ALL_GATHER = functional.all_gather_into_tensor.default
REDUCE_SCATTER = functional.reduce_scatter_tensor.default
ALL_REDUCE = functional.all_reduce.default
_WAIT = functional.wait_tensor.default
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_SPLITS = [aten.split.Tensor, aten.split_with_sizes.default]
_VIEWS = [aten.view.default, aten.reshape.default, aten._unsafe_view.default]


@dataclass(frozen=True)
class Site:
    """A product beside a collective.

    Args:
        match: the nodes of both, and those between.
        collective: the all-gather, reduce-scatter or all-reduce.
        product: the mm or addmm.
        whole: what is gathered, or what is reduced, before it is split: with all dimensions that an activation has.
        results: what the product's sum over the ranks, or the product and what is gathered, take the place of.
    """

    match: Match
    collective: Node
    product: Node
    whole: Node
    results: tuple[Node, ...]

    @property
    def group(self) -> str:
        """The name of the collective's process group."""
        return str(self.collective.args[-1])

    @property
    def dim(self) -> int:
        """Along which dimension of the whole this is."""
        return int(self.match.kwargs.get("dim", 0)) % self.whole.meta["val"].ndim

    @property
    def a(self) -> Any:
        """This rank's shard of A, before it is gathered; else the product's A."""
        return self.collective.args[0] if self.collective.target is ALL_GATHER else self.product.args[-2]

    @property
    def b(self) -> Any:
        """The product's B."""
        return self.product.args[-1]

    @property
    def bias(self) -> list[Any]:
        """What the product adds, if anything."""
        return list(self.product.args[:-2])

    @property
    def others(self) -> list[Any]:
        """The inputs beside A."""
        return [self.b, *self.bias]

    @property
    def sizes(self) -> Any:
        """Of a view of the product, which is reduced; those of symbolic size are nodes."""
        is_viewed = self.collective.target is not ALL_GATHER and self.whole is not self.product
        return self.whole.args[1] if is_viewed else []

    @property
    def parts(self) -> list[Any]:
        """Into which order the whole's parts are brought, where it is not along the first dimension."""
        cat = _node(self.match, aten.cat.default)
        return [] if cat is None else [part.args[1] for part in cat.args[0]]

    @property
    def num_parts(self) -> int:
        """Into how many parts the whole is cut, where it is not along the first dimension; `cat` wants them alike."""
        split = _node(self.match, *_SPLITS)
        return 0 if split is None else len(split.meta["val"])

    def __str__(self) -> str:
        return " and ".join(str(node) for node in self.match.nodes if node in (self.collective, self.product))


def merge_equal(graph: Graph) -> None:
    """Merge equal waits, and what shapes their tensors: torch 2.14 leaves one for each product that reads A."""
    first: dict[str, Node] = {}
    for node in _nodes(graph, _WAIT, operator.getitem, aten.cat.default, *_VIEWS, *_SPLITS):
        shared = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if shared is not node:
            node.replace_all_uses_with(shared)
            graph.erase_node(node)


def gathers(graph: Graph) -> Iterator[list[Site]]:
    """Yield the products that multiply the same gathered A, in the order in which A's are gathered."""
    found: dict[Node, list[Site]] = {}
    for product in _nodes(graph, *_PRODUCTS):
        if match := _first(_OF_GATHERED, product):
            collective, whole = _node(match, ALL_GATHER), _node(match, aten.cat.default) or _node(match, _WAIT)
            found.setdefault(collective, []).append(Site(match, collective, product, whole, (product, whole)))
    yield from (found[node] for node in _nodes(graph, ALL_GATHER) if node in found)


def reductions(graph: Graph) -> Iterator[Site]:
    """Yield the products that are reduced, in the order in which they are."""
    for waited in _nodes(graph, _WAIT):
        if match := _first(_REDUCED, waited):
            collective: Any = waited.args[0]
            split = _node(match, *_SPLITS)
            whole = collective.args[0] if split is None else split.args[0]
            yield Site(match, collective, _node(match, *_PRODUCTS), whole, (waited,))


def _first(patterns: list[PatternExpr], node: Node) -> Match | None:
    """Return the match of the first of some patterns that a node ends."""
    matches = (pattern.match(node) for pattern in patterns)
    return next((match for match in matches if isinstance(match, Match)), None)


def _nodes(graph: Graph, *targets: Any) -> list[Node]:
    """Return the calls of some ops, in order."""
    return [node for node in graph.nodes if node.target in targets]


def _node(match: Match, *targets: Any) -> Any:
    """Return the call of one of some ops; None if there is none."""
    return next((node for node in match.nodes if node.target in targets), None)


# The patterns ---------------------------------------------------------------------------------------------------------


def _viewed(inner: PatternExpr, users: Any) -> PatternExpr:
    return CallFunction(_VIEWS, inner, Ignored(), _users=users)


def _split_and_cat(inner: PatternExpr, split: list[Any], cat: list[Any], users: Any) -> PatternExpr:
    """Match parts of something, all of them, in their order or another, as one; the arguments behind the tensors."""
    parts = CallFunction(_SPLITS, inner, Ignored(), *split, _users=MULTIPLE)
    return CallFunction(aten.cat.default, ListOf(CallFunction(operator.getitem, parts, Ignored())), *cat, _users=users)


def _gathered() -> Iterator[PatternExpr]:
    def waited(users: Any) -> PatternExpr:
        shards = CallFunction(ALL_GATHER, KeywordArg("shard"), Ignored(), Ignored())
        return CallFunction(_WAIT, shards, _users=users)

    for split in ([], [0]):
        yield _split_and_cat(waited(1), split, [KeywordArg("dim")], MULTIPLE)
    yield waited(MULTIPLE)


def _gathered_matrix() -> Iterator[PatternExpr]:
    for whole in _gathered():
        yield whole
        yield _viewed(whole, MULTIPLE)
        yield _viewed(_viewed(whole, MULTIPLE), MULTIPLE)  # one that joins dimensions of size 1, and that of the matrix


def _reduced() -> Iterator[PatternExpr]:
    mm = CallFunction(aten.mm.default, Ignored(), Ignored())
    addmm = CallFunction(aten.addmm.default, Ignored(), Ignored(), Ignored())
    for product in (mm, addmm):
        for whole in (product, _viewed(product, 1)):
            yield CallFunction(_WAIT, CallFunction(ALL_REDUCE, whole, Ignored(), Ignored()))
            parts = [_split_and_cat(whole, [KeywordArg("dim")], cat, 1) for cat in ([], [0])]
            for sent in (whole, *parts):
                yield CallFunction(_WAIT, CallFunction(REDUCE_SCATTER, sent, Ignored(), Ignored(), Ignored()))


_OF_GATHERED: list[PatternExpr] = [
    CallFunction(target, *bias, a, Ignored())
    for target, bias in ((aten.mm.default, ()), (aten.addmm.default, (Ignored(),)))
    for a in _gathered_matrix()
]
_REDUCED = list(_reduced())
