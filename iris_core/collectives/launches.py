"""Launches of the collectives' kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..context import Context
from .exchange import ccl_exchange
from .group import Channel, Group

_VECTOR_BYTES = 16
_WARP_BYTES = 32 * _VECTOR_BYTES
_LEAST_BLOCK_BYTES = 4 * _WARP_BYTES
_MOST_WARPS = 16


@dataclass(frozen=True)
class Exchange:
    """A collective in which every part is sent once; the arguments are `ccl_exchange`'s.

    Args:
        name: of the collective.
        output, input: tensors; of the larger, a part is as large as the other.
        op: "sum", "max", "min", or "none".
        scattered: whether each member has a part of its own in the input.
        sender, receiver: index of the only member that sends or receives, or -1.
    """

    name: str
    output: torch.Tensor
    input: torch.Tensor
    op: str = "none"
    scattered: bool = False
    sender: int = -1
    receiver: int = -1

    @property
    def is_all_to_all(self) -> bool:
        """Whether both tensors are of as many parts as there are members."""
        return self.scattered and self.op == "none" and self.sender < 0

    def part(self, group_size: int) -> int:
        """Return how many elements a part has."""
        if self.is_all_to_all:
            return self.input.numel() // group_size
        return min(self.input.numel(), self.output.numel())


class Launches:
    """Launches collectives of a context.

    Args:
        ctx: the context.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def run(self, exchange: Exchange, group: Group, channel: Channel) -> None:
        """Queue a collective on the current stream."""
        size = exchange.part(group.size)
        if not size:
            return
        as_words = exchange.op == "none"
        output, given = (_flat(one, as_words, size) for one in (exchange.output, exchange.input))
        size = size * exchange.output.element_size() // output.element_size()
        block_bytes = block_of(size * output.element_size(), channel)
        block = block_bytes // output.element_size()
        ccl_exchange[(min(channel.programs, triton.cdiv(size, block)),)](
            output,
            given,
            channel.slots.view(output.dtype),
            channel.flags,
            size,
            self._ctx.get_rank(),
            group.index,
            exchange.sender,
            exchange.receiver,
            group.members,
            self._ctx.heap.bases,
            self._ctx.watchdog.words,
            GROUP_SIZE=group.size,
            BLOCK=block,
            SLOT=channel.slot_bytes // output.element_size(),
            SCATTERED=exchange.scattered,
            OP=exchange.op,
            num_warps=max(1, min(_MOST_WARPS, block_bytes // _WARP_BYTES)),
        )


def block_of(part_bytes: int, channel: Channel) -> int:
    """Return the bytes of a block, a power of two: all programs have one, if that makes no block too small or large."""
    share = triton.next_power_of_2(triton.cdiv(part_bytes, channel.programs))
    return min(channel.slot_bytes, max(_LEAST_BLOCK_BYTES, share))


def _flat(tensor: torch.Tensor, as_words: bool, size: int) -> torch.Tensor:
    """Return a tensor's elements in a row; where they are only moved, as the widest words that a part is made of."""
    flat: Any = tensor.detach().view(-1)
    if not as_words:
        return flat
    flat = flat.view(torch.uint8)
    for dtype in (torch.int32, torch.int16):
        if not (size * tensor.element_size() % dtype.itemsize or flat.data_ptr() % dtype.itemsize):
            return flat.view(dtype) if not flat.storage_offset() % dtype.itemsize else flat
    return flat
