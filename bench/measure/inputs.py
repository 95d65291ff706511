"""Random operands that any rank can draw for any other rank, so that a reference needs no communication."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from iris_kernels.common.problem import Problem


@dataclass(frozen=True)
class Draw:
    """Draws the operands of one call of one problem.

    The values follow from the seed, the problem, the call and the name drawn alone: ranks that draw the same name on
    the same kind of device get the same values.

    Args:
        seed: of the whole sweep.
        problem: what the operands are for.
        call: a number for each set of operands.
        device: where they are made.
    """

    seed: int
    problem: Problem
    call: int
    device: torch.device

    def normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a contiguous tensor of standard normal values, of the problem's dtype or another."""
        key = f"{self.seed}/{type(self.problem).__name__}/{self.problem}/{self.call}/{name}".encode()
        digest = hashlib.blake2b(key, digest_size=4).digest()  # torch's generator on a CPU keeps 32 bits of a seed
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "big"))
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype or self.problem.dtype)
