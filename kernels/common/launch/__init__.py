"""How a call's kernels are launched.

| file | what |
|---|---|
| `launching.py` | calls that are prepared once, and then only queued |
| `kernels.py` | compiled kernels, few for any number of rows |
| `moving.py` | the launches of a call made again for operands that lie elsewhere |
| `graphs.py` | calls of many steps as CUDA graphs |
| `compile_ahead.py` | compiling without a launch |
| `launch_metadata.py` | what profilers show of a launch |
"""
