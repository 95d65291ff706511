"""What all calls of an operator share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from iris_core import Context

from ..device.arguments import Peers
from ..portable.operands import OperandCopies, describable
from .launching import Calls
from .side_stream import SideStream


class Channel:
    """What all calls of an operator share: its state (device/handshake.py), its streams, its prepared calls.

    Args:
        ctx: the context.
        name: of the operator, in errors.
        state: the words of handshake.py; None for other projects' kernels.
        opened: what the implementation opened.
        can_describe: whether the kernels' descriptors can name a matrix, by rows.
    """

    def __init__(
        self,
        ctx: Context,
        name: str,
        state: torch.Tensor | None,
        opened: Any = None,
        can_describe: Callable[[torch.Tensor], bool] = describable,
    ) -> None:
        self.ctx = ctx
        self.opened = opened
        self.calls = Calls(ctx.backend, are_ours=state is not None)
        self.operand_copies = OperandCopies(name, can_describe)
        self.state = state
        self._trace: torch.Tensor | None = None
        self._streams: dict[str, SideStream] = {}

    def stream(self, name: str) -> SideStream:
        """Return the queue of work of this name beside the current stream, of high priority."""
        if name not in self._streams:
            self._streams[name] = SideStream(self.calls, self.ctx.make_stream())
        return self._streams[name]

    def trace_to(self, trace: torch.Tensor | None) -> None:
        """Have kernels of later calls write down what they do (device/trace.py); None: nothing."""
        self._trace = trace
        self.__dict__.pop("peers", None)
        self.calls.clear()

    @functools.cached_property
    def peers(self) -> Peers:
        """What kernels that talk to peers take."""
        ctx = self.ctx
        return Peers(self.state, ctx.get_rank(), ctx.get_heap_bases(), ctx.watchdog.words, self._trace)

    def clear(self) -> None:
        """Forget the prepared calls, and give the room of copies back."""
        self.calls.clear()
        self.operand_copies.clear()
