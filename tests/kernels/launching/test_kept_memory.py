"""What an operator's calls keep of torch's memory: the first some, later ones nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from driving import build, case_of, driven, operands
from families import name
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from iris_kernels.common import workspace
from iris_kernels.common.portable import operands as portable_operands
from overlap_taxonomy import Variant, list_variants

FUSED = [variant for variant in list_variants() if variant.has_kernels]


class Storages(TorchDispatchMode):
    """Notes the memory of all tensors that torch makes within the block."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = function(*arguments, **(options or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((arguments, options)) if torch.is_tensor(one)}
        for one in tree_leaves(found):
            if torch.is_tensor(one) and one.untyped_storage()._cdata not in given:
                self._storages[one.untyped_storage()._cdata] = StorageWeakRef(one.untyped_storage())
        return found

    def uncounted(self, lasting: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return `lasting`, whose memory is not counted."""

        def make(*arguments: Any) -> torch.Tensor:
            one = lasting(*arguments)
            self._storages.pop(one.untyped_storage()._cdata, None)
            return one

        return make

    def bytes_left(self) -> int:
        """Return how much of it is still there."""
        gc.collect()
        there = [torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in self._storages.values()]
        return sum(one.nbytes() for one in there if one is not None)


@pytest.mark.parametrize("are_copied", [False, True])
@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_calls_leave_no_memory_behind(variant: Variant, are_copied: bool) -> None:
    """What they kept of a CUDA graph's memory would be an error of `torch.compile`, which calls once, then records."""
    case, lasting = case_of(variant), workspace.lasting

    def given() -> list[torch.Tensor]:
        """Return operands; those off 16 bytes are copied."""
        return [torch.cat([one[:, :1], one], 1)[:, 1:] if are_copied else one for one in operands(case)]

    with driven(case) as (ctx, _, _):
        operator = build(case, ctx, new_outputs=True)
        with Storages() as storages, contextlib.ExitStack() as patches:
            for module in (workspace, portable_operands):
                patches.enter_context(mock.patch.object(module, "lasting", storages.uncounted(lasting)))
            operator(*given())
        assert storages.bytes_left() == 0
        with Storages() as storages:
            for _ in range(3):
                operator(*given())
        assert storages.bytes_left() == 0
