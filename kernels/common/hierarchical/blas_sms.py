"""On how many SMs torch's products run."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def blas_on_sms(sms: int) -> Iterator[None]:
    """Let products of torch's within the block, of 16 or 32 bits, take so many SMs, and leave the others to NCCL.

    cuBLAS's kernels are persistent, so that NCCL's would wait for the whole product. (cuBLAS,
    ``cublasSetSmCountTarget``.) Of other libraries than cuBLAS, products take all SMs.
    """
    if torch.version.cuda is None:
        yield
        return
    blas = _cublas(torch.version.cuda.partition(".")[0])
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    try:
        _set_sms(blas, handle, sms)
        yield
    finally:
        _set_sms(blas, handle, 0)  # all


@functools.cache
def _cublas(version: str) -> ctypes.CDLL:
    """Return the library that torch has loaded."""
    return ctypes.CDLL(f"libcublas.so.{version}")


def _set_sms(blas: ctypes.CDLL, handle: ctypes.c_void_p, sms: int) -> None:
    if status := blas.cublasSetSmCountTarget(handle, sms):
        raise RuntimeError(f"cublasSetSmCountTarget failed with status {status}")
