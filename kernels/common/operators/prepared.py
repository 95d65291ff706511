"""Calls that cost the host little: what a call queues is prepared once, and from then on only queued.

The parts are in ../launch.

A launch through Triton binds, specialises and looks up its arguments, and encodes its tensor descriptors, every time.
An operator's calls differ in where A and B lie, and in how many rows there are:

| A and B | the host |
|---|---|
| lie where they lay in an earlier call, with as many rows | queues the steps of that call |
| lie elsewhere, or have other rows, and pass a template's guards (trace.py) | makes steps of what its function gives |
| otherwise | has the variant queue the call, traced, which gives another template |

For each launch a kernel is found that takes its integers (kernels.py), or compiled.

A call of many steps, such as copies and waits between streams, becomes a graph when it is made again (graphs.py): then
it costs the host one launch. No graph is made of a call in which a stream waits for a word that a kernel counts:
streams take work in the order in which it was queued, the kernel first, and a graph's branches in any order. There what
the stream does, which is the same in every call, is a graph of its own, queued behind the kernel (`Call.in_one`).

A step hands a compiled kernel's launcher what Triton would hand it: Triton's own code expands the descriptors, and
addresses are passed as numbers. No step keeps an operand: a product that torch makes among kernels of ours is given the
call's when it is queued (`Channel.call_torch`). All kernels of a call are loaded before the first is queued.

Only on NVIDIA GPUs. Elsewhere, in debug mode, and while Triton has launch hooks (a profiler's), launches go through
Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch

from ..call import Call
from ..config import GemmConfig
from ..launch.channel import Channel, Place
from ..launch.recording import Made, New, Template
from ..launch.trace import Trace, Untraceable, value_of
from ..launch.traced_tensor import TracedTensor
from ..problem import Problem
from .calls_by_rows import CallsByRows
from .operand_checks import is_same

P = TypeVar("P", bound=Problem)
Tensors = Mapping[str, torch.Tensor]

_MOST_CALLS = 1024  # prepared calls that an operator keeps: of some 10 KB each
_MOST_KINDS, _MOST_OF_A_KIND = 64, 64  # templates that an operator keeps: of some 20 KB each


class PreparedCalls(Generic[P]):
    """Prepared calls by rows and operands.

    Args:
        channel: keeps them.
        by_rows: the operator's calls.
        check: raises for operands that a call does not take.
        launch: queues a call with operands and new outputs, by name, and returns its outputs.
    """

    def __init__(
        self,
        channel: Channel,
        by_rows: CallsByRows[P],
        check: Callable[[Call[P], Tensors], None],
        launch: Callable[[Call[P], Tensors, Tensors], tuple[Any, ...]],
    ) -> None:
        self._channel, self._by_rows = channel, by_rows
        self._find, self._graphs = channel.prepared.get, channel.graphs
        self._check, self._launch = check, launch

    def of(self, m: int, place: Place, operands: Tensors, out: torch.Tensor | None) -> Made:
        """Return the call of so many rows with operands at a place, and its new outputs, of which `out` may be one."""
        new_outputs = self._by_rows.new_outputs.get(m)
        if new_outputs is None and out is not None:
            new_outputs = self._by_rows.new_outputs_of(m)
        if new_outputs is None:
            return self._made(m, place, operands, self._by_rows.new_memory)
        new: tuple[torch.Tensor, ...] = ()
        addresses: tuple[int, ...] = ()
        if new_outputs.names or out is not None:
            new = tuple(new_outputs.made(out).values())
            for one in new:  # no comprehension: a frame, a call
                addresses += (one.data_ptr(),)
        prepared = self._find((m, addresses, place))
        if prepared is None:
            return self._made(m, place, operands, lambda number, shape, dtype: new[number])
        return prepared, new

    def _made(self, m: int, place: Place, operands: Tensors, memory: New) -> Made:
        """Make a call, and keep it; its new outputs are where `memory` gives them."""
        channel, by_rows = self._channel, self._by_rows
        if len(channel.prepared) >= _MOST_CALLS:
            channel.forget_calls()
        kind = _kind_of(place, by_rows.config_of(m))
        if by_rows.may_overwrite(operands.values()):
            self._check(by_rows.of(m), operands)
        made = self._bound(kind, m, memory, operands.values())
        if made is None:
            made = self._recorded(m, place, kind, operands, memory)
        prepared, new = made
        addresses: tuple[int, ...] = ()
        for one in new:  # no comprehension: a frame, a call
            addresses += (one.data_ptr(),)
        channel.prepared[m, addresses, place] = prepared
        by_rows.note_new_outputs(m, prepared.new, new)
        return made

    def _bound(self, kind: Any, m: int, memory: New, operands: Iterable[torch.Tensor]) -> Made | None:
        """Return a call made of a template of its kind, and its new outputs; None if there is none that fits."""
        templates = self._channel.templates.get(kind, [])
        for number, template in enumerate(templates):
            if made := template.bind(m, memory, operands):
                if number:  # the first is tried first
                    templates.insert(0, templates.pop(number))
                return made
        return None

    def _recorded(self, m: int, place: Place, kind: Any, operands: Tensors, memory: New) -> Made:
        """Record a call, and keep it as a template if it can be traced; else it is one with these operands alone."""
        call, templates = self._by_rows.of(m), self._channel.templates
        self._check(call, operands)
        trace = Trace()
        try:
            traced = self._by_rows.traced(trace, m, operands, memory)
            template, made = self._record(trace, m, place, *traced)
        except Untraceable:
            new = {name: memory(number, *room[:2]) for number, (name, room) in enumerate(call.new.items())}
            _, made = self._record(Trace(), m, place, call, operands, new)
            return made
        if kind not in templates and len(templates) == _MOST_KINDS:
            templates.clear()
        of_kind = templates.setdefault(kind, [])
        of_kind.insert(0, template)
        del of_kind[_MOST_OF_A_KIND:]
        return made

    def _record(
        self, trace: Trace, m: int, place: Place, call: Call[P], operands: Any, new: Mapping[str, Any]
    ) -> tuple[Template, Made]:
        channel = self._channel
        with channel.recording_of(trace, place) as recording:
            outputs = self._launch(call, operands, new)
            returned = tuple([_output(one, [*new.values()]) for one in outputs])
            memory = tuple([one.memory.tensor if isinstance(one, TracedTensor) else one for one in new.values()])
            parts = *recording.taken(), returned, memory
            kept = recording, trace.source(parts), tuple(new), call.ran_config, call.copied
            template = Template(*kept, self._graphs, channel.inner)
            return template, template.made(m, *value_of(parts))


def _kind_of(place: Place, config: GemmConfig | None) -> Any:
    """Return what calls of one template have in common: how operands lie, and the plan."""
    return config, place[1::5], place[3::5], place[4::5]


def _output(output: Any, new: list[Any]) -> Any:
    """Return an output as a `PreparedCall` has it, by the memory of new ones."""
    for number, room in enumerate(new):
        if isinstance(output, TracedTensor):
            if output.memory is room.memory:
                is_whole = (output.shape, output.stride(), output.offset) == (room.shape, room.stride(), 0)
                return number if is_whole else (number, output.shape, output.stride(), output.offset)
        elif output.untyped_storage().data_ptr() == room.untyped_storage().data_ptr():
            offset = output.storage_offset() - room.storage_offset()
            return number if is_same(output, room) else (number, tuple(output.shape), output.stride(), offset)
    return output.as_tensor() if isinstance(output, TracedTensor) else output
