"""What the `kraken` baselines share: the fused functions of meta-pytorch/kraken, where that package is installed.

An adapter, with nothing of kraken in it. Its functions take their operands as they are documented to and with the tiles
that they choose themselves; copies that bring operands into that form, and C into its dtype, are part of the time.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from iris_core import Context
from iris_kernels.common.call import Call
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.problem import Problem
from iris_kernels.common.variants.implementation import Outputs
from iris_kernels.common.variants.library import library_variant
from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from .project import Project

PROJECT = Project("kraken", "fused", "pip install git+https://github.com/meta-pytorch/kraken")


@dataclass(frozen=True)
class Kraken:
    """What calls of a function of ``kraken.fused`` need.

    Args:
        module: that the function is in.
        commit: of kraken.
        group: the ranks.
        buffers: what the family's calls need beside.
    """

    module: Any
    commit: str
    group: Any
    buffers: tuple[torch.Tensor, ...] = ()

    def forget_descriptors(self) -> None:
        """Empty kraken's cache of descriptors, which would keep every call's outputs in memory for good."""
        getattr(self.module, "_tma_desc_cache", {}).clear()


def kraken_variant(
    family: str,
    module: str,
    launch: Callable[[Call[Any], torch.Tensor, torch.Tensor], Outputs],
    buffers: Callable[[Context, Any, Any], tuple[torch.Tensor, ...]],
    size_reason: Callable[[Any], str | None],
    *,
    capability: tuple[int, int],
    summary: str,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
    **more: Any,
) -> Variant:
    """Return the registry's entry of one of kraken's functions.

    Args:
        family, launch, summary, more: as `library_variant`'s.
        module: that the function is in.
        buffers: makes, of a context, a problem and a group, what calls need; collective.
        size_reason: returns why kraken's function does not take a problem's sizes, or None.
        capability: the compute capability that it needs.
        dtypes: that it takes.
    """

    def supports(problem: Problem, config: GemmConfig | None) -> str | None:
        if problem.dtype not in dtypes:
            return f"kraken's {module} takes {' and '.join(map(str, dtypes))}, not {problem.dtype}"
        return PROJECT.missing_reason(capability) or size_reason(problem)

    def open(ctx: Context, problem: Problem) -> Kraken:
        group = ctx.process_group()
        imported = importlib.import_module(f"kraken.fused.{module}")
        return Kraken(imported, installed_commit(), group, buffers(ctx, problem, group))

    return library_variant(
        family,
        "kraken",
        launch,
        supports=supports,
        open=open,
        describe=lambda opened: f"kraken {opened.commit}",
        place=(Arrangement.OTHERS, Agent.OTHERS, Sync.OTHERS),
        spans_hosts=False,
        has_epilogue=False,
        takes_fp8=False,
        summary=summary,
        **more,
    )


def installed_commit() -> str:
    """Return the commit that pip installed kraken from, as it noted it (PEP 610), or "of an unknown commit"."""
    try:
        origin = json.loads(metadata.distribution("kraken").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {}
    return origin.get("vcs_info", {}).get("commit_id", "")[:12] or "of an unknown commit"
