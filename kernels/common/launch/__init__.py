"""How a call's kernels are launched.

| file | what |
|---|---|
| `launching.py` | calls that are prepared once, and then only queued |
| `trace.py` | a call traced with a number of rows that is not known: a function of rows and addresses |
| `traced_tensor.py` | what stands for a tensor in a traced call |
| `recording.py` | what a call queues, recorded, and the template that comes of a traced one |
| `kernels.py` | compiled kernels, few for any number of rows |
| `channel.py` | what all calls of an operator share |
| `side_stream.py` | streams beside the current one, recorded too |
| `graphs.py` | calls of many steps as CUDA graphs |
| `compile_ahead.py` | compiling without a launch |
| `launch_metadata.py` | what profilers show of a launch |
"""
