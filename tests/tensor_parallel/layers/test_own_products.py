"""Products that nothing is communicated with, by several weights as by one."""

from __future__ import annotations

import gc

import pytest
import torch
from layers import CLOSE
from torch._subclasses.fake_tensor import FakeTensorMode

from iris_kernels.common.fp8.scales import quantise
from iris_kernels.common.operators import parts
from iris_kernels.common.operators.parts import joined, lay_together, lie_together
from iris_tensor_parallel.sharding.float8 import Scaled
from iris_tensor_parallel.sharding.own_products import linear

pytestmark = pytest.mark.parametrize("device", ["cpu"])
ROWS, WIDTH, SIZES = 6, 32, (48, 16, 16)
FP8 = torch.float8_e4m3fn


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def scaled(matrix: torch.Tensor, *, in_fp8: bool) -> Scaled:
    return Scaled(*quantise(matrix, FP8, "row")) if in_fp8 else Scaled(matrix)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_a_product_by_several_weights_is_those_by_each(together: bool, bias: bool, in_fp8: bool, device: str) -> None:
    dtype = torch.bfloat16 if in_fp8 else torch.float32
    x = scaled(drawn(ROWS, WIDTH).to(dtype), in_fp8=in_fp8)
    weights = [scaled(drawn(size, WIDTH).to(dtype), in_fp8=in_fp8) for size in SIZES]
    biases = [drawn(size).to(dtype) for size in SIZES] if bias else []
    each = [linear(x, [weight], biases[number : number + 1], dtype) for number, weight in enumerate(weights)]
    if together:
        for several in ([one.matrix for one in weights], [one.scale for one in weights], biases):
            if several and several[0] is not None:
                lay_together(several)
    assert lie_together([one.matrix for one in weights]) is together
    found = linear(x, weights, biases, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.cat(each, 1), rtol=CLOSE, atol=CLOSE * float(found.float().norm()))


@pytest.mark.parametrize("in_fp8", [False, True])
def test_the_op_is_as_torch_wants_it(in_fp8: bool, device: str) -> None:
    dtype = torch.bfloat16 if in_fp8 else torch.float32
    x = scaled(drawn(ROWS, WIDTH).to(dtype), in_fp8=in_fp8)
    weights = [scaled(drawn(size, WIDTH).to(dtype), in_fp8=in_fp8) for size in SIZES]
    matrices, scales = [one.matrix for one in weights], [one.scale for one in weights if one.scale is not None]
    biases = [drawn(size).to(dtype) for size in SIZES]
    arguments = x.matrix, matrices, dtype, False, biases, x.scale, scales
    op = torch.ops.iris_overlap.linear_by_parts.default
    # It has no gradients: Columns computes them. Of fp8 torch cannot compare what was written.
    tests = ("test_faketensor",) if in_fp8 else ("test_faketensor", "test_schema")
    assert set(torch.library.opcheck(op, arguments, test_utils=tests).values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("error")
def test_what_has_no_memory_is_apart(device: str) -> None:
    with FakeTensorMode():
        several = [torch.empty(size, WIDTH) for size in SIZES]
        assert not lie_together(several)
        assert joined(several, 0).shape == (sum(SIZES), WIDTH)


@pytest.mark.parametrize("replaces_data", [False, True])
def test_what_lay_together_has_no_memory_once_its_parts_have_none(replaces_data: bool, device: str) -> None:
    """As where FSDP replaces parameters, or `Module.to` their data: a whole kept would be their memory once more."""
    several = [torch.nn.Parameter(drawn(size, WIDTH)) for size in SIZES]
    lay_together(several)
    address = several[0].data_ptr()
    assert address in parts._wholes
    assert joined(several, 0).data_ptr() == address
    if replaces_data:
        for one in several:
            one.data = one.data.clone()
    else:
        several.clear()
    gc.collect()
    assert address not in parts._wholes
