"""Steps that are queued again and again, which from the second time on are one graph: one launch for the host."""

from __future__ import annotations

import os
import warnings
from typing import Any

from iris_core.backends.base import Backend, Step

_MOST_GRAPHS = 64  # that an operator keeps: the driver sets memory of the device aside for each


class Sequence:
    """Steps in their order, and the graph that is made of them.

    No graph is made of few steps, of the first time, where the caller captures the stream (his graph gets the steps),
    nor where streams share one connection to the device: there a graph's branches may wait for each other's end.

    Args:
        steps: what is queued.
        graphs: keeps the graph.
        stream: the driver's handle of the stream that all the steps are queued on; None: they are queued on the
            current stream, and on others that it forks and joins.
        may_be_graph: False if few steps are no more work for the host than a graph, or if they must be taken in the
            order in which they are queued: a graph's branches are taken in any order.
    """

    _is_new = True
    _graph: Any = None

    def __init__(self, steps: list[Step], graphs: Graphs, stream: int | None, *, may_be_graph: bool) -> None:
        self.steps, self._graphs, self._stream, self._may_be_graph = steps, graphs, stream, may_be_graph

    def __call__(self) -> None:
        """Queue the steps."""
        is_due, kept = self._may_be_graph and not self._is_new, self._graphs
        if is_due and kept.are_allowed and not kept.is_captured and (graph := self._made()):
            graph.launch(kept.backend.current_stream() if self._stream is None else self._stream)
            return
        self._is_new = False
        for step in self.steps:
            step()

    def _made(self) -> Any:
        """Return the graph, made if there is none yet; None if there is to be none."""
        if self._graph is None:
            try:
                self._graph = self._graphs.make(self.steps, self._stream)
            except RuntimeError as error:
                self._may_be_graph = False
                warnings.warn(f"calls are queued step by step, as no graph could be made of one: {error}", stacklevel=5)
        return self._graph


class Graphs:
    """An operator's graphs.

    Args:
        backend: whose driver makes them.

    Attributes:
        are_allowed: whether streams have connections of their own.
        is_captured: whether what is queued now is captured by the caller.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend: Any = backend
        self.are_allowed = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
        self._graphs: list[Any] = []
        self.is_captured = False

    def make(self, steps: list[Step], stream: int | None) -> Any:
        """Make a graph of steps, or return None: no more are kept.

        Raises:
            RuntimeError: the driver cannot make one of these.
        """
        if len(self._graphs) == _MOST_GRAPHS:
            return None
        self._graphs.append(self.backend.capture(steps, stream))
        return self._graphs[-1]

    def close(self) -> None:
        """Release all of them; no sequence is called after this."""
        for graph in self._graphs:
            graph.close()
        self._graphs = []
