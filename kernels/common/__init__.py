"""What the kernel families share, beside calls, problems and configurations:

| folder | what |
|---|---|
| `device` | the handshake, the epilogue's ops, scales, traces: jit functions for both main loops |
| `portable` | the main loop in Triton, partial sums, stream-K |
| `hopper` | the main loop in Gluon whose warps have different roles |
| `variants` | what a variant is made of, baselines, shared parts of predicted times |
| `fp8` | scales of operands, quantising, products by torch |
| `operators` | operators: made, called, found again, and as torch ops |
| `launch` | prepared calls, graphs, compiling ahead |
| `choice` | what `auto` takes |
| `calibration` | the constants of a machine, measured on it |
"""
