"""Linear layers sharded over the ranks of a context, whose collectives are part of their multiplications.

As functions (`column_parallel_linear`, `row_parallel_linear`), as modules (`ColumnParallelLinear`,
`MergedColumnParallelLinear`, `RowParallelLinear`), and as styles for torch's ``parallelize_module`` (`styles`). All of
them compute gradients. `load_whole` takes a whole model's weights, `prepare` makes room for calls, and `share_gathers`
has layers of one x gather it once.
"""

from .fusing import fuse_collectives
from .layers import ColumnParallelLinear, RowParallelLinear
from .linear import column_parallel_linear, row_parallel_linear
from .loading import load_whole
from .merged import MergedColumnParallelLinear
from .preparing import prepare
from .shared import share_gathers

__all__ = [
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "RowParallelLinear",
    "column_parallel_linear",
    "fuse_collectives",
    "load_whole",
    "prepare",
    "row_parallel_linear",
    "share_gathers",
]
