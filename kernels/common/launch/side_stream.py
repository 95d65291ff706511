"""Streams beside the current one, whose operations are steps of a call while it is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from iris_core.backends.base import PreparedStream, Stream

from .launching import Calls
from .recording import Recording


class SideStream(Stream):
    """A stream beside the current one; while a call is recorded, its operations become steps.

    Args:
        calls: which say whether one is recorded.
        stream: the backend's.
    """

    def __init__(self, calls: Calls, stream: Any) -> None:
        self._calls = calls
        self._stream = stream

    @property
    def _target(self) -> Stream:
        recording = self._calls.recording
        return self._stream if recording is None else _RecordedStream(self._calls, recording, self._stream)

    def wait_for_current(self) -> None:
        self._target.wait_for_current()

    def current_waits(self) -> None:
        self._target.current_waits()

    def as_current(self) -> AbstractContextManager[None]:
        return self._target.as_current()

    @contextlib.contextmanager
    def in_one(self) -> Iterator[None]:
        """Within the block, all is queued on this stream, and is the same in every call: the host queues it as one.

        Waits for what the call's kernels count are allowed, of those queued before: this comes behind them.
        """
        with contextlib.nullcontext() if self._calls.recording is None else self._calls.recording_inner(self._stream):
            yield

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        self._target.wait_value(flag, value)

    def write_value(self, flag: torch.Tensor, value: int) -> None:
        self._target.write_value(flag, value)

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._target.copy_2d(dst, src)


class _RecordedStream(Stream):
    """Adds a stream's operations to a sequence, in place of queueing them."""

    def __init__(self, calls: Calls, recording: Recording, stream: PreparedStream) -> None:
        self._calls = calls
        self._recording = recording
        self._stream = stream

    def wait_for_current(self) -> None:
        self._recording.add(self._stream.waiting_for_current)

    def current_waits(self) -> None:
        self._recording.add(self._stream.current_waiting)

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        self._calls.stream = self._stream
        yield
        self._calls.stream = None

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        self._recording.may_be_graph &= self._recording.is_of_one_stream
        self._recording.add(self._stream.waiting_for_value, flag, value)

    def write_value(self, flag: torch.Tensor, value: int) -> None:
        self._recording.add(self._stream.writing_value, flag, value)

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._recording.add(self._stream.copying_2d, dst, src)
