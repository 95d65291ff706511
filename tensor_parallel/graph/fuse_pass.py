"""The graph pass of `fuse_collectives`: products beside collectives become calls of the families' ops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import fwd_only
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

import iris_kernels
import overlap_taxonomy
from iris_core import Context
from iris_kernels.all_gather_gemm.problem import AllGatherGemmProblem
from iris_kernels.common.choice.auto import known_of
from iris_kernels.common.operators.product import Product, epilogue_of, op_of
from iris_kernels.common.problem import Problem
from iris_kernels.gemm_all_reduce.problem import GemmAllReduceProblem
from iris_kernels.gemm_reduce_scatter.problem import GemmReduceScatterProblem
from overlap_taxonomy import get_variant

from .patterns import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Site, gathers, merge_equal, reductions

logger = logging.getLogger(__name__)

_FAMILIES: dict[Any, tuple[str, type[Problem]]] = {
    ALL_GATHER: ("all_gather_gemm", AllGatherGemmProblem),
    REDUCE_SCATTER: ("gemm_reduce_scatter", GemmReduceScatterProblem),
    ALL_REDUCE: ("gemm_all_reduce", GemmAllReduceProblem),
}


class FuseCollectives(CustomGraphPass):
    """A pass over a graph that AOTAutograd made, forward or backward; see `fuse_collectives`.

    Args:
        ctx: the context.
        group: the name of the process group whose collectives are replaced.
        min_tokens: from how many rows on; None where `auto` takes kernels of this library for them.
    """

    def __init__(self, ctx: Context, group: str, min_tokens: int | None) -> None:
        self._ctx, self._group, self._min_tokens = ctx, group, min_tokens
        asks_auto = min_tokens is None and not ctx.is_interpreted()
        # Now, as this is collective: where a graph is compiled, another rank may have it in its cache.
        self._known = known_of(ctx) if asks_auto else None

    def uuid(self) -> str:
        """Return what a compiled graph depends on beside the graph: this pass, and all that `auto` knows."""
        packages = (__file__, iris_kernels.__file__, overlap_taxonomy.__file__)
        files = [str(file) for one in packages for file in sorted(Path(str(one)).parent.rglob("*.py"))]
        asked = self._ctx.name, self._ctx.get_cu_count(), self._group, self._min_tokens, self._known
        return get_hash_for_files(tuple(files), repr(asked)).hex()

    def __call__(self, graph: Graph) -> None:
        """Replace what can be, and log of each collective what became of it.

        Raises:
            RuntimeError: the context is closed.
        """
        self._ctx.recovery.check_open()
        alone = {node for node in graph.nodes if node.target in _FAMILIES}
        merge_equal(graph)
        for sites in gathers(graph):
            alone.discard(sites[0].collective)
            self._replace_gather(graph, sites)
        for site in reductions(graph):
            alone.discard(site.collective)
            self._replace(graph, site, self._reduction(site), {})
        for node in sorted(alone):
            read, summed = "no matrix product has what it gathers as A", "it sums no product that is used here alone"
            _kept(node, read if node.target is ALL_GATHER else summed)

    def _replace_gather(self, graph: Graph, sites: Sequence[Site]) -> None:
        """Fuse a gather with the widest of the products that read it; the others read the A that this one leaves."""
        able = [site for site in sites if not any(site.collective in _ancestors(node) for node in site.others)]
        if not able:
            _kept(sites[0].collective, "B depends on what it gathers")
            return
        site = max(able, key=lambda one: _hint(_val(one.b).shape[1]) or 0)
        keep_gathered = _is_read_by_others(site)
        if self._replace(graph, site, self._gather(site, keep_gathered), {"keep_gathered": keep_gathered}):
            for other in sites:
                if other is not site:
                    logger.info("kept %s: it multiplies the A that %s gathers", other.product, site)

    def _replace(self, graph: Graph, site: Site, fused: Callable[..., Any], options: dict[str, bool]) -> bool:
        if reason := self._reason(site):
            _kept(site, reason)
            return False
        shapes = [tuple(_val(node).shape) for node in (site.a, site.b)]
        logger.info("replaced %s, %s by %s on this rank, by %s", site, *shapes, _FAMILIES[site.collective.target][0])
        inputs = [site.a, *site.others, *site.sizes]
        for node in sorted(_ancestors(*site.others)):
            if node > site.collective:
                site.collective.prepend(node)
        for old, new in zip(site.results, _insert(graph, site.collective, fused, inputs), strict=False):
            old.replace_all_uses_with(new)
        site.match.erase_nodes()
        return True

    def _gather(self, site: Site, keep_gathered: bool) -> Callable[..., Any]:
        """Return what gives the product, and the A that is gathered if it is kept."""
        world_size, dim, name = self._ctx.get_num_ranks(), site.dim, self._ctx.name
        adds_vector = _adds_vector(site)

        def fused(shard: torch.Tensor, b: torch.Tensor, *bias: torch.Tensor) -> list[torch.Tensor]:
            moved = shard.movedim(dim, 0)
            behind, a = moved.shape[1:-1], moved.reshape(-1, shard.shape[-1])
            m, n, k = a.shape[0] * world_size, b.shape[1] * world_size, a.shape[1]
            product = Product(m, n, k, name, keep_gathered=keep_gathered)
            in_epilogue = bias if adds_vector else ()
            outputs = op_of("all_gather_gemm")(a, [b], *product, *in_epilogue)
            c, *gathered = (one.view(-1, *behind, one.shape[1]).movedim(0, dim).contiguous() for one in outputs)
            c = c.view(m, b.shape[1])
            return [c + bias[0] if bias and not in_epilogue else c, *gathered]

        return fused

    def _reduction(self, site: Site) -> Callable[..., Any]:
        """Return what gives a product's sum over the ranks, or this rank's shard of it."""
        world_size, dim, name = self._ctx.get_num_ranks(), site.dim, self._ctx.name
        family, _ = _FAMILIES[site.collective.target]

        def fused(a: torch.Tensor, b: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
            n, k = b.shape[1], a.shape[1]
            moved = a.reshape(*sizes[:-1], k).movedim(dim, 0) if sizes else a
            rows = moved.reshape(-1, k)
            product = Product(rows.shape[0], n, k * world_size, name)
            (c,) = op_of(family)(rows, [b], *product)
            return [c.view(-1, *moved.shape[1:-1], n).movedim(0, dim).contiguous()]

        return fused

    def _reason(self, site: Site) -> str | None:
        """Return why a site stays as it is, or None."""
        family, problem_type = _FAMILIES[site.collective.target]
        is_gather, world_size = site.collective.target is ALL_GATHER, self._ctx.get_num_ranks()
        whole, b = _val(site.whole), _val(site.b)
        if site.group != self._group:
            return f"its process group is {site.group!r}; the context's is {self._group!r}"
        if not is_gather and site.collective.args[1] != "sum":
            return f"it reduces by {site.collective.args[1]}, not by sum"
        if factors := {name: one for name, one in site.product.kwargs.items() if one != 1}:
            return "its " + " and ".join(f"{name} is {one}" for name, one in factors.items())
        if not is_gather and site.bias:
            return "each rank adds a bias before the sum"
        if site.dim == whole.ndim - 1:
            return f"it is along the last of {whole.ndim} dimensions, the features"
        if not _equal(whole.shape[-1], b.shape[0] if is_gather else b.shape[1]):
            return f"a view to {tuple(whole.shape)} changes the features"
        if site.parts and site.parts != list(range(world_size)):
            return f"parts are in the order {site.parts}"
        if site.num_parts > len(site.parts):
            return f"it takes {len(site.parts)} of {site.num_parts} parts"
        if b.device != self._ctx.get_device():
            return f"it is on {b.device}; the context's device is {self._ctx.get_device()}"
        rows, n, k = (_hint(size) for size in (prod(whole.shape[:-1]), b.shape[1], b.shape[0]))
        if rows is None or n is None or k is None:
            return "its sizes are symbolic, and no call has shown any"
        try:
            sizes = (n * world_size, k) if is_gather else (n, k * world_size)
            epilogue = epilogue_of(("bias",) if _adds_vector(site) else (), None)
            problem = problem_type(rows, *sizes, world_size, b.dtype, epilogue)
        except ValueError as error:
            return str(error)
        if self._min_tokens is not None:
            return f"{rows} rows are fewer than {self._min_tokens}" if rows < self._min_tokens else None
        choose: Any = get_variant(family, "auto").choose
        choice = choose(self._ctx, problem, None, alone=True)  # another rank may have the graph in its cache
        if get_variant(family, choice.variant).has_kernels:
            return None
        return f"for {rows} rows auto takes {choice.variant} ({choice.why})"


def _adds_vector(site: Site) -> bool:
    """Whether a product adds an element to each column, as an epilogue can."""
    return any(_val(bias).ndim == 1 and _equal(_val(bias).shape[0], _val(site.b).shape[1]) for bias in site.bias)


def _kept(what: Site | Node, reason: str) -> None:
    logger.info("kept %s: %s", what, reason)


def _val(node: Any) -> Any:
    return node.meta["val"]


def _hint(size: Any) -> int | None:
    """Return a size; of a symbolic one that of the call that it is compiled for, None where none is known."""
    found: int | None = size if isinstance(size, int) else size.node.hint
    return found


def _equal(one: Any, other: Any) -> bool:
    return statically_known_true(one == other)


def _ancestors(*nodes: Node) -> set[Node]:
    """Return nodes and all that they depend on."""
    found, ahead = set(nodes), list(nodes)
    while ahead:
        new = set(ahead.pop().all_input_nodes) - found
        found |= new
        ahead += new
    return found


def _is_read_by_others(site: Site) -> bool:
    """Whether something beside the product reads what is gathered."""
    node, reader = site.product.args[-2], site.product
    while True:
        if set(node.users) != {reader}:  # type: ignore[union-attr]
            return True
        if node is site.whole:
            return False
        node, reader = node.args[0], node  # type: ignore[union-attr, assignment]


def _insert(graph: Graph, before: Node, fn: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Insert a function's graph, traced with what is known of its inputs; return its outputs' nodes."""
    traced = fwd_only(fn, [_val(one) if isinstance(one, Node) else one for one in inputs])
    known = {}
    for placeholder, given in zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(given, Node):
            known[placeholder] = given
        else:  # a number, which is in the graph as it is
            traced.graph.erase_node(placeholder)
    with graph.inserting_before(before):
        return graph.graph_copy(traced.graph, known)
