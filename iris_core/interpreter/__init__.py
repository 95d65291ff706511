"""Triton's interpreter for kernels of several ranks: programs that wait for one another, and bounds on memory."""
