"""Groups of ranks, and what a group's collectives work with on the heap: flags, slots, barrier words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from ..context import Context
from ..utils.settings import is_whole
from .exchange import DEPTH
from .send_recv import MESSAGE_WORDS

MOST_PROGRAMS = 128  # of a collective: small blocks, since a program loads, sends and combines one after the other
ASYNC_PROGRAMS = 64  # of a collective beside other kernels, which have the other SMs
MESSAGE_PROGRAMS = 16
_FLIGHT_BYTES = 2 << 20  # on the way to a peer at a time: what an NVLink of 450 GB/s carries in 4.7 µs
_BLOCKS_BYTES = 8 << 20  # of one block per program from all members
_INTERPRETED_SLOT_BYTES = 4 << 10


class Channel:
    """Flags and slots that calls in one order share: those of one stream, the same on all members.

    Args:
        ctx: whose heap they are on; making a channel is collective over all its ranks.
        members: the ranks of the group.
        programs: most programs of a call.
        what: its calls are, for reports of failed waits.
        words: a member for each program, of messages; 0 of collectives.

    Attributes:
        flags: (programs, group size + 1) int64 words; of messages (programs, group size, words).
        slots: (programs, DEPTH, group size, slot_bytes) bytes.
        slot_bytes: of a slot.
        barrier: (group size + 1) int64 words.
    """

    def __init__(self, ctx: Context, members: Sequence[int], programs: int, what: str, words: int = 0) -> None:
        size = len(members)
        row = words * size or size + 1
        self.programs = programs
        self.slot_bytes = _INTERPRETED_SLOT_BYTES
        if not ctx.is_interpreted():
            flight_bytes = min(_FLIGHT_BYTES, _BLOCKS_BYTES >> (size - 1).bit_length())
            self.slot_bytes = flight_bytes // triton.next_power_of_2(max(programs, ASYNC_PROGRAMS))
        self.flags = ctx.heap.allocate((programs, row), torch.int64).zero_()
        self.slots = ctx.heap.allocate((programs, DEPTH.value, size, self.slot_bytes), torch.uint8)
        self.barrier = ctx.heap.allocate((size + 1,), torch.int64).zero_()

        def describe(word: int, _: int) -> str:
            program, place = divmod(word, row)
            peer = members[place // words if words else place % size]
            return f"rank {peer}'s part in {what} of {_named(members)}, program {program}"

        ctx.watchdog.watch(self.flags, describe)
        ctx.watchdog.watch(
            self.barrier,
            lambda word, _: f"rank {members[word % size]} at a barrier in {what} of {_named(members)}",
        )


class Group:
    """Some of a context's ranks, which do collectives with each other. `CCL.new_group` makes one.

    Attributes:
        ranks: in the context, in the order of the group.
        size: how many they are.
        index: of this rank among them; None, if it is none of them.
        members: the ranks on the device, for kernels; None, where they are 0 to size - 1.
        channel: of calls on the current stream.
        async_channel: of calls with ``async_op=True``.
        pair_channel: of `send` and `recv`.
    """

    def __init__(self, ctx: Context, ranks: Sequence[int]) -> None:
        self.ctx = ctx
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        rank = ctx.get_rank()
        self.index = self.ranks.index(rank) if rank in self.ranks else None
        units = ctx.get_cu_count()
        programs, async_programs, message_programs = (
            min(most, units) for most in (MOST_PROGRAMS, ASYNC_PROGRAMS, MESSAGE_PROGRAMS)
        )
        with ctx.collective_allocation(f"make the group of {_named(self.ranks)}"):
            self.channel = Channel(ctx, self.ranks, programs, "a collective")
            self.async_channel = Channel(ctx, self.ranks, async_programs, "a collective with async_op=True")
            self.pair_channel = Channel(ctx, self.ranks, message_programs, "send or recv", MESSAGE_WORDS.value)
        is_context = self.ranks == tuple(range(self.size))
        self.members = None if is_context else torch.tensor(self.ranks, dtype=torch.int32, device=ctx.get_device())
        ctx.barrier()  # no rank signals before all flags are zero

    def __repr__(self) -> str:
        return f"Group({list(self.ranks)})"

    def index_of(self, rank: int, name: str) -> int:
        """Return the place of a rank of the context in this group.

        Raises:
            ValueError: it is not in the group; `name` is the argument's.
        """
        if not is_whole(rank, 0) or rank not in self.ranks:
            raise ValueError(
                f"{name} is {rank!r}; it takes a rank of the context that is in the group, {_named(self.ranks)}"
            )
        return self.ranks.index(rank)


def make_group(ctx: Context, ranks: Sequence[int] | None) -> Group:
    """Make a group; collective over all ranks of the context, with the same ranks on all.

    Raises:
        ValueError: there are no such ranks, or one comes twice, or they differ between ranks; on every rank.
    """
    if ctx.backend.is_capturing():
        raise RuntimeError("a CUDA graph is being captured; make the group, or call ctx.ccl.prepare(), before")
    world_size = ctx.get_num_ranks()
    given = list(range(world_size)) if ranks is None else list(ranks)
    with ctx.collective_section("make a group"):
        is_right = bool(given) and all(is_whole(rank, 0) and rank < world_size for rank in given)
        if not is_right or len(set(given)) < len(given):
            raise ValueError(f"ranks are {given}; a group takes different ranks of the context, 0 to {world_size - 1}")
    ctx.agree("the ranks of a group", given)
    return Group(ctx, given)


def _named(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"
