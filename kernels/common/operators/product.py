"""A call of an op without its tensors: what an op takes beside them, and what is read beside A and B."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch

from ..device.epilogue import ACTIVATIONS, GATED_ACTIVATIONS
from ..portable.row_norm import RmsNorm
from ..problem import Problem

ARGUMENTS = (
    "Tensor a, Tensor[] b, SymInt m, SymInt n, SymInt k, str context, str variant='auto', str backward_variant='auto', "
    "bool keep_gathered=False, str? activation=None, ScalarType? out_dtype=None, ScalarType? partial_dtype=None, "
    "bool use_fast_accum=False, float? norm_eps=None, ScalarType? normed_dtype=None, str? quantize=None, "
    "Tensor? bias=None, Tensor? residual=None, Tensor? scale=None, Tensor? a_scale=None, Tensor? b_scale=None, "
    "Tensor? norm_weight=None"
)


class Family(NamedTuple):
    """What is to be known of a family.

    Args:
        problem_type: its problems.
        gathers: whether it gathers A.
        dim: of B's, the one that the ranks share.
    """

    problem_type: type[Problem]
    gathers: bool
    dim: int


families: dict[str, Family] = {}  # that have an op


def op_of(family: str) -> Any:
    """Return a family's op, as graphs have it."""
    return getattr(torch.ops.iris_overlap, family).default


def in_graph() -> bool:
    """Return whether a graph is being made of what is called, by `torch.compile` or `torch.export`."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


class How(TypedDict, total=False):
    """What a product is beside its sizes and operands; what is not given has an op's default.

    Args:
        keep_gathered: whether A as the family gathers it is returned, too.
        activation: what is applied to C last, by name; None for nothing.
        out_dtype, partial_dtype, use_fast_accum: as a `Problem`'s.
        norm_eps, normed_dtype: of an RMSNorm of C's rows (`RmsNorm`); None for none, and for C's dtype.
        quantize: "row" where A is quantised as it is gathered.
    """

    keep_gathered: bool
    activation: str | None
    out_dtype: torch.dtype | None
    partial_dtype: torch.dtype | None
    use_fast_accum: bool
    norm_eps: float | None
    normed_dtype: torch.dtype | None
    quantize: str | None


class Product(NamedTuple):
    """A call without its tensors, as an op takes it behind A and B: `How`, and this.

    Args:
        m, n, k: of C (m, n) = A (m, k) @ B (k, n).
        context: the context's name.
        variant, backward_variant: of the product, and of those that give its gradients.
    """

    m: int
    n: int
    k: int
    context: str
    variant: str = "auto"
    backward_variant: str = "auto"
    keep_gathered: bool = False
    activation: str | None = None
    out_dtype: torch.dtype | None = None
    partial_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    norm_eps: float | None = None
    normed_dtype: torch.dtype | None = None
    quantize: str | None = None

    @property
    def norm(self) -> RmsNorm | None:
        """What is made of C's rows."""
        return None if self.norm_eps is None else RmsNorm(self.norm_eps, self.normed_dtype)

    def backward(
        self, family: str, a: torch.Tensor, b: Sequence[torch.Tensor], *sizes: int, keep_gathered: bool = False
    ) -> list[torch.Tensor]:
        """Return what another family's op gives, as part of a backward pass; `sizes` are its m, n and k."""
        return op_of(family)(a, b, *sizes, self.context, self.backward_variant, self.backward_variant, keep_gathered)


# What is read beside A and B, as an op takes it behind all others: what an epilogue reads, C being
# activation(scale · A @ B + bias + residual), the scales of A and of all parts of B, and what a norm reads.
READ = ("bias", "residual", "scale", "a_scale", "b_scale", "norm_weight")
_LINEAR = ("scale", "bias", "residual")  # in the order in which they are applied
NUMBERS = len(Product._fields)  # that an op takes between A and B and what it reads beside them


@functools.cache
def epilogue_of(
    reads: tuple[str, ...], activation: str | None, known: tuple[str, ...] = (*ACTIVATIONS, *GATED_ACTIVATIONS)
) -> tuple[str, ...]:
    """Return the epilogue of a product that reads these, and ends with an activation, one of those `known`.

    Raises:
        ValueError: there is no such activation.
    """
    if not (activation is None or activation in known):
        raise ValueError(f"activation is {activation!r}; it takes {', '.join(known)}, or None")
    return (*(name for name in _LINEAR if name in reads), *([activation] if activation else []))


def operands_of(arguments: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """Return what an op reads beside A and B, by name; of all that it is given behind these."""
    return {name: one for name, one in zip(READ, arguments[NUMBERS:], strict=False) if one is not None}


def as_operators_take(operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return operands with the scale of a tensor as a matrix of one."""
    return {
        name: one.reshape(1, 1) if name in ("a_scale", "b_scale") and one.ndim < 2 else one
        for name, one in operands.items()
    }
