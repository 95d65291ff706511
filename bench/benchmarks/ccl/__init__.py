"""``iris-bench ccl``: the collectives on whole tensors beside NCCL's."""
