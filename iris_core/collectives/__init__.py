"""Collectives that the host starts, built on the device API.

`Context.ccl` has them; `ReduceOp`, `Group` and `Work` are what they take and return.
"""
