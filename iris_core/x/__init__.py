"""Tile-level collectives, to be called from kernels: one program per rank works on the same tile of a matrix.

Names and arguments are those of the Iris documentation, and after them flags: with flags a collective orders what it
does, with none it is the caller who has barriers around it. `partition` is for the host: it makes what a
`PartitionedView` is of.
"""

from .all_reduce import (
    all_reduce_atomic,
    all_reduce_one_shot,
    all_reduce_ring,
    all_reduce_spinlock,
    all_reduce_two_shot,
)
from .moves import all_gather, all_to_all, broadcast, gather, scatter
from .partitioned_tensor import PartitionedTensor, partition
from .partitioned_view import PartitionedView, make_partitioned_view
from .point_to_point import recv, send
from .reductions import reduce, reduce_scatter
from .values import all_reduce_value, reduce_scatter_value
from .views import TensorView, Tile, TileView, make_tensor_view, offset_ptr, tile_layout, tile_ptr

__all__ = [
    "PartitionedTensor",
    "PartitionedView",
    "TensorView",
    "Tile",
    "TileView",
    "all_gather",
    "all_reduce_atomic",
    "all_reduce_one_shot",
    "all_reduce_ring",
    "all_reduce_spinlock",
    "all_reduce_two_shot",
    "all_reduce_value",
    "all_to_all",
    "broadcast",
    "gather",
    "make_partitioned_view",
    "make_tensor_view",
    "offset_ptr",
    "partition",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_value",
    "scatter",
    "send",
    "tile_layout",
    "tile_ptr",
]
