"""Host memory that the ranks of one host share: an anonymous file (memfd), mapped by each.

It never has a name, so nothing is left behind however the ranks end, and no other user can open it.
"""

from __future__ import annotations

import mmap
import os

from .host_group import HostGroup


def share_memory(group: HostGroup, size_bytes: int, name: str) -> mmap.mmap:
    """Return zeroed memory that all ranks have mapped; collective. `name` is for ``/proc/<pid>/maps``.

    Raises:
        OSError: there is no memory, or no room for it among a rank's addresses; on others as `PeerError`.
    """
    own = None
    with group.together(f"share {size_bytes:,} bytes of host memory"):
        if group.rank == 0:
            own = os.memfd_create(name, os.MFD_CLOEXEC)
            os.ftruncate(own, size_bytes)
    (fd,) = group.exchange_fds(own)
    try:
        with group.together(f"map {size_bytes:,} bytes of host memory"):
            memory = mmap.mmap(fd, size_bytes)
    finally:
        for done in {fd, own} - {None}:
            os.close(done)  # type: ignore[arg-type]
    return memory
