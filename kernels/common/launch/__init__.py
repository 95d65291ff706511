"""How a call's kernels are launched.

| file | what |
|---|---|
| `channel.py` | where an operator's calls are queued: launches, copies, streams; or recorded |
| `trace.py` | a call traced with a number of rows that is not known: a function of rows and addresses |
| `traced_tensor.py` | what stands for a tensor in a traced call |
| `recording.py` | what a call queues, recorded, and the template that comes of a traced one |
| `kernels.py` | compiled kernels, few for any number of rows |
| `graphs.py` | calls of many steps as CUDA graphs |
| `compile_ahead.py` | compiling without a launch |
| `launch_metadata.py` | what profilers show of a launch |
"""
