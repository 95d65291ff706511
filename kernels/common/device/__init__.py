"""What kernels of both main loops share on the device.

| file | what |
|---|---|
| `arguments.py` | the bundles that kernels take |
| `tile_scheduler.py` | the order of tiles in a matrix; the portable kernels' tile schedulers |
| `handshake.py` | ready, done, and the end of a call |
| `epilogue.py` | what is done to a finished tile |
| `trace.py` | what programs write down of what they do |
"""
