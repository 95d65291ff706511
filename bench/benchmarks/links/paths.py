"""How each rank reaches each other's memory: NVLink, PCIe, the same GPU, another host."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from iris_core import Context
from iris_core.rendezvous.rank_info import host_name

OWN, SAME_GPU, NVLINK, PCIE, OTHER_HOST = "own", "same GPU", "NVLink", "PCIe", "NVLink of another host"
HOST_MEMORY, PEER_ACCESS, NONE = "host memory", "peer access", "no peer access"

# nvml.h: what is asked of two GPUs, and the answer that it is so.
_READ, _NVLINK, _OK = 0, 2, 0


def paths(ctx: Context) -> list[list[str]]:
    """Return by rank, and by peer, how its kernels reach that peer's memory; collective."""
    places = ctx.control_plane.all_gather([host_name(), ctx.backend.identity()], "find the paths between ranks")
    host, gpu = places[ctx.get_rank()]
    own = []
    with _nvml() as nvml:
        for peer, (its_host, its_gpu) in enumerate(places):
            if peer == ctx.get_rank():
                own.append(OWN)
            elif ctx.is_interpreted():
                own.append(HOST_MEMORY)
            elif its_host != host:
                own.append(OTHER_HOST)
            else:
                own.append(SAME_GPU if its_gpu == gpu else path_of(nvml, gpu, its_gpu))
    return ctx.control_plane.all_gather(own, "exchange the paths between ranks")


def path_of(nvml: ctypes.CDLL | None, gpu: str, peer: str) -> str:
    """Return how a GPU reaches another of its host.

    Args:
        nvml: NVIDIA's management library; None where there is none, as with AMD's GPUs.
        gpu, peer: their UUIDs, without a prefix.
    """
    if nvml is None:
        return PEER_ACCESS
    handles = []
    for uuid in (gpu, peer):
        handles.append(ctypes.c_void_p())
        if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handles[-1])):
            return PEER_ACCESS  # a part of a GPU, which has another prefix

    def can(what: int) -> bool:
        status = ctypes.c_int(-1)
        return not nvml.nvmlDeviceGetP2PStatus(*handles, what, ctypes.byref(status)) and status.value == _OK

    if can(_NVLINK):
        return NVLINK
    return PCIE if can(_READ) else NONE


@contextlib.contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2():
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()
