"""The portable main loop, in Triton, and what is built on it.

| file | what |
|---|---|
| `tile_loop.py` | the loop over a program's tiles, which a kernel gives a scheduler, a gate, and what finishes a tile |
| `gemm.py` | main loop, stores |
| `operands.py` | how A and B are read |
| `partials.py` | partial tiles that are sent to their owner and summed there |
| `stream_k.py` | tiles that programs split along k |
| `stream_k_host.py` | the host's part of that: how tiles are split, workspace and launch |
"""
