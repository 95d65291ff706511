"""Kernels under the race checker, and bugs that it must find: ``iris-bench check``."""
