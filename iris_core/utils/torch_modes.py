"""torch's modes, which are the thread's: what outlives a call is made in none, and tasks of a thread have their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


def lasting(device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a tensor that outlives the call, of memory that torch's allocator gives to no CUDA graph.

    While `torch.compile` warms a CUDA graph up, what this thread allocates is the graph's, and what stays there an
    error; so another thread allocates.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return make()
    stream = torch.cuda.current_stream(device)

    def make_on_stream() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as other:
        return other.submit(make_on_stream).result()


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
