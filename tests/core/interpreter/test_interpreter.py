"""Interpreted kernels: what is kept from one value or launch to the next is what Triton would make, and waits rest."""

from __future__ import annotations

import functools
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context
from triton._C.libtriton import ir as _ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter

import iris_core
from iris_core.backends import shm
from iris_core.checker import check
from iris_core.interpreter import cache, grid, operators
from iris_core.utils import backoff

SHAPES = ([16], [1, 32], [tl.constexpr(4), 2, 1], tl.tuple([8, tl.constexpr(8)]))
ELEMENTS = (tl.int1, tl.bfloat16, tl.float32, tl.uint64, tl.pointer_type(tl.float16))


def made(init: Callable[..., None], *given: Any) -> tl.block_type:
    one = object.__new__(tl.block_type)
    init(one, *given)
    return one


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_types_and_shapes_are_those_that_triton_makes(element: tl.dtype, shape: Any) -> None:
    expected = made(cache._init_block_type, element, shape)
    for _ in range(2):  # made, and kept
        block = made(cache.init_block_type, element, shape)
        assert vars(block).keys() == vars(expected).keys()
        assert (block.element_ty, block.numel, block.name) == (element, expected.numel, expected.name)
        assert block.shape.values == expected.shape.values
        value = object.__new__(tl.tensor)
        cache.init_tensor(value, "handle", block)
        assert (value.handle, value.type, value.dtype) == ("handle", block, element)
        assert value.numel.value == expected.numel
        assert [(type(size), size.value) for size in value.shape] == [
            (tl.constexpr, size) for size in expected.shape.values
        ]
        for kind in (element, block):
            assert cache.get_np_dtype(kind) == cache._get_np_dtype(kind)


def test_a_scalar_has_no_shape() -> None:
    value = object.__new__(tl.tensor)
    cache.init_tensor(value, "handle", tl.int32)
    assert (len(value.shape), value.numel.value, value.dtype) == (0, 1, tl.int32)


@pytest.mark.parametrize(("shape", "error"), [([3], ValueError), ([], TypeError)])
def test_a_block_that_there_cannot_be_is_refused_every_time(shape: Any, error: type[Exception]) -> None:
    made(cache.init_block_type, tl.int8, [16])
    for _ in range(2):
        with pytest.raises(error):
            made(cache.init_block_type, tl.int8, shape)


