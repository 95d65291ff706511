"""What torch's pass for async tensor parallelism knows as a gather along a sequence, where there is one sequence."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

_aten = torch.ops.aten
_ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class PutTogether(CustomGraphPass):
    """Have the ranks' parts of one sequence put together by split and cat, as those of several are.

    Torch makes a view of them, which costs nothing, but its own pass, ``_micro_pipeline_tp``, then finds no gather to
    fuse with the products that read it. What it fuses needs neither view nor copy.
    """

    def uuid(self) -> str:
        """Return what a compiled graph depends on beside the graph."""
        return get_hash_for_files((__file__,)).hex()

    def __call__(self, graph: Graph) -> None:
        """Replace these views in a graph that AOTAutograd made."""
        for view in graph.nodes:
            if view.target in (_aten.view.default, _aten.reshape.default) and _is_along_tokens(view):
                gathered = view.args[0]
                with graph.inserting_before(view):
                    split = _call(graph, _aten.split.Tensor, gathered, 1)
                    parts = [_call(graph, operator.getitem, split, rank) for rank in range(len(split.meta["val"]))]
                    view.replace_all_uses_with(_call(graph, _aten.cat.default, parts, 1))
                graph.erase_node(view)


def _is_along_tokens(view: Any) -> bool:
    """Whether a view puts one sequence together of what each rank has of it."""
    wait = view.args[0]
    if not (wait.target is _WAIT and wait.args[0].target is _ALL_GATHER):
        return False
    ranks, of_one, *features = wait.meta["val"].shape
    return ranks > 1 and list(view.meta["val"].shape) == [1, ranks * of_one, *features]


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    """Add a call, with what it gives of its inputs' shapes."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*torch.fx.map_arg(args, lambda one: one.meta["val"]))
    return node
