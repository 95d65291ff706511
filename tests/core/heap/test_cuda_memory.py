"""Which memory of other allocators the cuda backend shares, and how: against a driver that keeps books of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from iris_core.backends import cuda
from iris_core.backends.base import FABRIC, FD, Memory
from iris_core.backends.cuda import CudaBackend

PAGE = 2 << 20
FD_TYPE, FABRIC_TYPE = 1, 8
OK, REFUSED = 0, SimpleNamespace(name="CUDA_ERROR_NOT_SUPPORTED")
TORCHS, SEGMENTS, PRIVATE, PLAIN, FABRICS = (number << 40 for number in range(1, 6))


class FabricHandle:
    """64 bytes, as the driver's."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def getPtr(self) -> FabricHandle:
        return self


class Driver:
    """The driver's calls on memory that others have mapped; handles are numbers, of which it knows who holds them."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK)
    CUmemFabricHandle = FabricHandle

    def __init__(self) -> None:
        # By address: the mapping's size, its handle, and the types that its allocator asked for.
        self.mappings = {
            TORCHS: (3 * PAGE, 11, FD_TYPE),
            SEGMENTS: (PAGE, 21, FD_TYPE),
            SEGMENTS + PAGE: (2 * PAGE, 22, FD_TYPE),
            PRIVATE: (PAGE, 31, 0),
            PLAIN: (PAGE, None, 0),
            FABRICS: (PAGE, 51, FABRIC_TYPE),
        }
        self.held: list[Any] = []
        self.created = 0
        self.has_fabric = True

    def cuGetErrorString(self, error: Any) -> tuple[Any, bytes]:
        return OK, b"not supported"

    def _mapping(self, address: int) -> tuple[int, int, Any, int]:
        return next((start, *one) for start, one in self.mappings.items() if start <= address < start + one[0])

    def cuMemGetAddressRange(self, address: int) -> tuple[Any, ...]:
        return OK, *self._mapping(address)[:2]

    def cuMemRetainAllocationHandle(self, address: int) -> tuple[Any, ...]:
        handle = self._mapping(address)[2]
        if handle is None:
            return (REFUSED, None)
        self.held.append(handle)
        return OK, handle

    def cuMemRelease(self, handle: Any) -> tuple[Any, ...]:
        self.held.remove(handle)
        return (OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[Any, ...]:
        asked = next((types for _, one, types in self.mappings.values() if one == handle), self.created)
        if not asked & kind:
            return (REFUSED, None)
        return OK, os.open("/dev/null", os.O_RDONLY) if kind == FD_TYPE else FabricHandle(bytes([handle]) * 64)

    def cuMemImportFromShareableHandle(self, given: Any, kind: int) -> tuple[Any, ...]:
        if kind == FD_TYPE:
            os.fstat(given)
        what = "of a descriptor" if kind == FD_TYPE else f"of {given.data.hex()[:4]}"
        self.held.append(what)
        return OK, what

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        self.created = properties.requestedHandleTypes
        self.held.append(99)
        return OK, 99

    def cuMemGetAllocationGranularity(self, properties: Any, kind: Any) -> tuple[Any, ...]:
        return OK, PAGE

    def cuMemAddressReserve(self, size: int, *_: Any) -> tuple[Any, ...]:
        self.held.append(size)
        return OK, 1 << 46

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        self.held.remove(size)
        return (OK,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: Any, flags: int) -> tuple[Any, ...]:
        self.held.append((address, size))
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        self.held.remove((address, size))
        return (OK,)

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        return OK, int(self.has_fabric)

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED=128)


class Ranks:
    """Two ranks that do alike; this is rank 0."""

    rank, world_size = 0, 2

    def __init__(self, passes_fds: bool) -> None:
        self.passes_fds = passes_fds

    @contextlib.contextmanager
    def collective_section(self, what: str) -> Iterator[None]:
        yield

    def agree(self, what: str, value: Any) -> None: ...

    def exchange_fds(self, fd: int) -> list[int]:
        assert self.passes_fds
        return [os.dup(fd) for _ in range(self.world_size)]

    def all_gather(self, value: Any, what: str) -> list[Any]:
        return [value, "ab" * 64]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda, "cu", made)
    return made


def backend_of(passes_fds: bool) -> tuple[Any, Any]:
    """Return a backend whose window is open, and its ranks."""
    backend: Any = CudaBackend.__new__(CudaBackend)
    backend.device = SimpleNamespace(index=0)
    backend._segments, backend._shared, backend._base = {}, [], 0
    backend._properties, backend._granularity_kind = SimpleNamespace(), None
    backend._fd_type, backend._fabric_type = FD_TYPE, FABRIC_TYPE
    backend.synchronize = lambda: None
    backend._open_access = lambda address, size: None
    ranks: Any = Ranks(passes_fds)
    backend.open_window(ranks, PAGE)
    return backend, ranks


def tensor_at(address: int, size: int) -> Any:
    return SimpleNamespace(data_ptr=lambda: address, nbytes=size)


@pytest.mark.parametrize(
    ("address", "size", "expected"),
    [
        (TORCHS + 4096, PAGE, Memory(((11, 3 * PAGE),), 4096, FD)),
        (SEGMENTS + PAGE - 512, 1024, Memory(((21, PAGE), (22, 2 * PAGE)), PAGE - 512, FD)),
        (SEGMENTS + PAGE, 1024, Memory(((22, 2 * PAGE),), 0, FD)),
        (FABRICS, 64, Memory(((51, PAGE),), 0, FABRIC)),
    ],
)
def test_memory_is_found_with_all_its_pieces(driver: Driver, address: int, size: int, expected: Memory) -> None:
    backend, _ = backend_of(passes_fds=True)
    files = len(os.listdir("/proc/self/fd"))
    found = backend.memory_of(tensor_at(address, size))
    assert found[:3] == expected[:3]
    assert len(os.listdir("/proc/self/fd")) == files
    for handle, _ in found.pieces:
        backend._release(handle)


@pytest.mark.parametrize(
    ("address", "passes_fds", "said"),
    [(PLAIN, True, "cuMemCreate"), (PRIVATE, True, "did not ask"), (TORCHS, False, "did not ask")],
)
def test_memory_that_cannot_be_shared_is_refused(driver: Driver, address: int, passes_fds: bool, said: str) -> None:
    backend, _ = backend_of(passes_fds)
    held = list(driver.held)
    with pytest.raises(ValueError, match=said):
        backend.memory_of(tensor_at(address, 64))
    assert driver.held == held


@pytest.mark.parametrize("passes_fds", [True, False])
def test_the_heap_is_shared_by_what_reaches_its_ranks(driver: Driver, passes_fds: bool) -> None:
    backend, ranks = backend_of(passes_fds)
    assert backend.map(ranks, lambda: backend.own_memory(PAGE), lambda size: 0) == (0, 0)
    assert driver.created == (FD_TYPE if passes_fds else FABRIC_TYPE)
    assert ("of a descriptor" if passes_fds else "of abab") in driver.held
    foreign = backend.memory_of(tensor_at(FABRICS + 8, 8))
    assert backend.map(ranks, lambda: foreign, lambda size: PAGE) == (PAGE, 8)
    assert ((1 << 46) + backend._stride + PAGE, PAGE) in driver.held  # rank 1's, beside its heap
    backend.close_window()
    assert driver.held == []


def test_ranks_of_several_hosts_need_fabric_handles(driver: Driver) -> None:
    driver.has_fabric = False
    with pytest.raises(RuntimeError, match=r"IRIS_TOKEN is set, .* fabric handles"):
        backend_of(passes_fds=False)
    backend_of(passes_fds=True)
