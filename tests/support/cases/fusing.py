"""The pass that fuses collectives, run as a backend of torch.compile: what it made of a function's graphs, and said."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from layers import far
from ranks import context
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.distributed import _functional_collectives as functional

from iris_tensor_parallel import fuse_collectives
from iris_tensor_parallel.graph import fuse_pass

GATHER, SCATTER, REDUCE = "all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"
FAMILIES = (GATHER, SCATTER, REDUCE)
Graphs = list[list[str]]  # which of the families' ops each has, and which collectives


group = ""  # the name of the context's process group: no graph calls the context


def gather(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return functional.all_gather_tensor(x, dim, group)


def scatter(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return functional.reduce_scatter_tensor(x, "sum", dim, group)


def reduce(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return functional.all_reduce(x, op, group)


def fusing(**options: Any) -> Callable[..., Any]:
    """Return the pass for this rank's context."""
    global group
    group = context().process_group().group_name
    return fuse_collectives(context(), **options)["post_grad_custom_pre_pass"]


def backend(fuse: Callable[..., Any], graphs: Graphs) -> Callable[..., Any]:
    """Return a backend that runs a pass on what inductor would compile, and then calls the graph node by node."""

    def compile_graph(module: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        fuse(module.graph)
        module.graph.lint()
        module.recompile()
        names = [str(node.target).split(".") for node in module.graph.nodes if node.op == "call_function"]
        ours = [name[1] for name in names if name[0] in ("iris_overlap", "_c10d_functional")]
        graphs.append([name for name in ours if name != "wait_tensor"])
        return make_boxed_func(module)

    return lambda module, inputs: compile_fx(module, inputs, inner_compile=compile_graph)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Give the pass's messages."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    fuse_pass.logger.addHandler(handler)
    fuse_pass.logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        fuse_pass.logger.removeHandler(handler)
        fuse_pass.logger.setLevel(logging.NOTSET)


def run(fn: Callable[..., Any], *inputs: torch.Tensor, **options: Any) -> tuple[list[Any], Graphs, list[str]]:
    """Return what is wrong beside a function without the compiler, the ops in its graphs, and what was logged."""
    graphs: Graphs = []
    fuse = fusing(**options)
    torch._dynamo.reset()
    with logged() as messages, torch.no_grad():
        one = torch.compile(fn, backend=backend(fuse, graphs), fullgraph=True)
        found, expected = one(*inputs), fn(*inputs)
    is_one = isinstance(found, torch.Tensor)
    return far([found] if is_one else found, [expected] if is_one else expected), graphs, messages
