"""What the ranks ask of a context, which is the same on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..backends.base import Backend, Memory
from ..heap.heap import MemoryProvider
from ..rendezvous.control_plane import ControlPlane
from ..utils.settings import is_whole

LEAST_SMS = 2  # of kernels, where some are reserved: one that multiplies, and one that communicates


@dataclass(frozen=True)
class ContextOptions:
    """The arguments of `iris`, and what the environment says beside them.

    Args:
        heap_size: bytes of symmetric heap a rank.
        device: as asked for: "auto", "cuda" or "cpu".
        timeout_s: limit of a wait in a kernel, in seconds; 0 for none.
        reserve_sms: SMs that kernels leave free.
        provider: of the heap's memory; None for the driver.
        debug_mode: whether ranks compare their calls.
    """

    heap_size: int
    device: str
    timeout_s: float
    reserve_sms: int
    provider: str | MemoryProvider | None
    debug_mode: bool

    @property
    def provider_name(self) -> str | None:
        """What the heap's memory is from, by name; None for the driver."""
        return self.provider if isinstance(self.provider, (str, type(None))) else type(self.provider).__name__

    def own_memory(self, backend: Backend) -> Callable[[int], Memory]:
        """Return what gives so many bytes of this rank's memory."""
        if self.provider is None:
            return backend.own_memory
        from ..heap.providers import provided_memory  # which is no part of the core

        return provided_memory(self.provider, backend)

    def check_reserved(self, backend: Backend) -> None:
        """Raise ValueError where too few SMs would be left for kernels."""
        most = backend.compute_units() - LEAST_SMS
        if self.reserve_sms != 0 and not (is_whole(self.reserve_sms) and self.reserve_sms <= most):
            raise ValueError(
                f"reserve_sms is {self.reserve_sms!r}; it takes 0 to {most} of the {most + LEAST_SMS} SMs here: "
                f"kernels need {LEAST_SMS}"
            )

    def agree(self, control_plane: ControlPlane, **found: Any) -> None:
        """Raise ValueError on every rank unless all ask for the same, and found the same; collective."""
        asked = {
            "heap_size": self.heap_size,
            "timeout_s": self.timeout_s,
            "reserve_sms": self.reserve_sms,
            "IRIS_DEBUG": self.debug_mode,
            "provider": self.provider_name,
        }
        control_plane.agree("what the ranks ask of their context", asked | found)
