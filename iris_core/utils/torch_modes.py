"""torch's modes, which are the thread's: what outlives a call is made in none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


def plain_tensors() -> AbstractContextManager[Any]:
    """Within the block, torch makes tensors that may be written later, in whatever mode the caller is now.

    One made under ``torch.inference_mode`` could not be written outside it.
    """
    return _outside_inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextlib.contextmanager
def _outside_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
