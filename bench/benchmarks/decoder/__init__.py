"""A tensor-parallel decoder of transformers, beside torch's own parallelism: ``iris-bench decoder``."""
