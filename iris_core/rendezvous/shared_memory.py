"""Host memory that the ranks of one host share: an anonymous file (memfd), mapped by each.

It never has a name, so nothing is left behind however the ranks end, and no other user can open it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys

from .control_plane import ControlPlane


def share_memory(control_plane: ControlPlane, size_bytes: int, name: str) -> mmap.mmap:
    """Return zeroed memory that all ranks have mapped; collective. `name` is for ``/proc/<pid>/maps``.

    Where the ranks may be of several hosts, each has memory of its own, and sees of the others what they bring to
    something collective.

    Raises:
        OSError: there is no memory, or no room for it among a rank's addresses; on others as `PeerError`.
    """
    if not control_plane.passes_fds:
        return mmap.mmap(-1, size_bytes)
    own = None
    with contextlib.ExitStack() as descriptors:
        with control_plane.collective_section(f"share {size_bytes:,} bytes of host memory"):
            if size_bytes > sys.maxsize:
                raise OSError(f"no process has {size_bytes:,} bytes of addresses")
            if control_plane.rank == 0:
                own = os.memfd_create(name, os.MFD_CLOEXEC)
                descriptors.callback(os.close, own)
                os.ftruncate(own, size_bytes)
        (fd,) = control_plane.exchange_fds(own)
        descriptors.callback(os.close, fd)
        with control_plane.collective_section(f"map {size_bytes:,} bytes of host memory"):
            return mmap.mmap(fd, size_bytes)


def share_words(control_plane: ControlPlane, count: int, name: str) -> memoryview:
    """Return so many int64 words as `share_memory` does, in whole pages."""
    pages = -(-count * 8 // mmap.PAGESIZE)
    return memoryview(share_memory(control_plane, pages * mmap.PAGESIZE, name)).cast("q")
