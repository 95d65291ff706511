"""The process that something belongs to. One that is forked from it has copies of all it has, and is no rank."""

from __future__ import annotations

import os


class Owner:
    """The process that makes this."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this_process(self) -> bool:
        """Whether this process is the owner, and not one forked from it."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Raise in any other process; `what` says what the owner did, for the message: "opened this context".

        Raises:
            RuntimeError: names both processes.
        """
        if (pid := os.getpid()) != self._pid:
            raise RuntimeError(
                f"process {self._pid} {what}, and process {pid} asks, which was forked from it and is no rank; a "
                "forked process may read and write the rank's tensors, all else is for the rank to do"
            )
