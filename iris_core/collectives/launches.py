"""What a collective queues: prepared once for tensors that lie where they lie, and from then on only queued.

The host time of a call is that of finding its key. On NVIDIA GPUs launches are prepared (loaded_kernel.py); elsewhere
they go through Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton

from ..backends.base import Step, Stream
from ..context import Context
from .all_reduce import ccl_all_reduce_ring, ccl_all_reduce_two_shot
from .config import AUTO, VARIANTS, Config
from .exchange import ccl_barrier, ccl_exchange
from .group import Channel, Group
from .loaded_kernel import LoadedKernel, compiled_kernel
from .operands import SHAPES, Call
from .send_recv import ccl_recv, ccl_send

_VECTOR_BYTES = 16
_LEAST_BLOCK_BYTES = 128 * _VECTOR_BYTES
_MOST_WARPS = 16
_MOST_CALLS = 1024  # that are kept
ONE_SHOT_BYTES = 512 << 10  # of an all-reduce, times the inputs that one shot sends more than two shots: W - 2
COPY_BYTES = 8 << 20  # of a part from which on a copy engine is worth two barriers; not measured yet
# That a rank sends, from which on a block is combined while the next one arrives: as fast as `direct` at 8 MiB, faster
# at 32 (results/2026-11-26-h100x2/ccl-variants.csv).
PIPELINED_BYTES = 32 << 20
_TO_HEAPS = ("copy_engine", "gathered")  # variants of all-reduce, all-gather and broadcast that write peers' outputs


class Launches:
    """Prepares and queues the collectives of a context.

    Args:
        ctx: the context.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._calls: dict[Any, Sequence[Step]] = {}
        self._kernels: dict[Any, LoadedKernel] = {}
        self._barriers: dict[Channel, Step] = {}
        self._stream: Stream | None = None  # of copies beside others

    def run(self, call: Call, group: Group, channel: Channel, config: Config) -> None:
        """Queue a collective on the current stream.

        Raises:
            ValueError: the tensors do not fit, or the variant does not do it.
        """
        key = (call.key(), channel, config)
        steps = self._calls.get(key)
        if steps is None:
            call.check(self._ctx, group.size)
            variant = self.variant(call, group, config)
            steps = self._prepare(call, variant, group, channel, config)
            if self._ctx.backend.name == "cuda" and variant not in _TO_HEAPS:  # whose copies keep the operands
                if len(self._calls) == _MOST_CALLS:
                    self._calls.clear()
                self._calls[key] = steps
        for step in steps:
            step()

    def barrier(self, group: Group, channel: Channel) -> None:
        """Queue a barrier of the group on the current stream."""
        self._barrier(group, channel)()

    def _prepare(self, call: Call, variant: str, group: Group, channel: Channel, config: Config) -> Sequence[Step]:
        size = call.part(group.size)
        if not size:
            return ()
        if variant == "copy_engine":
            return self._copies(call, group, channel)
        if variant == "gathered":
            return self._scatter_and_gather(call, group, channel, config)
        output, given = (_flat(one, call.op == "none", size) for one in (call.output, call.input))
        size = size * call.output.element_size() // output.element_size()
        if variant in ("two_shot", "ring"):
            part = _rounded(triton.cdiv(size, group.size))
            kernel = ccl_all_reduce_two_shot if variant == "two_shot" else ccl_all_reduce_ring
            arguments = {"out_ptr": output, "in_ptr": given, "size": size, "part": part, "OP": call.op}
            return (self._step(kernel, arguments, part, output, group, channel, config),)
        if call.name == "send":
            arguments = {"in_ptr": given, "size": size, "peer": call.receiver}
            return (self._step(ccl_send, arguments, size, output, group, channel, config),)
        if call.name == "recv":
            arguments = {"out_ptr": output, "size": size, "peer": call.sender}
            return (self._step(ccl_recv, arguments, size, output, group, channel, config),)
        arguments = {"out_ptr": output, "in_ptr": given, "size": size, "OP": call.op}
        arguments |= {"sender": call.sender, "receiver": call.receiver, "SCATTERED": SHAPES[call.name].scattered}
        arguments["PIPELINED"] = variant == "pipelined"
        return (self._step(ccl_exchange, arguments, size, output, group, channel, config),)

    def variant(self, call: Call, group: Group, config: Config) -> str:
        """Return by which variant a collective is done.

        Raises:
            ValueError: the variant that the caller chose does not do it.
        """
        chosen = getattr(config, f"{call.name}_variant", "direct")
        if group.size == 1 and SHAPES[call.name].reduces:
            return "one_shot" if call.name == "all_reduce" else "direct"  # the only one for a rank alone
        is_symmetric = self._ctx.heap.contains(call.output)
        if chosen in _TO_HEAPS and not is_symmetric:
            others = [repr(one) for one in VARIANTS[call.name] if one not in (AUTO, *_TO_HEAPS)]
            raise ValueError(
                f'{call.name}: the variant "{chosen}" takes an output on the heap, as ctx.empty makes it; '
                f"{', '.join(others)} {'take' if others[1:] else 'takes'} any"
            )
        if chosen != AUTO:
            return str(chosen)
        nbytes = call.part(group.size) * call.output.element_size()
        if call.name in ("all_gather", "broadcast"):
            return "copy_engine" if is_symmetric and nbytes >= COPY_BYTES else "direct"
        sent_bytes = nbytes * (group.size - 1) * (2 / group.size if call.name == "all_reduce" else 1)
        is_large = sent_bytes >= PIPELINED_BYTES
        if call.name in ("reduce_scatter", "all_to_all"):
            return "pipelined" if is_large else "direct"
        if call.name == "all_reduce" and is_symmetric and is_large:
            return "gathered"
        return "one_shot" if nbytes * (group.size - 2) <= ONE_SHOT_BYTES else "two_shot"

    def _copies(self, call: Call, group: Group, channel: Channel, is_combined: bool = False) -> Sequence[Step]:
        """Copy this member's part to all outputs, which lie in the same place on all heaps, between two barriers.

        To its own output on another stream: no other rank writes there, and the links need not wait for it.

        Args:
            call, group, channel: as of `run`.
            is_combined: whether the part was combined in its place from what all others sent. Then they have come to
                this call, and have read what the copies overwrite: the first barrier is not needed.
        """
        barrier = self._barrier(group, channel)
        if call.sender not in (-1, group.index):
            return (barrier, barrier)
        assert group.index is not None
        size = call.part(group.size)
        start = group.index * size if call.sender < 0 else 0
        source = call.input.detach().view(-1)
        views = self._ctx.heap.peer_view(call.output.detach().view(-1)[start : start + size])
        order = [group.ranks[(group.index + step) % group.size] for step in range(1, group.size)]
        copies = [functools.partial(views[rank].copy_, source, non_blocking=True) for rank in order]
        if is_combined:
            return (*copies, barrier)
        if self._stream is None:
            self._stream = self._ctx.make_stream()
        stream, own = self._stream, views[group.ranks[group.index]]

        def copy_own() -> None:
            with stream.as_current():
                own.copy_(source, non_blocking=True)

        return (stream.wait_for_current, copy_own, barrier, *copies, barrier, stream.current_waits)

    def _scatter_and_gather(self, call: Call, group: Group, channel: Channel, config: Config) -> Sequence[Step]:
        """Combine this member's part by the pipelined kernel, in its place in the output; copy it to all outputs.

        Parts are equal and on 16 bytes; what is left of the tensor behind them is reduced in one shot.
        """
        assert group.index is not None
        output, given = call.output.detach().view(-1), call.input.detach().view(-1)
        whole = output.numel() // (group.size * _VECTOR_BYTES) * (group.size * _VECTOR_BYTES)
        rest = Call("all_reduce", output[whole:], given[whole:], call.op)
        steps = self._prepare(rest, "one_shot", group, channel, config)
        if not whole:
            return steps
        part = output[:whole].view(group.size, -1)[group.index]
        scatter = Call("reduce_scatter", part, given[:whole], call.op)
        copies = self._copies(Call("all_gather", output[:whole], part), group, channel, is_combined=True)
        return (*self._prepare(scatter, "pipelined", group, channel, config), *copies, *steps)

    def _barrier(self, group: Group, channel: Channel) -> Step:
        """Return what queues a barrier on the current stream; it is prepared once."""
        if channel not in self._barriers:
            arguments = {"state_ptr": channel.barrier}
            self._barriers[channel] = self._launch(ccl_barrier, 1, arguments, {"num_warps": 1}, group)
        return self._barriers[channel]

    def _step(
        self,
        kernel: Any,
        arguments: dict[str, Any],
        size: int,
        words: torch.Tensor,
        group: Group,
        channel: Channel,
        config: Config,
    ) -> Step:
        """Return what launches a kernel that moves parts of `size` elements, of such words, in blocks."""
        itemsize = words.element_size()
        programs = min(channel.programs, config.comm_sms or channel.programs)
        share = triton.next_power_of_2(triton.cdiv(size * itemsize, programs))  # one block per program, if it may be so
        block_bytes = min(channel.slot_bytes, max(_LEAST_BLOCK_BYTES, share))
        arguments |= {"staging_ptr": channel.slots.view(words.dtype), "BLOCK": block_bytes // itemsize}
        arguments |= {"SLOT": channel.slot_bytes // itemsize}
        arguments["words_ptr" if "words_ptr" in kernel.arg_names else "flags_ptr"] = channel.flags
        options = {"num_warps": min(_MOST_WARPS, block_bytes // self._warp_bytes())}
        blocks = triton.cdiv(size * itemsize, block_bytes)
        if blocks <= programs and self._launches_early():
            options["launch_pdl"] = True  # worth the 3 us of a launch; programs of a long kernel come to SMs unevenly
        return self._launch(kernel, min(programs, blocks), arguments, options, group)

    def _warp_bytes(self) -> int:
        """Return how much a warp accesses at once."""
        return (64 if self._ctx.backend.name == "hip" else 32) * _VECTOR_BYTES

    def _launches_early(self) -> bool:
        """Return whether the device has programmatic dependent launch."""
        arch = self._ctx.get_arch()
        return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90

    def _launch(
        self, kernel: Any, programs: int, arguments: dict[str, Any], options: dict[str, int], group: Group
    ) -> Step:
        """Return what launches a kernel on the stream that is current when it is called."""
        arguments |= {"rank": self._ctx.get_rank(), "index": group.index, "members_ptr": group.members}
        arguments |= {"heap_bases": self._ctx.heap.bases, "GROUP_SIZE": group.size}
        if "watchdog_ptr" in kernel.arg_names:
            arguments["watchdog_ptr"] = self._ctx.watchdog.words
        backend: Any = self._ctx.backend
        if backend.name != "cuda":
            return functools.partial(kernel.run, grid=(programs,), warmup=False, **options, **arguments)
        compiled = compiled_kernel(kernel, programs, arguments, options)
        if compiled not in self._kernels:
            self._kernels[compiled] = LoadedKernel(compiled)
        in_order = [arguments[name] for name in kernel.arg_names]
        return self._kernels[compiled].launching(programs, backend.current_stream, in_order)


def _rounded(size: int) -> int:
    """Return the next number of elements that keeps what follows on 16 bytes, whatever the dtype."""
    return triton.cdiv(size, _VECTOR_BYTES) * _VECTOR_BYTES


def _flat(tensor: torch.Tensor, are_words: bool, size: int) -> torch.Tensor:
    """Return a tensor's elements in a row; where they are only moved, as the widest words that a part is made of."""
    flat: Any = tensor.detach().view(-1)
    if not are_words:
        return flat
    flat = flat.view(torch.uint8)
    start = flat.storage_offset()
    for dtype in (torch.int32, torch.int16):
        if not (size * tensor.element_size() % dtype.itemsize or flat.data_ptr() % dtype.itemsize):
            return flat.view(dtype) if not start % dtype.itemsize else flat
    return flat
