"""``iris-bench memcheck``: every variant under NVIDIA's compute-sanitizer."""
