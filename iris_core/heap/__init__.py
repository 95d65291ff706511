"""The symmetric heap: one window of addresses over all ranks, its allocator, and tensors on it."""