def value(kind: tl.dtype, *shape: int) -> tl.tensor:
    data = np.arange(1, math.prod(shape) + 1).reshape(shape or 1).astype(cache._get_np_dtype(kind))
    return tl.tensor(triton_interpreter.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


KINDS = (tl.int1, tl.int8, tl.int32, tl.int64, tl.uint8, tl.uint64, tl.float16, tl.bfloat16, tl.float32, tl.float64)
OPERANDS = [value(kind, *shape) for kind in (*KINDS, tl.pointer_type(tl.float16)) for shape in ((), (4,), (2, 1))]
NUMBERS = (0, 1, 127, 128, 255, 256, 2**31, 2**63, -1, True, 2.5)


def contents(one: tl.tensor) -> Any:
    return one.type, one.handle.dtype, one.handle.data.dtype, one.handle.data.shape, one.handle.data.tolist()


def checked(check: Callable[..., Any], lhs: Any, rhs: Any, flags: dict[str, bool]) -> Any:
    """Return what a check of operands makes of them, or what it raises."""
    semantic = TritonSemantic(triton_interpreter.interpreter_builder)
    try:
        return [contents(one) for one in check(semantic, lhs, rhs, **flags)]
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    "flags",
    [{}, {"allow_lhs_ptr": True, "allow_rhs_ptr": True}, {"arithmetic_check": False}, {"div_or_mod": True}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # 2**31 as a half
def test_operands_are_made_alike_as_triton_makes_them(flags: dict[str, bool]) -> None:
    for operand in OPERANDS:
        for other in (*OPERANDS, *NUMBERS):
            for pair in ((operand, other), (other, operand)):
                expected = checked(cache._check_operands, *pair, flags)
                assert checked(cache.check_operands, *pair, flags) == expected, pair


def test_values_are_broadcast_as_triton_does() -> None:
    shapes = ((), (1,), (4,), (8,), (1, 4), (2, 1), (2, 4), (4, 2), (1, 1, 1), (2, 1, 4))
    kinds = (tl.int1, tl.int32, tl.bfloat16, tl.pointer_type(tl.float16))
    values = [value(kind, *shape) for kind in kinds for shape in shapes]
    for pair in itertools.product(values, values):
        expected = checked(operators._broadcast_values, *pair, {})
        assert checked(operators.broadcast_values, *pair, {}) == expected, pair


def casted(cast: Callable[..., Any], one: tl.tensor, kind: tl.dtype, rounding: str | None) -> Any:
    """Return what a cast makes of a value, or what it raises."""
    try:
        return contents(cast(TritonSemantic(triton_interpreter.interpreter_builder), one, kind, rounding))
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("rounding", [None, "rtne", "rtz"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of a number too large
def test_values_are_cast_as_triton_does(rounding: str | None) -> None:
    scope = cache.patched_language()  # where integers without a sign are known
    try:
        for operand in (*OPERANDS, value(tl.int64, 512)):
            for kind in (*KINDS, tl.pointer_type(tl.float16), tl.block_type(tl.int16, [4])):
                expected = casted(operators._cast, operand, kind, rounding)
                assert casted(operators.cast, operand, kind, rounding) == expected, (operand, kind)
    finally:
        scope.restore()


WHOLE = slice(None)
INDICES = [None, WHOLE, (None, WHOLE), (WHOLE, None), (WHOLE, None, WHOLE), (None, None), (WHOLE, WHOLE), (WHOLE,) * 3]
INDICES += [(WHOLE, 0), (slice(0, 2), None), (tl.constexpr(None), WHOLE)]


def test_blocks_are_indexed_as_triton_does() -> None:
    def index_all() -> list[Any]:
        found = []
        for operand, index in itertools.product(OPERANDS, INDICES):
            try:
                found.append(contents(operand[index]))
            except Exception as error:
                found.append((type(error), str(error)))
        return found

    scope = triton_interpreter._patch_lang(cache._EVERY_MODULE)
    try:
        expected = index_all()
    finally:
        scope.restore()
    scope = cache.patched_language()
    try:
        assert index_all() == expected
    finally:
        scope.restore()


def found_by(operator: Callable[..., Any], one: Any, other: Any) -> Any:
    """Return what an operator makes of two operands, or what it raises."""
    try:
        made = operator(one, other)
    except Exception as error:
        return type(error), str(error)
    kind = made.dtype if made.dtype == tl.int1 else made.handle.dtype  # Triton leaves a comparison's as it was
    return made.type, made.shape, kind, made.handle.data.dtype, repr(made.handle.data)


OPERATORS = ("add", "sub", "mul", "mod", "floordiv", "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne")


@pytest.mark.parametrize("name", [*OPERATORS, "radd", "rsub", "rmul"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflow
def test_operators_make_what_triton_makes(name: str) -> None:
    names = ("int1", "int8", "int64", "uint8", "fp32", "pointer<fp16>")
    operands = [operand for operand in OPERANDS if operand.dtype.name in names]
    operands.append(value(tl.int64, 4))
    operands[-1].handle.data *= -3
    others = (*operands, value(tl.int32, 2, 4), value(tl.int32, 8), *NUMBERS, tl.constexpr(3))
    pairs = [(one, other) for one in operands for other in others]
    attribute = f"__{name}__"
    scope = triton_interpreter._patch_lang(cache._EVERY_MODULE)
    try:
        expected = [found_by(getattr(tl.tensor, attribute), *pair) for pair in pairs]
    finally:
        scope.restore()
    scope = cache.patched_language()
    try:
        found = [found_by(getattr(tl.tensor, attribute), *pair) for pair in pairs]
    finally:
        scope.restore()
    for pair, one, other in zip(pairs, found, expected, strict=True):
        assert one == other, pair
    assert sum(len(one) == 5 for one in found) > len(pairs) / 10


def test_numbers_are_converted_as_triton_and_torch_do() -> None:
    """All of bf16, and as many of fp32 that lie between; of subnormal ones Triton makes others."""
    bf16 = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256).T
    wide = (tl.bfloat16, tl.float32, None)
    exact = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float().view(torch.int32)
    fp32 = cache.convert_float(bf16, *wide)
    assert fp32.T.reshape(-1).tolist() == exact.numpy().view(np.uint32).tolist()
    is_normal = (bf16 & 0x7F80 != 0) | (bf16 & 0x7F == 0)
    assert (fp32 == cache._convert_float(bf16, *wide))[is_normal].all()
    between, narrow = (fp32 + 0xABCD).view(np.float32), (tl.float32, tl.bfloat16, None)
    found = cache.convert_float(between, *narrow)
    assert (found == bf16).all()
    is_normal = bf16 & 0x7F80 != 0
    assert (found == cache._convert_float(between, *narrow))[is_normal].all()
    rounding = (tl.float32, tl.bfloat16, _ir.ROUNDING_MODE.RTNE)
    assert (cache.convert_float(between, *rounding) == cache._convert_float(between, *rounding)).all()
    for target, dtype in ((tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e4b8, torch.float8_e4m3fnuz)):
        largest = torch.finfo(dtype).max
        for numbers in (between, np.zeros((2, 3), np.float32), np.array([0.0, -0.0], np.float32)):
            expected = torch.from_numpy(numbers.copy()).clamp(-largest, largest).to(dtype).view(torch.uint8)
            assert (cache.convert_float(numbers, tl.float32, target, None) == expected.numpy()).all()
        every = np.arange(1 << 8, dtype=np.uint8).reshape(16, 16).T
        for wider, numpy_wider in ((tl.float16, np.float16), (tl.float32, np.float32)):
            found = cache.convert_float(every, target, wider, None).view(numpy_wider)
            np.testing.assert_array_equal(found, torch.from_numpy(every.copy()).view(dtype).float().numpy())


def language() -> dict[tuple[str, str], Any]:
    owners = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


def test_the_language_is_patched_as_triton_does_and_put_back() -> None:
    patch = functools.partial(triton_interpreter._patch_lang, cache._EVERY_MODULE)
    patch().restore()  # which leaves what a class had inherited in the class
    before = language()
    whole = patch()
    changed = {name for name, value in language().items() if value is not before.get(name)}
    whole.restore()
    assert language() == before
    assert changed
    for _ in range(2):
        scope = cache.patched_language()
        assert {name for name, value in language().items() if value is not before.get(name)} == changed
        scope.restore()
        assert language() == before


@triton.jit
def count_kernel(out_ptr, count):
    for number in range(count):
        tl.store(out_ptr, number + 1)


@pytest.mark.filterwarnings("error")
def test_a_loop_over_a_value_gives_no_warning() -> None:
    def count(rank: int, world_size: int) -> None:
        out = torch.zeros(1, dtype=torch.int64)
        count_kernel[(1,)](out, 3)
        assert out.item() == 3

    report = check(count, 1, schedules=1)
    assert report.ok, report


@triton.jit
def wait_kernel(flag_ptr, watchdog_ptr):
    iris_core.wait(flag_ptr, 1, watchdog_ptr)


def count_rests(rank: int, world_size: int, waiting: str) -> tuple[list[int], int]:
    """Wait for what comes when others have been let run for the third time."""
    ctx = context()
    flag = ctx.zeros(1, dtype=torch.int64)
    rests: list[int] = []

    def rest(looks: int) -> None:
        rests.append(looks)
        if looks == 3:
            flag.fill_(1)

    with mock.patch.object(grid if waiting == "kernel" else shm, "back_off", rest):
        if waiting == "kernel":
            wait_kernel[(2,)](flag, ctx.get_watchdog())
        else:
            ctx.make_stream().wait_value(flag, 1)
    seen = int(flag.item())
    ctx.free(flag)
    return rests, seen


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("waiting", ["kernel", "stream"])
def test_who_waits_lets_other_processes_run(ranks: Callable[[int], Ranks], waiting: str) -> None:
    assert ranks(1).call(count_rests, waiting) == [([1, 2, 3], 1)]


def test_long_waits_rest_longer_but_never_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(backoff.time, "sleep", rests.append)
    for looks in (1, 2, 10, 1000, 10**9):
        backoff.back_off(looks)
    assert rests == sorted(rests)
    assert rests[0] < rests[2]
    assert rests[-1] < 0.01


@triton.jit
def read_behind_a_wait_kernel(flag_ptr, watchdog_ptr, view_ptr, out_ptr):
    iris_core.wait(flag_ptr, 1, watchdog_ptr)
    lanes = tl.arange(0, 8)
    tl.store(out_ptr + lanes, tl.load(view_ptr + lanes))


def read_a_peer(rank: int, world_size: int) -> list[float]:
    ctx = context()
    mine, out = ctx.full((8,), rank + 5.0, dtype=torch.float32), ctx.zeros(8, dtype=torch.float32)
    flag = ctx.ones(1, dtype=torch.int64)
    ctx.barrier()
    watchdog, view = {"watchdog_ptr": ctx.get_watchdog()}, {"view_ptr": ctx.peer_view(mine)[1]}
    found = []
    for arguments in (watchdog | view, view | watchdog):  # storages are taken in the order of the arguments
        out.zero_()
        read_behind_a_wait_kernel[(1,)](flag, out_ptr=out, **arguments)
        found.append(out.sum().item())
    ctx.barrier()
    for buffer in (mine, out, flag):
        ctx.free(buffer)
    return found


@pytest.mark.parametrize("device", ["cpu"])
def test_a_kernel_may_take_the_watchdog_and_a_view_of_the_peers(ranks: Callable[[int], Ranks]) -> None:
    """Both begin where the heaps do, on rank 0, and Triton's interpreter tells storages apart by where they begin."""
    assert ranks(2).call(read_a_peer) == [[48.0, 48.0]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "why"), [({}, "it has had a context on the CPU"), ({"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET is set")]
)
def test_a_gpu_is_refused_for_the_reason_that_kernels_are_interpreted(given: dict[str, str], why: str) -> None:
    """Where a context on the CPU has switched them over, Triton sets the variable, and the user has not."""
    outside = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "IRIS_DEVICE")}
    code = "from iris_core import iris; iris(1 << 20, 'cpu').close(); iris(1 << 20, 'cuda')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=outside | given, stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert f"RuntimeError: device='cuda', but kernels of this process are interpreted, as {why}" in done.stderr
