"""Waiting on the CPU: a process that looks again and again takes the time of those that it waits for."""

from __future__ import annotations

import time

_STEP_S = 5e-5
_LONGEST_S = 2e-3


def back_off(looks: int) -> None:
    """Let other processes run, after that many looks: the more, the longer, 2 ms at most."""
    time.sleep(min(looks * _STEP_S, _LONGEST_S))
