"""A data-race checker for multi-GPU kernels, which needs no GPU.

All ranks run in one process, kernels in Triton's interpreter; every access to device memory is followed, with the
order that atomics (with their `sem` and `scope`), barriers, launches, streams and the host's meetings make; and with
where tensors of the heap end.
"""

from .detector import Race
from .run import DEFAULT_SCHEDULES, Report, check

__all__ = ["DEFAULT_SCHEDULES", "Race", "Report", "check"]
