"""What a collective with ``async_op=True`` returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends.base import Stream


class Work:
    """A collective under way on a stream of its own.

    Args:
        stream: that one.
        tensors: what it reads and writes, kept until it is waited for.
    """

    def __init__(self, stream: Stream, tensors: Sequence[torch.Tensor]) -> None:
        self._stream = stream
        self._tensors = tensors

    def wait(self) -> None:
        """Hold the current stream until the collective is done; the host does not wait."""
        self._stream.current_waits()
        self._tensors = ()
