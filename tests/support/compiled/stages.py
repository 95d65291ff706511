"""Compiling with Triton as far as a test looks: to the GPU dialect, to assembly, or to what a launch needs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from triton import knobs


class EndedError(Exception):
    """Ends a compilation, and hands out what it has come to."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


def end(module: Any, metadata: Any) -> None:
    raise EndedError(module)


def to_assembly() -> contextlib.AbstractContextManager[None]:
    """Within the block Triton compiles to assembly, and leaves the last stage out: kernels have no machine code."""
    return other_stages("assembly", lambda stages: stages.update({[*stages][-1]: lambda code, metadata: b""}))


def for_launches() -> contextlib.AbstractContextManager[None]:
    """Within the block Triton compiles to its GPU dialect alone: kernels can be launched where no GPU takes them.

    From there a launch has the layouts of descriptors, by which it encodes them.
    """
    return other_stages("launches", lambda stages: stages.update(dict.fromkeys(_behind_ttgir(stages), _described)))


def _behind_ttgir(stages: dict[str, Any]) -> list[str]:
    names = list(stages)
    return names[names.index("ttgir") + 1 :]


def _described(module: Any, metadata: dict[str, Any]) -> str:
    """Add to a kernel's metadata what a launch reads that later stages would tell."""
    of_memory = ("shared", "tmem_size", "global_scratch_size", "profile_scratch_size")
    metadata |= {"name": "kernel", "global_scratch_align": 1, "profile_scratch_align": 1} | dict.fromkeys(of_memory, 0)
    return ""


@contextlib.contextmanager
def other_stages(name: str, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Within the block Triton compiles in other stages, and keeps what it compiles in a folder of this name."""

    def hook(backend: Any = None, stages: dict[str, Any] | None = None, *_: Any) -> tuple[str, str]:
        if stages is not None:
            change(stages)
        return name, name  # for the keys of Triton 3.7

    with knobs.cache.scope(), mock.patch.object(knobs.runtime, "add_stages_inspection_hook", hook):
        knobs.cache.dir = os.path.join(knobs.cache.dir, name)
        yield
