"""What the `kraken` baselines share: the fused functions of meta-pytorch/kraken, where that package is installed.

An adapter, with nothing of kraken in it. Its functions take their operands as they are documented to and with the tiles
that they choose themselves; copies that bring operands into that form, and C into its dtype, are part of the time.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from iris_core.device import interpretation
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.library import LibraryOperator
from iris_kernels.common.operands import ROW_BYTES
from iris_kernels.common.problem import Problem
from overlap_taxonomy import Agent, Arrangement, Sync

P = TypeVar("P", bound=Problem)

HOW_TO_INSTALL = "pip install git+https://github.com/meta-pytorch/kraken"


class KrakenOperator(LibraryOperator[P]):
    """An operator that calls a function of ``kraken.fused``.

    A family gives the module that the function is in, the compute capability that it needs, and what sizes it takes.
    """

    variant = "kraken"
    place = (Arrangement.OTHERS, Agent.OTHERS, Sync.OTHERS)
    keeps_outputs = False
    module: str
    capability: tuple[int, int]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)

    @classmethod
    def unsupported_reason(cls, problem: P, config: GemmConfig | None) -> str | None:
        if problem.dtype not in cls.dtypes:
            return f"kraken's {cls.module} takes {' and '.join(map(str, cls.dtypes))}, not {problem.dtype}"
        return (
            machine_reason(cls.capability)
            or installation_reason()
            or cls.size_reason(problem)
            or super().unsupported_reason(problem, config)
        )

    @classmethod
    def size_reason(cls, problem: P) -> str | None:
        """Return why kraken's function does not take a problem's sizes, or None."""
        raise NotImplementedError

    def _open(self) -> None:
        self._kraken: Any = importlib.import_module(f"kraken.fused.{self.module}")
        self._commit = installed_commit()
        self._group = self.ctx.process_group()

    def _forget_descriptors(self) -> None:
        """Empty kraken's cache of descriptors, which would keep every call's outputs in memory for good."""
        getattr(self._kraken, "_tma_desc_cache", {}).clear()

    def describe_config(self) -> str:
        """Return the commit of kraken."""
        return f"kraken {self._commit}"


def machine_reason(capability: tuple[int, int]) -> str | None:
    """Return why kernels for a compute capability and later ones cannot run in this process, or None."""
    if interpretation.is_enabled() or not torch.cuda.is_available() or torch.version.cuda is None:
        return "kraken needs NVIDIA GPUs"
    found = torch.cuda.get_device_capability()
    if found < capability:
        return f"kraken's kernel needs sm_{capability[0]}{capability[1]} or later, this is sm_{found[0]}{found[1]}"
    return None


def installation_reason() -> str | None:
    """Return how to get kraken if it is not there, or None. It is looked for and not imported."""
    spec = importlib.util.find_spec("kraken")
    folders = spec.submodule_search_locations if spec else None
    if any(Path(folder, "fused").is_dir() for folder in folders or ()):  # another package has the same name
        return None
    return f"kraken is not installed: {HOW_TO_INSTALL}"


def installed_commit() -> str:
    """Return the commit that pip installed kraken from, as it noted it (PEP 610), or "of an unknown commit"."""
    try:
        origin = json.loads(metadata.distribution("kraken").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {}
    return origin.get("vcs_info", {}).get("commit_id", "")[:12] or "of an unknown commit"


def rows_on_16_bytes(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix that is contiguous and starts on 16 bytes; a copy if it does not."""
    if matrix.is_contiguous() and matrix.data_ptr() % ROW_BYTES == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)
