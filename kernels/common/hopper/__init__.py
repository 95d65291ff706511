"""What the warp-specialised variants share: Gluon kernels for Hopper (sm_90), whose warps have different roles.

| file | what |
|---|---|
| `arguments.py` | the bundles that kernels take |
| `ring.py` | operand tiles through shared memory: the loader warp fills stages, two multiply warp groups use them |
| `outbox.py` | a finished tile on its way out: left in shared memory, sent in pieces paced by the next tile's loads |
| `inbox.py` | peers' partial tiles on their way in: loaded in slabs, added to the finished tile |
| `herald.py` | a warp that announces what another has sent |
| `positions.py` | the turns of a program: which tiles it computes, and which of the last ones with others |
| `team.py` | sums of a tile, exchanged by the programs that share it |
| `roles.py` | the part of the multiply warps, together or in turns; where partials are added, see turns.py there |
| `plan.py` | the quickest cut into tiles and teams, by prediction |
| `operator.py` | the host's part: what is supported, tensor descriptors |
"""
