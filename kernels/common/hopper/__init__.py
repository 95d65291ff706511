"""What the warp-specialised variants share: Gluon kernels for Hopper (sm_90), whose warps have different roles.

| file | what |
|---|---|
| `arguments.py` | the bundles that kernels take |
| `pipeline.py` | pipelines from a producer to a consumer: full and empty barriers and their phases; the main loop |
| `epilogue_store.py` | a finished tile, staged in shared memory, stored by subtiles paced by the next tile's loads |
| `epilogue_load.py` | peers' partial tiles, loaded by stages, added to the finished tile |
| `waves.py` | a program's waves, and its part of a tile in each, whole or split along k |
| `promotion.py` | scaled products of fp8, promoted to fp32 at every step |
| `fixup.py` | partial sums of a split tile, exchanged by its programs |
| `tile_loop.py` | the loops over a program's tiles, of the load warp and of the multiply warps |
| `roles.py` | the roles of the warps, and their registers |
| `plan.py` | the fastest tiling and split of the last wave, by prediction |
| `host.py` | the host's part: what is supported, the plan, operands, tensor descriptors, launch |
"""
