"""The ways to call one product: by how much software a call goes through before a kernel is queued."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from iris_core import Context
from iris_kernels.common.operators import product
from iris_kernels.common.operators.dispatch import Operators
from iris_kernels.common.operators.torch_op import operators_for
from iris_kernels.common.problem import Problem
from iris_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from overlap_taxonomy import get_variant, module_of

MM, OPERATOR, FUNCTION, OP, LAYER = "mm", "operator", "function", "op", "layer"
SMALL, LARGE = 2, 10  # ops of a graph
IN_GRAPH = {  # of a graph of `LARGE`, less one of `SMALL`: what one more op takes
    "op_in_graph": (f"graph_of_{SMALL}_ops", f"graph_of_{LARGE}_ops"),
    "layer_in_graph": (f"graph_of_{SMALL}_layers", f"graph_of_{LARGE}_layers"),
}
OPS = {name: number for pair in IN_GRAPH.values() for name, number in zip(pair, (SMALL, LARGE), strict=True)}
WAYS = {  # in words
    MM: "`torch.mm(out=)`, for comparison",
    OPERATOR: "operator, prepared",
    FUNCTION: "function, such as `gemm_reduce_scatter`",
    OP: "torch op, eager",
    LAYER: "layer, eager",
    "op_in_graph": "torch op, in a compiled graph",
    "layer_in_graph": "layer, in a compiled module",
    **{name: f"compiled graph of {name.split('_')[2]} {'layers' if 'layers' in name else 'torch ops'}" for name in OPS},
}
EAGER = (OPERATOR, FUNCTION, OP, LAYER)
KINDS = {  # of calls, in words
    "repeated": "",
    "alone": "one by one",
    "cold": "one by one, caches written over",
    "new_m": "first call of another M",
    "new_weight": "the same M, another layer's weight",
}
SAME = ("alone", "cold")  # kinds of single calls that are the same again
LAYERS: dict[str, tuple[Any, dict[str, bool]]] = {  # of each family the layer whose forward pass it is
    "all_gather_gemm": (ColumnParallelLinear, {"sequence_parallel": True}),
    "gemm_reduce_scatter": (RowParallelLinear, {"sequence_parallel": True}),
    "gemm_all_reduce": (RowParallelLinear, {}),
    "gemm_all_scatter": (ColumnParallelLinear, {"gather_output": True}),
}
_ROWS_ARE_CUT = ("all_gather_gemm",)  # by its own rows a rank cannot tell how many all have: a call says it

Call = Callable[[torch.Tensor, int], Any]  # of A and the rows of all ranks


def name_of(way: str, kind: str) -> str:
    """Return a kind of call of a way in words."""
    return f"{WAYS[way].partition(', ')[0]}, {KINDS[kind]}" if KINDS[kind] else WAYS[way]


def kinds_of(way: str) -> tuple[str, ...]:
    """Return which kinds of call of a way are timed."""
    return tuple(KINDS) if way in EAGER else ("repeated", *SAME) if way == MM else ("repeated",)


@dataclass(frozen=True)
class Product:
    """What is called: a family's variant, for a problem.

    Args:
        ctx: the context.
        family, variant: names.
        problem: of the most rows that calls have.
    """

    ctx: Context
    family: str
    variant: str
    problem: Problem

    def operators(self) -> Operators:
        """Return the operators that the op's calls take, which the context keeps; collective the first time."""
        problem = self.problem
        asked = product.Product(problem.m, problem.n, problem.k, self.ctx.name, self.variant)
        return operators_for(self.family, problem.dtype, asked)

    def own_operators(self) -> Operators:
        """Return operators whose look-ups are not the context's: what they have had, the context's calls have not."""
        found = get_variant(self.family, self.variant)
        options = {"keep_gathered": False} if product.families[self.family].gathers else {}
        return Operators(self.ctx, found, self.variant, self.problem, None, options)

    def call(self, way: str, weights: Sequence[torch.Tensor]) -> Call:
        """Return what calls it in a way, once a weight; collective. It returns C, or a list of C's.

        Args:
            way: one of `WAYS`, but `MM` and those of `IN_GRAPH`.
            weights: this rank's part of each, (n, k), as of a linear layer. Eager ways take one.
        """
        ctx, variant, problem = self.ctx, self.variant, self.problem
        (n, k), b = (problem.n, problem.k), weights[0].t()
        if way == OPERATOR:
            operator = self.operators().of(problem.m)
            return lambda a, m: operator.call(a, b, m=m)[0]
        if way == FUNCTION:
            function = getattr(module_of(self.family), self.family)
            if self.family in _ROWS_ARE_CUT:
                return lambda a, m: function(ctx, a, b, m=m, variant=variant)
            return lambda a, m: function(ctx, a, b, variant=variant)
        op = product.op_of(self.family)
        if way == OP:
            return lambda a, m: op(a, [b], m, n, k, ctx.name, variant)[0]
        if way == LAYER:
            layer = self._layer(weights[0])
            return lambda a, m: layer(a)
        if way.endswith("_layers"):
            module = torch.compile(_layers(way, [self._layer(weight) for weight in weights]), fullgraph=True)
            return lambda a, m: module(a)
        name, parts = ctx.name, [weight.t() for weight in weights]

        def graph(a: torch.Tensor, m: int) -> list[torch.Tensor]:
            return [op(a, [part], m, n, k, name, variant)[0] for part in parts]

        return torch.compile(_with_own_code(graph, way), fullgraph=True, dynamic=False)

    def _layer(self, weight: torch.Tensor) -> nn.Module:
        kind, options = LAYERS[self.family]
        how = {"device": "meta", "dtype": weight.dtype, "variant": self.variant}
        layer = kind(self.ctx, self.problem.k, self.problem.n, bias=False, **how, **options)
        layer.weight = nn.Parameter(weight)
        return layer


class _Layers(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.layers]


def _layers(name: str, layers: Sequence[nn.Module]) -> nn.Module:
    module = _Layers(layers)
    module.__class__ = type(name, (_Layers,), {"forward": _with_own_code(_Layers.forward, name)})
    return module


def _with_own_code(function: Any, name: str) -> Any:
    """Return a function whose code no other has: the compiler keeps graphs by code, and tries one after the other."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
