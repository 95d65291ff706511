"""A traced function gives what the traced code would, or None; what stands for tensors lies where they do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from iris_kernels.common.launch.trace import Trace, Untraceable, fixed
from iris_kernels.common.launch.traced_tensor import Memory, TracedTensor

SIZES = [*range(1, 40), 63, 64, 65, 1000]


def traced(code: Callable[[Any], Any], value: int) -> Callable[[int], Any]:
    """Return what comes of tracing code with a number."""
    trace = Trace()
    result = code(trace.argument("m", value))
    source = trace.source(result)
    trace.close()
    return source.compiled()


def shard(m: Any) -> Any:
    chunk = -(-m // 4)
    return min(3 * chunk, m) - min(2 * chunk, m)


def rounds(m: Any) -> Any:
    return sum(m % number for number in range(1, max(1, m // 16) + 1)), math.ceil(m / 3 * 1.5), -m + 2 * m - 1


def branches(m: Any) -> Any:
    if m % 16 == 0 and m > 3:
        return (m // 16, None)
    return (1.0, (m, "odd" if m % 2 else "even")) if m != 7 else ()


def takes_it(m: Any) -> Any:
    return [3 * number for number in range(40)][m % 40], int(m) * 2, f"{m}"


@pytest.mark.parametrize("code", [shard, rounds, branches, takes_it])
def test_a_function_gives_what_was_traced_or_none(code: Callable[[Any], Any]) -> None:
    for value in SIZES:
        function = traced(code, value)
        assert function(value) == code(value)
        assert all(function(other) in (None, code(other)) for other in SIZES)
    assert sum(traced(shard, 64)(other) is not None for other in SIZES) > len(SIZES) // 2


def test_a_number_that_is_taken_as_it_is_is_guarded() -> None:
    assert [other for other in SIZES if traced(takes_it, 5)(other) is not None] == [5]
    assert [other for other in SIZES if traced(lambda m: fixed((m // 8, "x")), 17)(other)] == [16, *range(17, 24)]


def test_a_traced_number_is_no_key_and_of_no_other_trace_or_time() -> None:
    trace, other = Trace(), Trace()
    one, another = trace.argument("m", 3), other.argument("m", 3)
    with pytest.raises(Untraceable, match=r"give int\(number\)"):
        assert one not in {1}
    with pytest.raises(AssertionError, match="another trace"):
        assert one + another
    trace.close()
    for use in (lambda: one + 1, lambda: one < 3, lambda: range(one)):
        with pytest.raises(AssertionError, match="behind the trace"):
            use()


VIEWS: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda t, m: t[: m // 2],
    "inner rows": lambda t, m: t[m // 4 : m // 2, 3:5],
    "past the end": lambda t, m: t[m // 2 : 2 * m],
    "none": lambda t, m: t[m:, 1:],
    "row": lambda t, m: t[m - 1],
    "one more dimension": lambda t, m: t[None, :, :5],
    "one more behind": lambda t, m: t[:, :, None],
    "transposed": lambda t, m: t.t()[2:],
    "as one row": lambda t, m: t.view(1, -1),
    "by twos": lambda t, m: t.view(-1, 2)[1:],
    "flat": lambda t, m: t.flatten()[3 : 2 * m],
    "flat of rows": lambda t, m: t[: m // 2].flatten(0, 1),
    "strided": lambda t, m: t[1:].as_strided((m // 2, 3), (8, 1)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_lie_where_torchs_do(view: str) -> None:
    base = torch.arange(4000.0)
    trace = Trace()
    m = trace.argument("m", 12)
    stand_in = VIEWS[view](TracedTensor.over(trace, Memory(base, base.data_ptr()), (m, 8), base.dtype), m)
    facts = stand_in.shape, stand_in.stride(), stand_in.numel(), stand_in.data_ptr(), stand_in.is_contiguous()
    source = trace.source((stand_in.as_tensor(), facts))
    trace.close()
    function = source.compiled()
    for size in (12, 16, 44, 100):
        real = VIEWS[view](base[: 8 * size].view(size, 8), size)
        result = function(size)
        assert result is not None
        made, facts = result
        assert facts == (real.shape, real.stride(), real.numel(), real.data_ptr(), real.is_contiguous())
        assert made.equal(real)
        assert (made.data_ptr(), made.stride()) == (real.data_ptr(), real.stride())


def test_what_a_stand_in_cannot_say_is_untraceable() -> None:
    trace = Trace()
    base = torch.zeros(64)
    stand_in = TracedTensor.over(trace, Memory(base, base.data_ptr()), (trace.argument("m", 4), 8), base.dtype)
    asks: list[Callable[[], object]] = [
        lambda: torch.mm(stand_in, base.view(8, 8)),  # type: ignore[arg-type]
        lambda: stand_in.sum(),
        lambda: stand_in[-1],
        lambda: stand_in[::2],
        lambda: stand_in[9],
        lambda: stand_in.t().view(-1),
        lambda: stand_in[:, :3].flatten(),
        lambda: stand_in.view(torch.int32),
    ]
    for ask in asks:
        with pytest.raises(Untraceable):
            ask()
    assert not hasattr(stand_in, "block_shape")
