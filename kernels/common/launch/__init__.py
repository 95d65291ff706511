"""How a call's kernels are launched.

| file | what |
|---|---|
| `launching.py` | calls that are prepared once, and then only queued |
| `graphs.py` | calls of many steps as CUDA graphs |
| `compile_ahead.py` | compiling without a launch |
| `launch_metadata.py` | what profilers show of a launch |
"""
