"""``iris-bench litmus``: the orderings that the documentation promises, tried a million times on GPUs."""
