"""A tile from one rank to another: `send` on one, `recv` on the other.

A channel is four int64 words on the heap, zeroed once, for one tile: a rank may send by it to one rank and receive by
it from one. Words only grow, and waits compare with ≥.

| word | written by | awaited by |
|---|---|---|
| 0, ready | the receiver, on the sender: its output may be overwritten | the sender, before it stores |
| 1, arrived | the sender, on the receiver: the tile is there | the receiver |
| 2, 3 | this rank: how often it has sent, and received | |
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.rma import translate
from ..device.sync import signal, wait
from .access import load_tile, on_rank, store_tile
from .epochs import count_call

CHANNEL_WORDS = tl.constexpr(4)
_READY = tl.constexpr(0)
_ARRIVED = tl.constexpr(1)
_SENT = tl.constexpr(2)
_RECEIVED = tl.constexpr(3)


@triton.jit
def send(tile, src_view, dst_view, to_rank, ctx, channels_ptr, epoch=None):
    """Store this rank's tile to `to_rank`'s output, once `to_rank` has called `recv` for it.

    Ranks that all send before they receive wait for one another.
    Edge: what this program did before the call happens before what the receiver's does after its `recv`; what the
    receiver's did before its `recv` happens before the store.

    Args:
        tile: a `TileView`.
        src_view: the tile's matrix, in any memory of this rank.
        dst_view: the receiver's output, on the heap.
        to_rank: the receiver, another rank.
        ctx: a `DeviceContext`.
        channels_ptr: int64 words on the heap, (number of tiles of `dst_view`, 4), zeroed once.
        epoch: the number of this message on its channel, from 1; None: messages are counted on the device.
    """
    channel_ptr = _channel_of(channels_ptr, dst_view, tile)
    number = count_call(channel_ptr + _SENT, epoch)
    value = load_tile(src_view, tile)
    wait(channel_ptr + _READY, number, ctx.watchdog_ptr, scope="sys")
    store_tile(on_rank(dst_view, to_rank, ctx), tile, value)
    signal(translate(channel_ptr + _ARRIVED, ctx.rank, to_rank, ctx.heap_bases), number, scope="sys")


@triton.jit
def recv(tile, dst_view, from_rank, ctx, channels_ptr, epoch=None):
    """Wait until `from_rank` has stored a tile to this rank's output.

    Edge: that of `send`.

    Args:
        tile: a `TileView`.
        dst_view: the output, on the heap.
        from_rank: the sender, another rank.
        ctx, channels_ptr, epoch: as of `send`.
    """
    channel_ptr = _channel_of(channels_ptr, dst_view, tile)
    number = count_call(channel_ptr + _RECEIVED, epoch)
    signal(translate(channel_ptr + _READY, ctx.rank, from_rank, ctx.heap_bases), number, scope="sys")
    wait(channel_ptr + _ARRIVED, number, ctx.watchdog_ptr, scope="sys")


@triton.jit
def _channel_of(channels_ptr, view, tile):
    return channels_ptr + tl.cast(view.tile_id(tile), tl.int64) * CHANNEL_WORDS
