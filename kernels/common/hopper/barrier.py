"""A barrier of a partition's threads, by the name that the installed Triton has for it."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

thread_barrier: Any = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the latter in Triton 3.6
