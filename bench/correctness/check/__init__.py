"""Kernels under the race checker, and bugs that it must find: ``iris-bench check``."""

CALLS = 3  # each buffer is used again, and again after that by a rank that may be a call ahead
