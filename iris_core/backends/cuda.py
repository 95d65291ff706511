"""The heap on NVIDIA GPUs, through ``cuda-bindings``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..rendezvous.control_plane import ControlPlane
from .base import FABRIC, FD, Memory, Step
from .vmm import Rows, VmmBackend

try:
    from cuda.bindings import driver as cu
except ImportError:  # a machine without CUDA still imports this package
    cu = None


def _check(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error != cu.CUresult.CUDA_SUCCESS:
        _, text = cu.cuGetErrorString(error)
        raise RuntimeError(f"CUDA driver: {error.name}: {text.decode() if text else 'no description'}")
    return values[0] if len(values) == 1 else tuple(values)


class CudaBackend(VmmBackend):
    """A GPU's memory through CUDA's virtual-memory calls."""

    name = "cuda"
    _host_calls = "MemHost"

    def __init__(self, device_index: int) -> None:
        if cu is None:
            raise RuntimeError("the cuda backend needs cuda-bindings: pip install 'cuda-bindings>=12.8'")
        if not torch.cuda.is_available() or torch.version.cuda is None:
            raise RuntimeError("the cuda backend needs an NVIDIA GPU and a CUDA build of torch; none was found here")
        super().__init__(device_index)
        self._properties = cu.CUmemAllocationProp()
        self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device_index
        self._fd_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._fabric_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        self._granularity_kind = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._capturing = torch.cuda.ExternalStream(self._create_stream(), self.device)

    def open_window(self, control_plane: ControlPlane, heap_size: int) -> int:
        self._shared_by = FD if control_plane.passes_fds else FABRIC
        self._properties.requestedHandleTypes = self._fd_type if control_plane.passes_fds else self._fabric_type
        with control_plane.collective_section("look for fabric handles"):
            attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
            if self._shared_by == FABRIC and not self._get("DeviceGetAttribute", attribute, self.device.index):
                raise RuntimeError(
                    "IRIS_TOKEN is set, for ranks of several hosts; these share memory by fabric handles, which this "
                    "GPU or driver does not have: they take an NVLink domain of the hosts and its IMEX service"
                )
        return super().open_window(control_plane, heap_size)

    def own_memory(self, size: int) -> Memory:
        return super().own_memory(size)._replace(shared_by=self._shared_by)

    def memory_of(self, tensor: torch.Tensor) -> Memory:
        first = at = int(self._get("MemGetAddressRange", tensor.data_ptr())[0])
        pieces = []
        with contextlib.ExitStack() as retained:
            try:
                while at < tensor.data_ptr() + tensor.nbytes:
                    handle = self._get("MemRetainAllocationHandle", at)
                    retained.callback(self._release, handle)
                    pieces.append((handle, int(self._get("MemGetAddressRange", at)[1])))
                    at += pieces[-1][1]
            except RuntimeError as error:
                raise ValueError(f"its memory is not of CUDA's virtual-memory calls (cuMemCreate): {error}") from None
            memory = Memory(tuple(pieces), tensor.data_ptr() - first, self._shared_by_of(pieces[0][0]))
            retained.pop_all()
        return memory

    def _shared_by_of(self, handle: Any) -> str:
        """Return how memory can be shared that another allocator has made, by trying."""
        refused = ""
        for shared_by in (FD, FABRIC) if self._shared_by == FD else (FABRIC,):
            try:
                exported = self._export(handle, shared_by)
            except RuntimeError as error:
                refused = str(error)
                continue
            if shared_by == FD:
                os.close(exported)
            return shared_by
        raise ValueError(f"its allocator did not ask for memory that other processes can take: {refused}")

    def _export(self, handle: Any, shared_by: str) -> Any:
        if shared_by == FD:
            return super()._export(handle, shared_by)
        return self._get("MemExportToShareableHandle", handle, self._fabric_type, 0).data.hex()

    def _import(self, received: Any, shared_by: str) -> Any:
        if shared_by == FD:
            return super()._import(received, shared_by)
        fabric = cu.CUmemFabricHandle()
        fabric.data = bytes.fromhex(received)
        return self._get("MemImportFromShareableHandle", fabric.getPtr(), self._fabric_type)

    def arch(self) -> str:
        major, minor = torch.cuda.get_device_capability(self.device)
        return f"sm_{major}{minor}"

    def _get(self, name: str, *arguments: Any) -> Any:
        return _check(getattr(cu, f"cu{name}")(*arguments))

    _call = _get

    def _open_access(self, address: int, size: int) -> None:
        access = cu.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _check(cu.cuMemSetAccess(address, size, [access], 1))

    def _create_stream(self) -> int:
        return int(_check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def waiting_for_value(self, stream: int, address: int, value: int) -> Step:
        at_least = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        return _queuing(cu.cuStreamWaitValue32, cu.CUstream(stream), cu.CUdeviceptr(address), value, at_least)

    def writing_value(self, stream: int, address: int, value: int) -> Step:
        fenced = cu.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        return _queuing(cu.cuStreamWriteValue64, cu.CUstream(stream), cu.CUdeviceptr(address), value, fenced)

    def copying_2d(self, stream: int, rows: Rows) -> Step:
        if rows.dst_pitch == rows.src_pitch == rows.width_bytes:  # 2 µs less than in rows
            to, come = cu.CUdeviceptr(rows.dst), cu.CUdeviceptr(rows.src)
            return _queuing(cu.cuMemcpyDtoDAsync, to, come, rows.width_bytes * rows.height, cu.CUstream(stream))
        copy = cu.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.dstDevice, copy.dstPitch, copy.srcDevice, copy.srcPitch, copy.WidthInBytes, copy.Height = rows
        return _queuing(cu.cuMemcpy2DAsync, copy, cu.CUstream(stream))

    def capture(self, steps: Iterable[Step], stream: int | None = None) -> CudaGraph:
        """Make a graph of what steps queue; nothing runs.

        Args:
            steps: what is called.
            stream: the handle of the stream that all of them queue on; None: they queue on the current stream, and on
                side streams that join it.

        Raises:
            RuntimeError: the driver cannot make one of it.
        """
        captured = self._capturing.cuda_stream if stream is None else stream
        current = torch.cuda.stream(self._capturing) if stream is None else contextlib.nullcontext()
        with current:
            _check(cu.cuStreamBeginCapture(captured, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
            try:
                for step in steps:
                    step()
            except BaseException:
                error, graph = cu.cuStreamEndCapture(captured)  # which the failed step may have ended already
                if error == cu.CUresult.CUDA_SUCCESS:
                    cu.cuGraphDestroy(graph)
                raise
            graph = _check(cu.cuStreamEndCapture(captured))
        try:
            flags = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
            return CudaGraph(_check(cu.cuGraphInstantiate(graph, flags)))
        finally:
            _check(cu.cuGraphDestroy(graph))


class CudaGraph:
    """A graph that can be launched, any number of times, one after the other."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def launch(self, stream: int) -> None:
        """Queue all of it on a stream."""
        _check(cu.cuGraphLaunch(self._graph, stream))

    def close(self) -> None:
        """Release it; what was launched still runs to its end."""
        _check(cu.cuGraphExecDestroy(self._graph))


def _queuing(call: Callable[..., tuple[Any, ...]], *arguments: Any) -> Step:
    """Return what makes a call of the driver with arguments that are converted already."""

    def queue() -> None:
        result = call(*arguments)
        if result[0]:
            _check(result)

    return queue
