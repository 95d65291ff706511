"""The heap on AMD GPUs, through ``libamdhip64``.

Written against the HIP headers and not yet run: no AMD GPU was at hand. Memory is uncached (fine-grained), as stores
from peers and their flags must be visible while a kernel runs; hipMemCreate takes that kind since ROCm 7.1 or 7.2
(github.com/ROCm/rocm-systems, pull requests 747 and 847; 4476, of 2026, mends that it was not passed on). That a
stream's write of a value comes after a fence over the system, as CUDA's is, HIP does not say: it is assumed.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_ulonglong, c_ushort, c_void_p
from functools import partial
from typing import Any

import torch

from .base import Step
from .vmm import VmmBackend

# hip_runtime_api.h
_ALLOCATION_TYPE_UNCACHED = 0x40000000
_HANDLE_TYPE_POSIX_FD = 1
_LOCATION_TYPE_DEVICE = 1
_ACCESS_READ_WRITE = 3
_GRANULARITY_RECOMMENDED = 1
_STREAM_WAIT_VALUE_GEQ = 0
_STREAM_WRITE_VALUE_DEFAULT = 0
_STREAM_NON_BLOCKING = 1
_HOST_REGISTER_PORTABLE = 1
_HOST_REGISTER_MAPPED = 2
_MEMCPY_DEVICE_TO_DEVICE = 3

_DESCRIPTORS_BY_VALUE = 70_100_000  # from HIP 7.1 on; before, it reads the descriptor at the address that it is given


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", c_ushort))


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


class HipBackend(VmmBackend):
    """A GPU's memory through HIP's virtual-memory calls."""

    name = "hip"
    streams_need_a_unit = True  # ROCm writes stream values by a kernel, and has one for copies in rows
    # Triton takes it that 32-bit offsets reach all of a storage below 2 GiB, and would cut off the distance to a peer.
    smallest_window = 1 << 31
    storages_are_whole = True

    def __init__(self, device_index: int) -> None:
        if torch.version.hip is None or not torch.cuda.is_available():
            raise RuntimeError("the hip backend needs an AMD GPU and a ROCm build of torch; none was found here")
        self._hip = ctypes.CDLL("libamdhip64.so")
        self._hip.hipGetErrorString.restype = ctypes.c_char_p
        super().__init__(device_index)
        location = _Location(_LOCATION_TYPE_DEVICE, device_index)
        self._properties = _Properties(_ALLOCATION_TYPE_UNCACHED, _HANDLE_TYPE_POSIX_FD, location)

    def arch(self) -> str:
        return torch.cuda.get_device_properties(self.device).gcnArchName.split(":")[0]

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._hip, name)(*arguments)
        if error:
            raise RuntimeError(f"HIP: {name}: {self._hip.hipGetErrorString(error).decode()}")

    def _call_of_uncached(self, name: str, *arguments: Any) -> None:
        """Make a call that older runtimes refuse for the kind of memory that the heap is of."""
        try:
            self._call(name, *arguments)
        except RuntimeError as error:
            major, minor = divmod(self._version() // 100_000, 100)
            raise RuntimeError(
                f"{error}; the heap is of uncached memory, which HIP gives from 7.2 on; this is HIP {major}.{minor}"
            ) from None

    def _version(self) -> int:
        """Return the runtime's, as HIP_VERSION counts: 70_100_000 and more of 7.1."""
        version = c_int()
        self._call("hipRuntimeGetVersion", byref(version))
        return version.value

    def _granularity(self) -> int:
        value = c_size_t()
        flag = c_int(_GRANULARITY_RECOMMENDED)
        self._call_of_uncached("hipMemGetAllocationGranularity", byref(value), byref(self._properties), flag)
        return value.value

    def _create(self, size: int) -> Any:
        handle = c_void_p()
        self._call_of_uncached("hipMemCreate", byref(handle), c_size_t(size), byref(self._properties), c_ulonglong(0))
        return handle

    def _export(self, handle: Any) -> int:
        fd = c_int()
        kind = c_int(_HANDLE_TYPE_POSIX_FD)
        self._call("hipMemExportToShareableHandle", byref(fd), handle, kind, c_ulonglong(0))
        return fd.value

    def _import(self, fd: int) -> Any:
        handle = c_void_p()
        kind = c_int(_HANDLE_TYPE_POSIX_FD)
        given = c_void_p(fd) if self._version() >= _DESCRIPTORS_BY_VALUE else byref(c_int(fd))
        self._call("hipMemImportFromShareableHandle", byref(handle), given, kind)
        return handle

    def _reserve(self, size: int, alignment: int) -> int:
        address = c_void_p()
        self._call(
            "hipMemAddressReserve", byref(address), c_size_t(size), c_size_t(alignment), c_void_p(0), c_ulonglong(0)
        )
        return int(address.value or 0)

    def _map(self, address: int, size: int, handle: Any) -> None:
        self._call("hipMemMap", c_void_p(address), c_size_t(size), c_size_t(0), handle, c_ulonglong(0))

    def _open_access(self, address: int, size: int) -> None:
        access = _Access(self._properties.location, _ACCESS_READ_WRITE)
        pointer = ctypes.cast(byref(access), POINTER(_Access))
        self._call("hipMemSetAccess", c_void_p(address), c_size_t(size), pointer, c_size_t(1))

    def _unmap(self, address: int, size: int) -> None:
        self._call("hipMemUnmap", c_void_p(address), c_size_t(size))

    def _release(self, handle: Any) -> None:
        self._call("hipMemRelease", handle)

    def _free_range(self, address: int, size: int) -> None:
        self._call("hipMemAddressFree", c_void_p(address), c_size_t(size))

    def _register(self, address: int, size: int) -> int:
        flags = c_uint(_HOST_REGISTER_PORTABLE | _HOST_REGISTER_MAPPED)
        self._call("hipHostRegister", c_void_p(address), c_size_t(size), flags)
        pointer = c_void_p()
        self._call("hipHostGetDevicePointer", byref(pointer), c_void_p(address), c_uint(0))
        return int(pointer.value or 0)

    def _unregister(self, address: int) -> None:
        self._call("hipHostUnregister", c_void_p(address))

    def _create_stream(self) -> int:
        stream = c_void_p()
        self._call("hipStreamCreateWithFlags", byref(stream), c_uint(_STREAM_NON_BLOCKING))
        return int(stream.value or 0)

    def waiting_for_value(self, stream: int, address: int, value: int) -> Step:
        return partial(
            self._call,
            "hipStreamWaitValue32",
            c_void_p(stream),
            c_void_p(address),
            c_uint(value),
            c_uint(_STREAM_WAIT_VALUE_GEQ),
            c_uint(0xFFFFFFFF),
        )

    def writing_value(self, stream: int, address: int, value: int) -> Step:
        return partial(
            self._call,
            "hipStreamWriteValue64",
            c_void_p(stream),
            c_void_p(address),
            c_ulonglong(value),
            c_uint(_STREAM_WRITE_VALUE_DEFAULT),
        )

    def copying_2d(
        self, *, dst: int, dst_pitch: int, src: int, src_pitch: int, width_bytes: int, height: int, stream: int
    ) -> Step:
        return partial(
            self._call,
            "hipMemcpy2DAsync",
            c_void_p(dst),
            c_size_t(dst_pitch),
            c_void_p(src),
            c_size_t(src_pitch),
            c_size_t(width_bytes),
            c_size_t(height),
            c_int(_MEMCPY_DEVICE_TO_DEVICE),
            c_void_p(stream),
        )

    def record_event(self, event: int, stream: int) -> None:
        self._call("hipEventRecord", c_void_p(event), c_void_p(stream))

    def wait_event(self, stream: int, event: int) -> None:
        self._call("hipStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint(0))
