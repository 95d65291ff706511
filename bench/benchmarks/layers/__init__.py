"""Pairs of tensor-parallel layers beside torch's own: ``iris-bench layers``."""
