"""torch's modes, which are the thread's: what outlives a call is made in none, and tasks of a thread have their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Within the block, torch makes tensors that may be written later, in whatever mode the caller is now.

    One made under ``torch.inference_mode`` could not be written outside it.
    """
    leave = torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
    with leave, torch.no_grad():
        yield


def torch_modes() -> tuple[Any, ...]:
    """Return the modes that this thread is in now, for `in_modes`."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch.is_grad_enabled(), included, excluded


@contextlib.contextmanager
def in_modes(modes: tuple[Any, ...]) -> Iterator[None]:
    """Within the block, this thread is in these modes, and then in those that it was in, whatever is done meanwhile."""
    is_grad_enabled, included, excluded = modes
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.set_grad_enabled(is_grad_enabled):
        yield
