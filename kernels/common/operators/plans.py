"""How an operator's calls are configured, by their number of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..call import Device
from ..config import GemmConfig, fp8_formats, is_fp8
from ..problem import Problem, plan_rows, tile_rows
from ..variants.implementation import Implementation

P = TypeVar("P", bound=Problem)
_MOST_PLANNED = 1 << 14  # plans that a process keeps, some 70 for an operator of 8192 rows


@functools.lru_cache(_MOST_PLANNED)
def _planned(plan: Callable[[Any, Device], GemmConfig | None], problem: Problem, device: Device) -> GemmConfig | None:
    return plan(problem, device)


def fp8_reason(problem: Problem, device: Device) -> str | None:
    """Return why a device cannot multiply a problem's fp8 formats, or None: as others it would do so in software."""
    found = fp8_formats(device.arch)
    for dtype in (problem.dtype, problem.b_dtype):
        if is_fp8(dtype) and dtype not in found:
            has = f"it multiplies {' and '.join(map(str, found))}" if found else "it has no fp8: bf16 and fp16 work"
            return f"{device.arch} does not multiply {dtype}; {has}"
    return None


class Plans(Generic[P]):
    """The configurations of calls of a problem with as many rows, or fewer.

    Args:
        implementation: the variant's.
        device: that all ranks have.
        given: the configuration of all calls; None to have them planned.
        config_of: returns the configuration of a problem of another m where it is known to be the best; None for the
            plan. The same on all ranks.
        problem: its m is the most.

    Attributes:
        whole: the configuration for the whole problem.
    """

    def __init__(
        self,
        implementation: Implementation,
        device: Device,
        given: GemmConfig | None,
        config_of: Callable[[P], GemmConfig | None],
        problem: P,
    ) -> None:
        self._implementation, self._device = implementation, device
        self._given, self._config_of = given, config_of
        self._problem = problem
        self._configs: dict[int, GemmConfig | None] = {}
        self._same: dict[GemmConfig | None, GemmConfig | None] = {}  # one of those that are equal: found sooner
        self.whole = self.of(problem.m)

    def of(self, m: int) -> GemmConfig | None:
        """Return the configuration for so many rows."""
        rows = plan_rows(m, self._problem.m)
        if rows not in self._configs:
            config = self._given or self._config_of(self._problem.with_rows(rows)) or self._planned(rows)
            self._configs[rows] = self._same.setdefault(config, config)
        config, fit = self._configs[rows], self._implementation.fit
        return fit(self._problem.with_rows(m), config) if fit and config else config

    def _planned(self, rows: int) -> GemmConfig | None:
        problem = self._problem.with_rows(tile_rows(rows, self._problem.m))
        return _planned(self._implementation.plan, problem, self._device)

    def unsupported_reason(self) -> str | None:
        """Return why the whole problem cannot be done here so, or None."""
        config, device = self.whole, self._device
        if reason := fp8_reason(self._problem, device):
            return reason
        if reason := self._implementation.supports(self._problem, config):
            return reason
        if (norm := self._problem.norm) and (reason := norm.unsupported_reason(device.arch)):
            return reason
        is_limited = device.arch != "cpu" or device.reserved_sms > 0
        if config and config.num_sms > device.num_sms and is_limited:
            beside = f", beside the {device.reserved_sms} that reserve_sms keeps free" if device.reserved_sms else ""
            return (
                f"num_sms is {config.num_sms}; programs wait for each other, and this GPU has room for "
                f"{device.num_sms} at once{beside}: num_sms={device.num_sms}"
            )
        return None
