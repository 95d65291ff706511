"""What a GPU's heap takes of the driver it gives back, also where opening it fails half-way."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from iris_core.backends.hip import _ARGUMENTS, HipBackend, _Properties
from iris_core.backends.vmm import VmmBackend

SIZE, RANK, WORLD_SIZE = 2 << 20, 1, 3


class Driver:
    """The calls of a driver that fails at one of them, and what is held of it."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.held: list[Any] = []

    def take(self, call: str, what: Any) -> Any:
        if call == self.failing:
            raise RuntimeError(f"CUDA driver: no {call}")
        self.held.append(what)
        return what


class Backend(VmmBackend):
    """Opens a window through that driver, without torch."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._handles, self._mapped, self._shared, self._base = [], [], [], 0

    def synchronize(self) -> None:
        pass

    def _granularity(self) -> int:
        return SIZE

    def _create(self, size: int) -> Any:
        return self.driver.take("create", "own memory")

    def _export(self, handle: Any) -> int:
        fd = os.open("/dev/null", os.O_RDONLY)
        return fd if self.driver.failing != "export" else self.driver.take("export", os.close(fd))

    def _import(self, fd: int) -> Any:
        os.fstat(fd)  # it is open
        return self.driver.take("import", f"memory of {fd}")

    def _reserve(self, size: int, alignment: int) -> int:
        self.driver.take("reserve", ("range", size))
        return 1 << 40

    def _call(self, name: str, *arguments: Any) -> None:
        if name == "MemMap":
            self.driver.take("map" if len(self._mapped) else "the first map", ("mapping", arguments[0]))
        elif name == "MemUnmap":
            self.driver.held.remove(("mapping", arguments[0]))
        elif name == "MemRelease":
            self.driver.held.remove(arguments[0])
        else:
            assert name == "MemAddressFree"
            assert not [what for what in self.driver.held if what[0] == "mapping"]  # which would keep the range
            self.driver.held.remove(("range", arguments[1]))

    def _open_access(self, address: int, size: int) -> None:
        self.driver.take("access", "access")
        self.driver.held.remove("access")


Backend.__abstractmethods__ = frozenset()  # the rest is not called


class Group:
    """Three ranks, of which another may fail too."""

    rank, world_size = RANK, WORLD_SIZE

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    @contextlib.contextmanager
    def collective_section(self, what: str) -> Iterator[None]:
        yield
        if self.failing in what.split():
            raise RuntimeError(f"rank 0 failed to {what}")

    def exchange_fds(self, fd: int) -> list[int]:
        if self.failing == "exchange":
            raise RuntimeError("rank 0 has left")
        return [os.dup(fd) for _ in range(self.world_size)]


@pytest.mark.parametrize("own", ["", "create", "export", "import", "reserve", "the first map", "map", "access"])
@pytest.mark.parametrize("peers", ["", "reserve", "exchange", "map"])
def test_what_was_taken_is_given_back(own: str, peers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.as_tensor", lambda exported, device: exported)
    before = set(os.listdir("/proc/self/fd"))
    backend = Backend(Driver(own))
    backend.device = SimpleNamespace()  # type: ignore[assignment]
    group: Any = Group(peers)
    opening = contextlib.nullcontext() if not own + peers else pytest.raises(RuntimeError)
    with opening:
        backend.open_window(group, SIZE)
    assert set(os.listdir("/proc/self/fd")) == before
    if not own + peers:
        assert len(backend.driver.held) == 2 * WORLD_SIZE + 1
    backend.close_window()
    assert backend.driver.held == []
    backend.close_window()  # which finds nothing


class Hip:
    """The two calls that importing takes; a descriptor is looked for where that version looks for it."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.imported: list[int] = []

    def hipRuntimeGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def hipMemImportFromShareableHandle(self, handle: Any, given: Any, kind: Any) -> int:
        is_by_value = self.version >= 70_100_000
        self.imported.append(given.value if is_by_value else given._obj.value)
        return 0

    def hipMemCreate(self, *_: Any) -> int:
        return 0 if self.version >= 70_200_000 else 1

    def hipGetErrorString(self, error: int) -> bytes:
        return b"invalid argument"


