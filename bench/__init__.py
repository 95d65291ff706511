"""Measures every variant of every family against NCCL + cuBLAS and the physical limit: ``iris-bench``."""
