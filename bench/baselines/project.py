"""Another project whose kernels are compared with, and whether they can run here."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from iris_core.device import interpretation
from iris_kernels.all_gather_gemm.problem import AllGatherGemmProblem
from iris_kernels.common.portable.operands import fill_rows


@dataclass(frozen=True)
class Project:
    """A project's package.

    Args:
        name: of the package.
        folder: that it has, and another package of that name has not.
        how_to_install: a command.
    """

    name: str
    folder: str
    how_to_install: str

    def missing_reason(self, capability: tuple[int, int]) -> str | None:
        """Return why kernels for a compute capability and later ones cannot run in this process, or None."""
        return self.machine_reason(capability) or self.installation_reason()

    def machine_reason(self, capability: tuple[int, int]) -> str | None:
        """Return what GPU the kernels would need, for a compute capability and later ones, or None."""
        if interpretation.is_enabled() or not torch.cuda.is_available() or torch.version.cuda is None:
            return f"{self.name} needs NVIDIA GPUs"
        found = torch.cuda.get_device_capability()
        if found < capability:
            needed = "sm_{}{}".format(*capability)
            return f"{self.name}'s kernel needs {needed} or later, this is sm_{found[0]}{found[1]}"
        return None

    def installation_reason(self) -> str | None:
        """Return how to get the package if it is not there, or None. It is looked for and not imported."""
        spec = importlib.util.find_spec(self.name)
        folders = spec.submodule_search_locations if spec else None
        if any(Path(path, self.folder).is_dir() for path in folders or ()):
            return None
        return f"{self.name} is not installed: {self.how_to_install}"

    def gather_size_reason(self, problem: AllGatherGemmProblem, step: int) -> str | None:
        """Return why a kernel for all-gather + GEMM does not take a problem's sizes, or None.

        Args:
            problem: the problem.
            step: rows of A of which each rank has to have a multiple.
        """
        rows, left_over = divmod(problem.m, problem.world_size)
        if left_over or rows % step:
            return f"{self.name}'s kernel needs {step} rows of A or a multiple on each rank; M is {problem.m}"
        columns, left_over = divmod(problem.n, problem.world_size)
        for size_of, size in (("K", problem.k), ("N on each rank", columns)):
            if left_over or not fill_rows(size, problem.dtype):
                return f"{self.name}'s kernel reads and writes rows on 16 bytes; {size_of} is not so long"
        return None
