"""torch's modes, which are the thread's: what outlives a call is made in none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Within the block, torch makes tensors that may be written later, in whatever mode the caller is now.

    One made under ``torch.inference_mode`` could not be written outside it.
    """
    leave = torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
    with leave, torch.no_grad():
        yield
