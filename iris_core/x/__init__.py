"""Tile-level collectives, to be called from kernels: one program a rank works on the same tile of a matrix.

Names and arguments are those of the Iris documentation, and after them flags: with flags a collective orders what it
does, with none it is the caller who has barriers around it.
"""

from .all_reduce import all_reduce_one_shot
from .moves import all_gather
from .views import RankContext, TensorView, Tile, TileView, make_tensor_view, offset_ptr, tile_layout, tile_ptr

__all__ = [
    "RankContext",
    "TensorView",
    "Tile",
    "TileView",
    "all_gather",
    "all_reduce_one_shot",
    "make_tensor_view",
    "offset_ptr",
    "tile_layout",
    "tile_ptr",
]
