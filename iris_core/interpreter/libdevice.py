"""What libdevice's functions give where kernels are interpreted: Triton has names for them there, and no bodies.

Those of one or more floats of one dtype, fp32 or fp64, rounded to nearest; others raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

_DTYPES = {tl.float32: torch.float32, tl.float64: torch.float64}
_OF_TORCH = (
    "abs acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmod hypot "
    "isinf isnan lgamma log log10 log1p log2 nextafter pow rsqrt signbit sin sinh sqrt tan tanh trunc"
)
_FAST = "cos exp log log10 log2 pow sin tan tanh"
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {name: getattr(torch, name) for name in _OF_TORCH.split()}
_FUNCTIONS |= {f"fast_{name}f": getattr(torch, name) for name in _FAST.split()}
_FUNCTIONS |= {
    "add_rn": torch.add,
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "div_rn": torch.div,
    "erfcx": torch.special.erfcx,
    "exp10": lambda x: torch.pow(10.0, x),
    "fast_dividef": torch.div,
    "fast_exp10f": lambda x: torch.pow(10.0, x),
    "finitef": torch.isfinite,
    "isfinited": torch.isfinite,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "mul_rn": torch.mul,
    "nearbyint": torch.round,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "rcp_rn": torch.reciprocal,
    "rint": torch.round,
    "saturatef": lambda x: torch.clamp(torch.nan_to_num(x, 0.0), 0.0, 1.0),
    "sqrt_rn": torch.sqrt,
    "sub_rn": torch.sub,
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
}


def _interpreted(name: str) -> Callable[..., Any]:
    """Return what stands for a function of libdevice; its name and module stay, by which compiled code finds it."""

    @functools.wraps(getattr(libdevice, name))
    def call(*given: Any) -> Any:
        if name not in _FUNCTIONS:
            known = ", ".join(sorted(_FUNCTIONS))
            raise NotImplementedError(f"libdevice.{name} is not interpreted; these are: {known}")
        first, *others = [interpreter_semantic.to_tensor(one) for one in given]
        for index, other in enumerate(others):
            first, others[index] = interpreter_semantic.broadcast_impl_value(first, other)
        args = [first, *(interpreter_semantic.broadcast_impl_value(first, other)[1] for other in others)]
        dtypes = {arg.dtype.scalar for arg in args}
        if len(dtypes) > 1 or not dtypes <= _DTYPES.keys():
            listed = ", ".join(str(arg.dtype) for arg in args)
            raise ValueError(f"libdevice.{name} of {listed}: it takes fp32, or fp64")
        found = _FUNCTIONS[name](*(torch.from_numpy(arg.handle.data) for arg in args))
        dtype = tl.int1 if found.dtype == torch.bool else first.dtype.scalar
        kind = tl.block_type(dtype, first.type.shape) if first.type.is_block() else dtype
        return tl.tensor(TensorHandle(found.numpy(), dtype), kind)

    return call


INTERPRETED = {name: _interpreted(name) for name, one in vars(libdevice).items() if callable(one)}
