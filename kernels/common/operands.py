"""How kernels read A and B: by tensor descriptors where strides and addresses allow them, else through pointers."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import GemmConfig
from .gemm import DESCRIPTORS_B_KN, DESCRIPTORS_B_NK, POINTERS


def loads_of(operands: dict[str, torch.Tensor]) -> int:
    """Return how these operands can be read."""
    if not all(describable(matrix) for name, matrix in operands.items() if name != "b"):
        return POINTERS.value
    if describable(operands["b"].t()):
        return DESCRIPTORS_B_NK.value
    return DESCRIPTORS_B_KN.value if describable(operands["b"]) else POINTERS.value


def descriptor_of(name: str, matrix: torch.Tensor, loads: int, config: GemmConfig) -> TensorDescriptor:
    """Return an operand's descriptor for a configuration's tiles; `name` is "b" or an A's."""
    if name != "b":
        return TensorDescriptor.from_tensor(matrix, [config.block_m, config.block_k])
    if loads == DESCRIPTORS_B_NK.value:
        return TensorDescriptor.from_tensor(matrix.t(), [config.block_n, config.block_k])
    return TensorDescriptor.from_tensor(matrix, [config.block_k, config.block_n])


def describable(matrix: torch.Tensor) -> bool:
    """Whether a tensor descriptor can name this matrix: rows contiguous, everything on 16 bytes, not empty."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.numel() > 0 and matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0
