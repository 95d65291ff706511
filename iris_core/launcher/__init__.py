"""The processes of `iris_core.launch`: a pool that starts ranks, and the worker in each."""
