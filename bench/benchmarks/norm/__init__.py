"""``iris-bench norm``: GEMM, collective, residual and RMSNorm, in one kernel and in several."""