@pytest.mark.parametrize("version", [60_443_484, 70_051_831, 70_100_000, 70_253_211])
def test_hip_finds_a_descriptor_where_its_version_looks_for_it(version: int) -> None:
    backend: Any = HipBackend.__new__(HipBackend)
    backend._hip = Hip(version)
    backend._import(37)
    assert backend._hip.imported == [37]


def test_a_runtime_without_uncached_memory_is_told() -> None:
    backend: Any = HipBackend.__new__(HipBackend)
    backend._properties = _Properties()
    backend._hip = Hip(60_443_484)
    with pytest.raises(RuntimeError, match=r"hipMemCreate: invalid argument; .* from 7\.2 on; this is HIP 6\.4"):
        backend._create(SIZE)
    backend._hip = Hip(70_253_211)
    backend._create(SIZE)


class Recorded:
    """A driver of functions as ctypes calls them, which write down what came."""

    def __init__(self) -> None:
        self.came: list[tuple[Any, ...]] = []
        for name, arguments in _ARGUMENTS.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._recorder(name)))

    def _recorder(self, name: str) -> Any:
        def record(*arguments: Any) -> int:
            self.came.append((name, *arguments))
            return 0

        return record


def test_addresses_and_sizes_reach_hip_whole() -> None:
    """ctypes would pass a number as 32 bits."""
    address, size, stream, event = (1 << 47) + 4096, 1 << 40, (1 << 46) + 8, (1 << 45) + 16
    backend: Any = HipBackend.__new__(HipBackend)
    backend._hip, backend._properties = Recorded(), _Properties()
    backend._granularity()
    backend._create_stream()
    handle = backend._create(size)
    handle.value = (1 << 44) + 32
    backend._export(handle)
    backend._import(37)
    backend._reserve(size, 4096)
    backend._call("MemMap", address, size, 0, handle, 0)
    backend._open_access(address, size)
    backend._call("MemUnmap", address, size)
    backend._call("MemRelease", handle)
    backend._call("MemAddressFree", address, size)
    backend._register(address, size)
    backend._unregister(address)
    backend.waiting_for_value(stream, address, 5)()
    backend.writing_value(stream, address, 1 << 40)()
    rows = {"dst": address, "dst_pitch": size, "src": address + 1, "src_pitch": size + 1}
    backend.copying_2d(**rows, width_bytes=size - 1, height=3, stream=stream)()
    backend.order_streams(stream, event, stream + 1)
    came = {name: arguments for name, *arguments in backend._hip.came}
    assert came.keys() == _ARGUMENTS.keys()
    assert came["hipMemMap"] == [address, size, 0, handle.value, 0]
    assert came["hipMemUnmap"] == came["hipMemAddressFree"] == [address, size]
    assert came["hipMemSetAccess"][:2] == came["hipHostRegister"][:2] == [address, size]
    assert came["hipMemCreate"][1] == came["hipMemAddressReserve"][1] == size
    assert came["hipMemExportToShareableHandle"][1] == came["hipMemRelease"][0] == handle.value
    assert came["hipHostGetDevicePointer"][1] == came["hipHostUnregister"][0] == address
    assert came["hipStreamWaitValue32"] == [stream, address, 5, 0, 0xFFFFFFFF]
    assert came["hipStreamWriteValue64"] == [stream, address, 1 << 40, 0]
    assert came["hipMemcpy2DAsync"] == [address, size, address + 1, size + 1, size - 1, 3, 3, stream]
    assert came["hipEventRecord"] == [event, stream]
    assert came["hipStreamWaitEvent"] == [stream + 1, event, 0]
