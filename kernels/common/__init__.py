"""What the kernel families share: the GEMM main loop, the tile order, the handshake, configurations and operators."""
