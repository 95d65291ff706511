"""The heap on AMD GPUs, through ``libamdhip64``.

Written against the HIP headers and not yet run: no AMD GPU was at hand. Memory is uncached (fine-grained), as stores
from peers and their flags must be visible while a kernel runs; hipMemCreate takes that kind since ROCm 7.1 or 7.2
(github.com/ROCm/rocm-systems, pull requests 747 and 847; 4476, of 2026, mends that it was not passed on). That a
stream's write of a value comes after a fence over the system, as CUDA's is, HIP does not say: it is assumed.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from functools import partial
from typing import Any

import torch

from .base import Step
from .vmm import Rows, VmmBackend

# hip_runtime_api.h
_ALLOCATION_TYPE_UNCACHED = 0x40000000
_HANDLE_TYPE_POSIX_FD = 1
_LOCATION_TYPE_DEVICE = 1
_ACCESS_READ_WRITE = 3
_GRANULARITY_RECOMMENDED = 1
_STREAM_WAIT_VALUE_GEQ = 0
_STREAM_WRITE_VALUE_DEFAULT = 0
_STREAM_NON_BLOCKING = 1
_MEMCPY_DEVICE_TO_DEVICE = 3


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


# What the calls take: without this ctypes would cut addresses and sizes off at 32 bits. The first is where a result
# goes, where it points to a number. Handles, streams, events and a descriptor to import are addresses, too.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "hipEventRecord": (c_void_p, c_void_p),
    "hipHostGetDevicePointer": (POINTER(c_void_p), c_void_p, c_uint),
    "hipHostRegister": (c_void_p, c_size_t, c_uint),
    "hipHostUnregister": (c_void_p,),
    "hipMemAddressFree": (c_void_p, c_size_t),
    "hipMemAddressReserve": (POINTER(c_void_p), c_size_t, c_size_t, c_void_p, c_ulonglong),
    "hipMemCreate": (POINTER(c_void_p), c_size_t, POINTER(_Properties), c_ulonglong),
    "hipMemExportToShareableHandle": (POINTER(c_int), c_void_p, c_int, c_ulonglong),
    "hipMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "hipMemImportFromShareableHandle": (POINTER(c_void_p), c_void_p, c_int),
    "hipMemMap": (c_void_p, c_size_t, c_size_t, c_void_p, c_ulonglong),
    "hipMemRelease": (c_void_p,),
    "hipMemSetAccess": (c_void_p, c_size_t, POINTER(_Access), c_size_t),
    "hipMemUnmap": (c_void_p, c_size_t),
    "hipMemsetD8": (c_void_p, c_ubyte, c_size_t),
    "hipMemcpy2DAsync": (c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, c_void_p),
    "hipRuntimeGetVersion": (POINTER(c_int),),
    "hipStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "hipStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "hipStreamWaitValue32": (c_void_p, c_void_p, c_uint, c_uint, c_uint),
    "hipStreamWriteValue64": (c_void_p, c_void_p, c_ulonglong, c_uint),
}


class HipBackend(VmmBackend):
    """A GPU's memory through HIP's virtual-memory calls."""

    name = "hip"
    streams_need_a_unit = True  # ROCm writes stream values by a kernel, and has one for copies in rows
    is_fully_connected = True  # xGMI, between every two GPUs of a host
    # Triton takes it that 32-bit offsets reach all of a storage below 2 GiB, and would cut off the distance to a peer.
    reserved_bytes = 1 << 31
    storages_are_whole = True
    _fd_type = _HANDLE_TYPE_POSIX_FD
    _granularity_kind = _GRANULARITY_RECOMMENDED
    _host_calls = "Host"

    def __init__(self, device_index: int) -> None:
        if torch.version.hip is None or not torch.cuda.is_available():
            raise RuntimeError("the hip backend needs an AMD GPU and a ROCm build of torch; none was found here")
        self._hip = ctypes.CDLL("libamdhip64.so")
        self._hip.hipGetErrorString.restype = ctypes.c_char_p
        for name, arguments in _ARGUMENTS.items():
            getattr(self._hip, name).argtypes = arguments
        super().__init__(device_index)
        location = _Location(_LOCATION_TYPE_DEVICE, device_index)
        self._properties = _Properties(_ALLOCATION_TYPE_UNCACHED, _HANDLE_TYPE_POSIX_FD, location)

    def arch(self) -> str:
        return torch.cuda.get_device_properties(self.device).gcnArchName.split(":")[0]

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._hip, f"hip{name}")(*arguments)
        if error:
            raise RuntimeError(f"HIP: hip{name}: {self._hip.hipGetErrorString(error).decode()}{self._hint(name)}")

    def _hint(self, name: str) -> str:
        """Return what to add to the error of a call that older runtimes refuse for the kind of memory of the heap."""
        if name not in ("MemGetAllocationGranularity", "MemCreate"):
            return ""
        major, minor = divmod(self._get("RuntimeGetVersion") // 100_000, 100)
        return f"; the heap is of uncached memory, which HIP gives from 7.2 on; this is HIP {major}.{minor}"

    def _get(self, name: str, *arguments: Any) -> Any:
        given = _ARGUMENTS[f"hip{name}"][0]._type_()
        self._call(name, byref(given), *arguments)
        return given.value

    def _open_access(self, address: int, size: int) -> None:
        access = _Access(self._properties.location, _ACCESS_READ_WRITE)
        self._call("MemSetAccess", address, size, access, 1)

    def _create_stream(self) -> int:
        return int(self._get("StreamCreateWithFlags", _STREAM_NON_BLOCKING))

    def waiting_for_value(self, stream: int, address: int, value: int) -> Step:
        return partial(self._call, "StreamWaitValue32", stream, address, value, _STREAM_WAIT_VALUE_GEQ, 0xFFFFFFFF)

    def writing_value(self, stream: int, address: int, value: int) -> Step:
        return partial(self._call, "StreamWriteValue64", stream, address, value, _STREAM_WRITE_VALUE_DEFAULT)

    def copying_2d(self, stream: int, rows: Rows) -> Step:
        return partial(self._call, "Memcpy2DAsync", *rows, _MEMCPY_DEVICE_TO_DEVICE, stream)
