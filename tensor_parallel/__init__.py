"""Linear layers sharded over the ranks of a context, whose collectives are part of their multiplications.

As functions (`column_parallel_linear`, `row_parallel_linear`), as modules (`ColumnParallelLinear`,
`MergedColumnParallelLinear`, `RowParallelLinear`), and as styles for torch's ``parallelize_module`` (`styles`). All of
them compute gradients. `parallelize` cuts a whole model by such styles, or by the plan that it has (`plan_of`), on a
heap of `heap_bytes`. `load_whole` takes a whole model's weights, `prepare` makes room for calls, and `share_products`
has layers of one x multiplied as one. `Float8` has them multiply in fp8.
"""

from .functional import column_parallel_linear, row_parallel_linear
from .graph.fusing import fuse_collectives
from .layers.loading import load_whole
from .layers.merged import MergedColumnParallelLinear
from .layers.modules import ColumnParallelLinear, RowParallelLinear
from .layers.preparing import prepare
from .layers.shared import share_products
from .parallelizing import heap_bytes, parallelize
from .sharding.float8 import Float8
from .tp_plan import plan_of

__all__ = [
    "ColumnParallelLinear",
    "Float8",
    "MergedColumnParallelLinear",
    "RowParallelLinear",
    "column_parallel_linear",
    "fuse_collectives",
    "heap_bytes",
    "load_whole",
    "parallelize",
    "plan_of",
    "prepare",
    "row_parallel_linear",
    "share_products",
]
