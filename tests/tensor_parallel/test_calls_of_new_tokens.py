"""What a layer's call of a number of tokens that is new makes, counted: no more than its operator's call."""

from __future__ import annotations

import contextlib
import random
import statistics
from typing import Any
from unittest import mock

import pytest
import torch
from driving import SIZE, case_of, counted, driven, matrix
from families import name

from iris_kernels.common.hopper import host as hopper
from iris_kernels.common.operators import calls_by_rows, dispatch, torch_op
from iris_kernels.common.workspace import Workspace
from iris_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from iris_tensor_parallel.sharding import checked_calls
from iris_tensor_parallel.sharding.base import Sharding
from overlap_taxonomy import Variant, get_variant

ROW = get_variant("gemm_reduce_scatter", "warp_specialized:sm90")
COLUMN = get_variant("all_gather_gemm", "workgroup_specialized:sm90")
KINDS: dict[str, Any] = {ROW.family: RowParallelLinear, COLUMN.family: ColumnParallelLinear}
NUMBERS = random.Random(0).sample(range(65, SIZE // 2), 150)  # of tokens of a rank
WARMING = 50

# Functions of ours that the call enters, and the descriptors that it has encoded: of all that depends on the tokens.
MOST_FRAMES = {ROW.family: 67, COLUMN.family: 72}
MOST_DESCRIPTORS = {ROW.family: 4, COLUMN.family: 4}


@contextlib.contextmanager
def refused(*whats: tuple[Any, str]) -> Any:
    """Within the block these, by what they belong to and their names, must not be called."""
    with contextlib.ExitStack() as patched:
        for owner, what in whats:
            error = AssertionError(f"{what} of {owner.__name__} was called")
            patched.enter_context(mock.patch.object(owner, what, side_effect=error))
        yield


@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize("variant", [ROW, COLUMN], ids=name)
def test_a_new_number_of_tokens_makes_no_more_than_its_call(variant: Variant, ndim: int) -> None:
    case = case_of(variant, world_size=2)
    options = {"bias": False, "sequence_parallel": True, "variant": variant.name, "dtype": torch.bfloat16}
    with (
        driven(case) as (ctx, log, _),
        mock.patch.object(hopper, "machine_reason", return_value=None),
        torch.no_grad(),
    ):
        layers = [KINDS[variant.family](ctx, SIZE, SIZE, **options) for _ in range(2)]

        def x_of(tokens: int) -> torch.Tensor:
            x = matrix((2 * tokens, SIZE // 2) if variant is ROW else (tokens, SIZE))
            return x if ndim == 2 else x[:, None]

        for tokens in [SIZE // 2, *NUMBERS[:WARMING]]:
            for layer in layers:
                layer(x_of(tokens))
        made = calls_by_rows._planned.cache_info().misses
        checks = (Sharding, "_checked"), (checked_calls, "operators_of_call"), (torch_op, "operators_for")
        with refused(*checks, (dispatch.Operators, "_made"), (Workspace, "grow")):
            frames, descriptors = [], []
            for tokens in NUMBERS[WARMING:]:
                x = x_of(tokens)
                for layer in layers:  # of another weight each
                    log.take()
                    log.descriptors = 0
                    frames.append(counted(lambda layer=layer, x=x: layer(x))[1])  # type: ignore[misc]
                    assert len(log.take()) == 1
                    descriptors.append(log.descriptors)
        assert calls_by_rows._planned.cache_info().misses == made

    assert statistics.median(frames) <= MOST_FRAMES[variant.family]
    assert statistics.median(descriptors) <= MOST_DESCRIPTORS[variant.family]
