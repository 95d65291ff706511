"""Measures every variant of every family against the vendor library and the physical limit: ``iris-bench``."""
