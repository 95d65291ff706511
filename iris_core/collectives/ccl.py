"""`Context.ccl`: collectives on whole tensors that the host of every rank of a group starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..context import Context
from .group import Group, make_group
from .launches import Exchange, Launches
from .operands import checked_pair, operation
from .work import Work

ReduceOp = dist.ReduceOp


class CCL:
    """The collectives of a context; `Context.ccl` is it.

    As torch.distributed's: all ranks of a group make the same calls in the same order, with tensors of the same shapes
    and dtype. A call queues work on the current stream and the host does not wait. On return, in stream order, the
    output is complete and the input may be overwritten. A call can be captured in a CUDA graph. Calls of a group are in
    one order on the device: who uses several streams orders them.

    Tensors are contiguous, on the context's device; they may be on the heap and need not be. `src` and `dst` are ranks
    of the context, as torch's are global ranks. Sums are fp32 for floats of at most 32 bits, in the order of the
    group's ranks, the same bits on every rank and in every run.

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
    ) -> Work | None:
        """Combine all ranks' inputs, element by element, on every rank.

        Args:
            output_tensor: gets the result; without `input_tensor` it is the input, too.
            input_tensor: of the same shape and dtype.
            op: ReduceOp.SUM, MAX or MIN, or "sum", "max", "min".
            group: of `new_group`; None for all ranks.
            async_op: whether to queue on a stream of its own, and return a `Work` to wait for.

        Returns:
            None, or with `async_op` what is waited for.
        """
        input_tensor = output_tensor if input_tensor is None else input_tensor
        group = self._group(group)
        checked_pair("all_reduce", self._ctx, output_tensor, input_tensor, reduces=True)
        return self._run(Exchange("all_reduce", output_tensor, input_tensor, op=operation(op)), group, async_op)

    def all_gather(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Put all ranks' inputs together, in the order of the group, on every rank.

        Args:
            output_tensor: as many elements as all inputs, as of (group size * M, N) or (group size, M, N).
            input_tensor: such as (M, N); may be this rank's part of the output.
            group, async_op: as of `all_reduce`.
        """
        group = self._group(group)
        checked_pair("all_gather", self._ctx, output_tensor, input_tensor, outputs=group.size)
        return self._run(Exchange("all_gather", output_tensor, input_tensor), group, async_op)

    def reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = ReduceOp.SUM,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Combine all ranks' inputs and give each rank its part of the result.

        Args:
            output_tensor: such as (M, N); may be this rank's part of the input.
            input_tensor: as many elements as all outputs, as of (group size * M, N).
            op, group, async_op: as of `all_reduce`.
        """
        group = self._group(group)
        checked_pair("reduce_scatter", self._ctx, output_tensor, input_tensor, inputs=group.size, reduces=True)
        exchange = Exchange("reduce_scatter", output_tensor, input_tensor, op=operation(op), scattered=True)
        return self._run(exchange, group, async_op)

    def all_to_all(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Exchange parts: part p of a rank's input becomes, on rank p, the part with this rank's number.

        Args:
            output_tensor: of the input's shape; may be the input.
            input_tensor: its first dimension is cut in group size equal parts.
            group, async_op: as of `all_reduce`.
        """
        group = self._group(group)
        checked_pair("all_to_all", self._ctx, output_tensor, input_tensor, parts=group.size)
        return self._run(Exchange("all_to_all", output_tensor, input_tensor, scattered=True), group, async_op)

    def broadcast(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor | None = None,
        src: int = 0,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Give every rank the input of `src`.

        Args:
            output_tensor: gets it; without `input_tensor` it is the input, too.
            input_tensor: of the same shape and dtype; others' than `src`'s is not looked at.
            src: the rank of the context that sends.
            group, async_op: as of `all_reduce`.
        """
        input_tensor = output_tensor if input_tensor is None else input_tensor
        group = self._group(group)
        sender = group.index_of(src, "src")
        checked_pair("broadcast", self._ctx, output_tensor, input_tensor)
        return self._run(Exchange("broadcast", output_tensor, input_tensor, sender=sender), group, async_op)

    def reduce(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor: torch.Tensor | None = None,
        dst: int = 0,
        op: Any = ReduceOp.SUM,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Combine all ranks' inputs on `dst`.

        Args:
            output_tensor: gets the result on `dst`, others' is not written and may be None; without `input_tensor` it
                is the input, too.
            input_tensor: of the same shape and dtype.
            dst: the rank of the context that gets the result.
            op, group, async_op: as of `all_reduce`.
        """
        group = self._group(group)
        receiver = group.index_of(dst, "dst")
        output, given = _either("reduce", output_tensor, input_tensor, "output_tensor", receiver == group.index)
        checked_pair("reduce", self._ctx, output, given, reduces=True)
        return self._run(Exchange("reduce", output, given, op=operation(op), receiver=receiver), group, async_op)

    def gather(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor: torch.Tensor,
        dst: int = 0,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Put all ranks' inputs together, in the order of the group, on `dst`.

        Args:
            output_tensor: on `dst` as of `all_gather`; others' is not written and may be None.
            input_tensor: such as (M, N).
            dst: the rank of the context that gets all.
            group, async_op: as of `all_reduce`.
        """
        group = self._group(group)
        receiver = group.index_of(dst, "dst")
        outputs = group.size if output_tensor is not None else 1
        output, given = _either("gather", output_tensor, input_tensor, "output_tensor", receiver == group.index)
        checked_pair("gather", self._ctx, output, given, outputs=outputs)
        return self._run(Exchange("gather", output, given, receiver=receiver), group, async_op)

    def scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor | None,
        src: int = 0,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Give each rank its part of the input of `src`.

        Args:
            output_tensor: such as (M, N).
            input_tensor: on `src`, as many elements as all outputs; others' is not looked at and may be None.
            src: the rank of the context that sends.
            group, async_op: as of `all_reduce`.
        """
        group = self._group(group)
        sender = group.index_of(src, "src")
        inputs = group.size if input_tensor is not None else 1
        given, output = _either("scatter", input_tensor, output_tensor, "input_tensor", sender == group.index)
        checked_pair("scatter", self._ctx, output, given, inputs=inputs)
        return self._run(Exchange("scatter", output, given, scattered=True, sender=sender), group, async_op)

    def _group(self, group: Group | None) -> Group:
        """Return the group that is meant, which this rank is in."""
        if group is None:
            self.prepare()
            assert self._world is not None
            return self._world
        if not isinstance(group, Group) or group.ctx is not self._ctx:
            raise ValueError(f"group is {group!r}; it takes what new_group of the same context returns, or None")
        if group.index is None:
            raise ValueError(
                f"rank {self._ctx.get_rank()} is not in {group!r}; only its ranks take part in its collectives"
            )
        return group

    def _run(self, exchange: Exchange, group: Group, async_op: bool) -> Work | None:
        self._ctx.check()
        self._launches.run(exchange, group, group.channel)
        return None


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
