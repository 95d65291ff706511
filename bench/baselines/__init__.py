"""Other projects' fused operators, as variants to compare with.

They reach the registry as a variant of any other distribution does: through an entry point of the group
``iris_overlap.families``, whose module registers them when it is imported.
"""

from overlap_taxonomy import register

from . import async_tp, kraken_functions, quack

for _variant in (*async_tp.VARIANTS, *kraken_functions.VARIANTS, *quack.VARIANTS):
    register(_variant)
