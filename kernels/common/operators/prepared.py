"""An operator's prepared calls: found, made of a template, or recorded (../launch/launching.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch

from ..call import Call
from ..launch.launching import Calls, Place, kind_of, place_of
from ..launch.recording import Made, New, Recorded, Template
from ..launch.trace import Trace, Untraceable
from ..launch.traced_tensor import TracedTensor
from ..problem import Problem
from .calls_by_rows import CallsByRows
from .operand_checks import is_same

P = TypeVar("P", bound=Problem)
Tensors = Mapping[str, torch.Tensor]


class PreparedCalls(Generic[P]):
    """Prepared calls by rows and operands.

    Args:
        calls: keeps them.
        by_rows: the operator's calls.
        check: raises for operands that a call does not take.
        launch: queues a call with operands and new outputs, by name, and returns its outputs.
    """

    def __init__(
        self,
        calls: Calls,
        by_rows: CallsByRows[P],
        check: Callable[[Call[P], Tensors], None],
        launch: Callable[[Call[P], Tensors, Tensors], tuple[Any, ...]],
    ) -> None:
        self._calls, self._by_rows = calls, by_rows
        self._check, self._launch = check, launch

    def of(self, m: int, operands: Tensors, out: torch.Tensor | None) -> Made:
        """Return the call of so many rows with these operands, and its new outputs, of which `out` may be one."""
        new_outputs = self._by_rows.new_outputs.get(m)
        if new_outputs is None and out is not None:
            new_outputs = self._by_rows.new_outputs_of(m)
        if new_outputs is None:
            return self._made(place_of(operands, m), operands, self._by_rows.new_memory)
        new = tuple(new_outputs.made(out).values())
        place = place_of(operands, m, new)
        prepared = self._calls.find(place)
        if prepared is None:
            return self._made(place, operands, lambda number, shape, dtype: new[number])
        return prepared, new

    def _made(self, place: Place, operands: Tensors, memory: New) -> Made:
        """Make a call, and keep it; its new outputs are where `memory` gives them, whatever the place says."""
        self._calls.make_room()
        by_rows, m = self._by_rows, place[0]
        kind = kind_of(place, by_rows.plans.of(m))
        if by_rows.may_overwrite(operands.values()):
            self._check(by_rows.of(m), operands)
        made = self._calls.bind(kind, m, memory, operands.values())
        if made is None:
            made = self._recorded(place, kind, operands, memory)
        prepared, new = made
        addresses: tuple[int, ...] = ()
        for one in new:  # no comprehension: a frame, a call
            addresses += (one.data_ptr(),)
        self._calls.keep((m, addresses, *place[2:]), prepared)
        by_rows.note_new_outputs(m, prepared.new, new)
        return made

    def _recorded(self, place: Place, kind: Any, operands: Tensors, memory: New) -> Made:
        """Record a call, and keep it as a template if it can be traced; else it is one with these operands alone."""
        m = place[0]
        call = self._by_rows.of(m)
        self._check(call, operands)
        trace = Trace()
        try:
            traced = self._by_rows.traced(trace, m, operands, memory)
            template, made = self._record(trace, place, *traced)
            self._calls.add(kind, template)
        except Untraceable:
            new = {name: memory(number, *room[:2]) for number, (name, room) in enumerate(call.new.items())}
            _, made = self._record(Trace(), place, call, operands, new)
        return made

    def _record(
        self, trace: Trace, place: Place, call: Call[P], operands: Any, new: Mapping[str, Any]
    ) -> tuple[Template, Made]:
        with self._calls.recording_of(trace, place) as recording:
            outputs = self._launch(call, operands, new)
            parts = tuple([_output(one, [*new.values()]) for one in outputs])
            memory = {name: one.memory.tensor if isinstance(one, TracedTensor) else one for name, one in new.items()}
            return self._calls.recorded(
                trace, place[0], Recorded(recording, parts, memory, call.ran_config, call.copied)
            )


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
