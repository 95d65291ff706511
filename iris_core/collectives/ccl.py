"""`Context.ccl`: collectives on whole tensors that the host of every rank of a group starts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from ..backends.base import Stream
from ..context import Context
from .config import Config
from .group import Group, make_group
from .launches import Launches
from .operands import Call, operation
from .work import Work

ReduceOp = dist.ReduceOp
DEFAULT = Config()
_unnamed = contextlib.nullcontext()
_TEXT_BYTES = 512  # of what a rank gives, compared where IRIS_DEBUG=1


class CCL:
    """The collectives of a context; `Context.ccl` is it.

    As torch.distributed's: all ranks of a group make the same calls in the same order, with tensors of the same shapes
    and dtype. A call queues work on the current stream and the host does not wait. On return, in stream order, the
    output is complete and the input may be overwritten. A call can be captured in a CUDA graph. Calls of a group are in
    one order on the device: who uses several streams orders them.

    Tensors are contiguous, on the context's device; they may be on the heap and need not be. `src` and `dst` are ranks
    of the context, as torch's are global ranks. Floats of at most 32 bits are summed in fp32, in the order of the
    group's ranks; only all-reduce's "ring" sums around the ring and rounds at each rank. Every rank has the same bits,
    in every run.

    The first collective of all ranks, `prepare` and `new_group` make flags and slots on the heap, which never grow.

    All raise ValueError for tensors, ranks, groups and operations that make no sense, and what `Context.check` raises.
    With ``IRIS_DEBUG=1`` what the ranks give is compared first, and if it differs all ranks of the group raise.

    Args:
        ctx: the context.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._world: Group | None = None
        self._launches = Launches(ctx)
        self._stream: Stream | None = None

    def prepare(self) -> None:
        """Make what collectives of all ranks work with, if it is not there; collective over all ranks.

        The first such collective does it, too. It cannot be done while a CUDA graph is captured, nor by `send` and
        `recv`, which are not of all ranks.

        Raises:
            HeapExhausted: there is no room for it on the heap.
            TimeoutError, PeerError: see `Context.check`.
        """
        if self._world is None:
            self._world = self.new_group()

    def new_group(self, ranks: Sequence[int] | None = None) -> Group:
        """Make a group of ranks; collective over all ranks of the context, also those not in it.

        Args:
            ranks: of the context, in the order of the group, the same on all; None for all ranks.

        Raises:
            ValueError: there are no such ranks, or one comes twice; on every rank.
            HeapExhausted: there is no room for its flags and slots.
            RuntimeError: a CUDA graph is being captured.
        """
        return make_group(self._ctx, ranks)

    def all_reduce(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor | None = None,
        op: Any = ReduceOp.SUM,
        group: Group | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Combine all ranks' inputs, element by element, on every rank.

        Args:
            output_tensor: gets the result; without `input_tensor` it is the input, too.
            input_tensor: of the same shape and dtype.
            op: ReduceOp.SUM, MAX or MIN, or "sum", "max", "min".
            group: of `new_group`; None for all ranks.
            async_op: whether to queue on a stream of its own, and return a `Work` to wait for.
            config: how to do it; None for `Config()`.

        Returns:
            None, or with `async_op` what is waited for.
        """
        input_tensor = output_tensor if input_tensor is None else input_tensor
        group = self._group(group)
        return self._run(Call("all_reduce", output_tensor, input_tensor, op=operation(op)), group, async_op, config)

    def all_gather(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Put all ranks' inputs together, in the order of the group, on every rank.

        Args:
            output_tensor: as many elements as all inputs, as of (group size * M, N) or (group size, M, N).
            input_tensor: such as (M, N); may be this rank's part of the output.
            group, async_op, config: as of `all_reduce`.
        """
        group = self._group(group)
        return self._run(Call("all_gather", output_tensor, input_tensor), group, async_op, config)

    def reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = ReduceOp.SUM,
        group: Group | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Combine all ranks' inputs and give each rank its part of the result.

        Args:
            output_tensor: such as (M, N); may be this rank's part of the input.
            input_tensor: as many elements as all outputs, as of (group size * M, N).
            op, group, async_op, config: as of `all_reduce`.
        """
        group = self._group(group)
        return self._run(Call("reduce_scatter", output_tensor, input_tensor, op=operation(op)), group, async_op, config)

    def all_to_all(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Exchange parts: part p of a rank's input becomes, on rank p, the part with this rank's number.

        Args:
            output_tensor: of the input's shape; may be the input.
            input_tensor: its first dimension is cut in group size equal parts.
            group, async_op, config: as of `all_reduce`.
        """
        group = self._group(group)
        return self._run(Call("all_to_all", output_tensor, input_tensor), group, async_op, config)

    def broadcast(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor | None = None,
        src: int = 0,
        group: Group | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Give every rank the input of `src`.

        Args:
            output_tensor: gets it; without `input_tensor` it is the input, too.
            input_tensor: of the same shape and dtype; others' than `src`'s is not looked at.
            src: the rank of the context that sends.
            group, async_op, config: as of `all_reduce`.
        """
        input_tensor = output_tensor if input_tensor is None else input_tensor
        group = self._group(group)
        sender = group.index_of(src, "src")
        return self._run(Call("broadcast", output_tensor, input_tensor, sender=sender), group, async_op, config)

    def reduce(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor: torch.Tensor | None = None,
        dst: int = 0,
        op: Any = ReduceOp.SUM,
        group: Group | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Combine all ranks' inputs on `dst`.

        Args:
            output_tensor: gets the result on `dst`, others' is not written and may be None; without `input_tensor` it
                is the input, too.
            input_tensor: of the same shape and dtype.
            dst: the rank of the context that gets the result.
            op, group, async_op, config: as of `all_reduce`.
        """
        group = self._group(group)
        receiver = group.index_of(dst, "dst")
        output, given = _either("reduce", output_tensor, input_tensor, "output_tensor", receiver == group.index)
        return self._run(Call("reduce", output, given, op=operation(op), receiver=receiver), group, async_op, config)

    def gather(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor: torch.Tensor,
        dst: int = 0,
        group: Group | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Put all ranks' inputs together, in the order of the group, on `dst`.

        Args:
            output_tensor: on `dst` as of `all_gather`; others' is not written and may be None.
            input_tensor: such as (M, N).
            dst: the rank of the context that gets all.
            group, async_op, config: as of `all_reduce`.
        """
        group = self._group(group)
        receiver = group.index_of(dst, "dst")
        output, given = _either("gather", output_tensor, input_tensor, "output_tensor", receiver == group.index)
        return self._run(Call("gather", output, given, receiver=receiver), group, async_op, config)

    def scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor | None,
        src: int = 0,
        group: Group | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Give each rank its part of the input of `src`.

        Args:
            output_tensor: such as (M, N).
            input_tensor: on `src`, as many elements as all outputs; others' is not looked at and may be None.
            src: the rank of the context that sends.
            group, async_op, config: as of `all_reduce`.
        """
        group = self._group(group)
        sender = group.index_of(src, "src")
        given, output = _either("scatter", input_tensor, output_tensor, "input_tensor", sender == group.index)
        return self._run(Call("scatter", output, given, sender=sender), group, async_op, config)

    def _group(self, group: Group | None) -> Group:
        """Return the group that is meant, which this rank is in."""
        if group is None:
            self.prepare()
            assert self._world is not None
            return self._world
        if not isinstance(group, Group) or group.ctx is not self._ctx:
            made_of = (
                f"new_group({dist.get_process_group_ranks(group)})"
                if isinstance(group, dist.ProcessGroup)
                else "new_group"
            )
            raise ValueError(f"group is {group!r}; it takes what {made_of} of the same context returns, or None")
        if group.index is None:
            raise ValueError(
                f"rank {self._ctx.get_rank()} is not in {group!r}; only its ranks take part in its collectives"
            )
        return group

    def send(self, tensor: torch.Tensor, dst: int, group: Group | None = None, config: Config | None = None) -> None:
        """Send a tensor to a rank that calls `recv`; messages between two ranks arrive in the order they were sent.

        In stream order, a small message is sent before the receiver is there, a larger one is taken block by block.

        Args:
            tensor: what to send.
            dst: the rank of the context that receives, another one of the group.
            group, config: as of `all_reduce`; of None, some collective of all ranks, or `prepare`, came before.

        Raises:
            RuntimeError: nothing came before.
        """
        group = self._group_of_pair(group)
        self._message(Call("send", tensor, tensor, receiver=group.index_of(dst, "dst")), dst, group, config)

    def recv(self, tensor: torch.Tensor, src: int, group: Group | None = None, config: Config | None = None) -> None:
        """Receive a tensor from a rank that calls `send` with one of the same size and dtype.

        Args:
            tensor: gets it.
            src: the rank of the context that sends, another one of the group.
            group, config: as of `send`.

        Raises:
            RuntimeError: as of `send`.
        """
        group = self._group_of_pair(group)
        self._message(Call("recv", tensor, tensor, sender=group.index_of(src, "src")), src, group, config)

    def device_barrier(self, group: Group | None = None) -> None:
        """Queue a barrier of a group on the current stream; the host does not wait.

        Args:
            group: as of `all_reduce`.
        """
        group = self._group(group)
        self._ctx.check()
        self._launches.barrier(group, group.channel)

    def _group_of_pair(self, group: Group | None) -> Group:
        if group is None and self._world is None:
            raise RuntimeError("send and recv are not of all ranks; all call ctx.ccl.prepare() first")
        return self._group(group)

    def _message(self, call: Call, peer: int, group: Group, config: Config | None) -> None:
        if peer == self._ctx.get_rank():
            raise ValueError(f"{call.name}: rank {peer} is this rank; copy_ copies a tensor")
        self._ctx.check()
        with self._in_profile(call, group):
            self._launches.run(call, group, group.pair_channel, config or DEFAULT)
        _count_write(call, group)

    def _in_profile(self, call: Call, group: Group) -> AbstractContextManager[None]:
        """Name a call in a profiler's timeline, if that was asked for."""
        profiler_range = self._ctx.profiler_range
        return _unnamed if profiler_range is None else profiler_range(f"ccl.{call.describe(group.size)}")

    def _run(self, call: Call, group: Group, async_op: bool, config: Config | None) -> Work | None:
        with self._in_profile(call, group):
            return self._queue(call, group, async_op, config)

    def _queue(self, call: Call, group: Group, async_op: bool, config: Config | None) -> Work | None:
        self._ctx.check()
        config = config or DEFAULT
        if self._ctx.debug_mode:
            self._compare(call, group, config)
        if not async_op:
            self._launches.run(call, group, group.channel, config)
            _count_write(call, group)
            return None
        if self._stream is None:
            self._stream = self._ctx.make_stream()
        self._stream.wait_for_current()
        with self._stream.as_current():
            self._launches.run(call, group, group.async_channel, config)
        _count_write(call, group)
        return Work(self._stream, (call.output, call.input))

    def _compare(self, call: Call, group: Group, config: Config) -> None:
        """Raise on every rank of the group, if what one gives makes no sense or is not what the others give."""
        if self._ctx.backend.is_capturing():
            return
        device = self._ctx.get_device()
        mistake = None
        try:
            call.key()
            call.check(self._ctx, group.size)
            own = f"{call.describe(group.size)}, {self._launches.variant(call, group, config)}"
        except ValueError as error:
            mistake, own = error, str(error)
        text = own.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        given = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        texts = torch.empty(group.size, _TEXT_BYTES, dtype=torch.uint8, device=device)
        self._launches.run(Call("all_gather", texts, given), group, group.channel, DEFAULT)
        of_ranks = [bytes(row.tolist()).decode(errors="replace").strip() for row in texts.cpu()]
        self._ctx.check()
        if mistake is not None:
            raise mistake
        if len(set(of_ranks)) > 1:
            listed = "; ".join(f"rank {rank}: {one}" for rank, one in zip(group.ranks, of_ranks, strict=True))
            raise ValueError(f"the ranks' collectives differ: {listed}")


def _count_write(call: Call, group: Group) -> None:
    """Let autograd see that the output was written, where it was."""
    if call.receiver in (-1, group.index):
        increment_version(call.output)


def _either(
    name: str, wanted: torch.Tensor | None, other: torch.Tensor | None, argument: str, is_needed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors, of which one may stand for both; `wanted`, of that name, must be there if it is needed."""
    if wanted is None and (is_needed or other is None):
        raise ValueError(f"{name} takes {argument} on this rank")
    first = other if wanted is None else wanted
    second = wanted if other is None else other
    assert first is not None
    assert second is not None
    return first, second
