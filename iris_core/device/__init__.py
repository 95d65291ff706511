"""The device API: what a Triton kernel calls for remote memory access and synchronisation."""
