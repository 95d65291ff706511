"""What a GPU's heap takes of the driver it gives back, also where opening it fails half-way."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from iris_core.backends.hip import _ARGUMENTS, HipBackend, _Properties
from iris_core.backends.vmm import Rows, VmmBackend

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

    reserved_bytes = 0
    device = "cuda:1"  # type: ignore[assignment]
    _properties = _fd_type = _granularity_kind = None

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._segments, self._shared, self._base = {}, [], 0
        self.mapped = 0
        self.zeroed: list[tuple[int, ...]] = []

    def synchronize(self) -> None:
        pass

    def _get(self, name: str, *arguments: Any) -> Any:
        if name == "MemGetAllocationGranularity":
            return SIZE
        if name == "MemCreate":
            return self.driver.take("create", "own memory")
        if name == "MemExportToShareableHandle":
            fd = os.open("/dev/null", os.O_RDONLY)
            return fd if self.driver.failing != "export" else self.driver.take("export", os.close(fd))
        if name == "MemImportFromShareableHandle":
            os.fstat(arguments[0])  # it is open
            return self.driver.take("import", f"memory of {arguments[0]}")
        assert name == "MemAddressReserve"
        self.driver.take("reserve", ("range", arguments[0]))
        return 1 << 40

    def _call(self, name: str, *arguments: Any) -> None:
        if name == "MemMap":
            self.driver.take("map" if self.mapped else "the first map", ("mapping", arguments[0]))
            self.mapped += 1
        elif name == "MemUnmap":
            self.driver.held.remove(("mapping", arguments[0]))
        elif name == "MemRelease":
            self.driver.held.remove(arguments[0])
        elif name == "MemsetD8":
            assert ("mapping", arguments[0]) in self.driver.held
            self.zeroed.append((arguments[0] - self._base, *arguments[1:]))
        else:
            assert name == "MemAddressFree"
            assert not [what for what in self.driver.held if what[0] == "mapping"]  # which would keep the range
            self.driver.held.remove(("range", arguments[1]))

    def _open_access(self, address: int, size: int) -> None:
        self.driver.take("access", "access")
        self.driver.held.remove("access")


Backend.__abstractmethods__ = frozenset()  # the rest is not called


def without_numbers(held: list[Any]) -> list[str]:
    """Return what is held, in order, without the numbers of imported descriptors."""
    return sorted(re.sub("memory of [0-9]+", "", str(one)) for one in held)


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

    def agree(self, what: str, value: Any) -> None:
        if self.failing == "agree":
            raise ValueError(f"{what} must be the same on all ranks")

    def exchange_fds(self, fd: int) -> list[int]:
        if self.failing == "exchange":
            raise RuntimeError("rank 0 has left")
        return [os.dup(fd) for _ in range(self.world_size)]


@pytest.mark.parametrize("own", ["", "create", "export", "import", "reserve", "the first map", "map", "access"])
@pytest.mark.parametrize("peers", ["", "reserve", "find", "agree", "exchange", "map"])
def test_what_was_taken_is_given_back(own: str, peers: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    backend = Backend(Driver(own))
    group: Any = Group(peers)
    opening = contextlib.nullcontext() if not own + peers else pytest.raises((RuntimeError, ValueError))
    with opening:
        backend.open_window(group, SIZE)
        assert backend.map(group, lambda: backend.own_memory(SIZE), lambda size: 0) == (0, 0)
    assert set(os.listdir("/proc/self/fd")) <= before  # what other tests left may be collected meanwhile
    if not own + peers:
        assert len(backend.driver.held) == 2 * WORLD_SIZE + 1
    backend.close_window()
    assert backend.driver.held == []
    backend.close_window()  # which finds nothing


@pytest.mark.parametrize("own", ["", "create", "export", "import", "map", "access"])
def test_growth_that_fails_leaves_the_heap_as_it_was(own: str) -> None:
    backend = Backend(Driver())
    group: Any = Group()
    backend.open_window(group, SIZE)
    backend.map(group, lambda: backend.own_memory(SIZE), lambda size: 0)
    held = list(backend.driver.held)
    backend.driver.failing = own
    with contextlib.nullcontext() if not own else pytest.raises(RuntimeError):
        backend.map(group, lambda: backend.own_memory(SIZE), lambda size: SIZE)
        assert len(backend.driver.held) == len(held) + 2 * WORLD_SIZE
        backend.unmap(SIZE)
    assert sorted(map(str, backend.driver.held)) == sorted(map(str, held))


@pytest.mark.parametrize("failing", ["", "create", "export", "import", "map", "access"])
def test_memory_is_mapped_again_at_the_same_addresses(failing: str) -> None:
    """Of the heap at first, and of what it grew by."""
    backend = Backend(Driver())
    group: Any = Group()
    backend.open_window(group, 3 * SIZE)
    segments = {0: SIZE, SIZE: 2 * SIZE}
    for place, size in segments.items():
        backend.map(group, partial(backend.own_memory, size), lambda size, place=place: place)
    held = without_numbers(backend.driver.held)
    for place, size in segments.items():
        backend.release_memory(place, size)
    addresses = [("range", WORLD_SIZE * 3 * SIZE)]
    assert backend.driver.held == addresses
    backend.map_memory(group, 0, SIZE)
    if failing:
        backend.driver.failing = failing
        with pytest.raises(RuntimeError, match=failing):
            backend.map_memory(group, SIZE, 2 * SIZE)
        backend.driver.failing = ""
        for place, size in segments.items():
            backend.release_memory(place, size)
        assert backend.driver.held == addresses
        backend.map_memory(group, 0, SIZE)
    backend.map_memory(group, SIZE, 2 * SIZE)
    assert without_numbers(backend.driver.held) == held
    assert backend.zeroed[-2:] == [(RANK * 3 * SIZE, 0, SIZE), (RANK * 3 * SIZE + SIZE, 0, 2 * SIZE)]
    backend.close_window()
    assert backend.driver.held == []


def test_a_missing_access_names_both_devices() -> None:
    backend = Backend(Driver("access"))
    group: Any = Group()
    backend.open_window(group, SIZE)
    with pytest.raises(RuntimeError, match=r"cuda:1 has no access to the memory of rank 0: .*nvidia-smi topo"):
        backend.map(group, lambda: backend.own_memory(SIZE), lambda size: 0)


class Hip:
    """A runtime of a version, which has uncached memory from 7.2 on."""

    def __init__(self, version: int) -> None:
        self.version = version

    def hipRuntimeGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def hipMemCreate(self, *_: Any) -> int:
        return 0 if self.version >= 70_200_000 else 1

    def hipGetErrorString(self, error: int) -> bytes:
        return b"invalid argument"


def test_a_runtime_without_uncached_memory_is_told() -> None:
    backend: Any = HipBackend.__new__(HipBackend)
    backend._hip = Hip(60_443_484)
    with pytest.raises(RuntimeError, match=r"hipMemCreate: invalid argument; .* from 7\.2 on; this is HIP 6\.4"):
        backend._get("MemCreate", SIZE, _Properties(), 0)
    backend._hip = Hip(70_253_211)
    backend._get("MemCreate", SIZE, _Properties(), 0)


BASE, HANDLE, STREAM, EVENT, BUFFER = ((1 << bit) + 4096 for bit in range(43, 48))  # all past 32 bits
HEAP = 1 << 40


class Recorded:
    """A driver of functions as ctypes calls them; it gives what such a driver would, and writes down what it is given.

    What points to where a result goes is not written down.
    """

    def __init__(self) -> None:
        self.came: dict[str, list[Any]] = {}
        given = {
            "hipHostGetDevicePointer": BUFFER,
            "hipMemAddressReserve": BASE,
            "hipMemCreate": HANDLE,
            "hipMemExportToShareableHandle": os.open("/dev/null", os.O_RDONLY),
            "hipMemGetAllocationGranularity": 4096,
            "hipMemImportFromShareableHandle": HANDLE + 1,
            "hipRuntimeGetVersion": 70_253_211,
            "hipStreamCreateWithFlags": STREAM,
        }
        for name, types in _ARGUMENTS.items():
            function = ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._recorder(name, given.get(name)))
            setattr(self, name, function)

    def _recorder(self, name: str, given: int | None) -> Any:
        def record(*arguments: Any) -> int:
            if given is not None:
                arguments[0].contents.value = given
            self.came[name] = [one for one in arguments if not hasattr(one, "contents")]
            return 0

        return record


def test_addresses_and_sizes_reach_hip_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes would pass a number as 32 bits."""
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    backend: Any = HipBackend.__new__(HipBackend)
    backend._hip, backend._properties, backend.device = Recorded(), _Properties(), SimpleNamespace()
    backend._segments, backend._shared, backend._base = {}, [], 0
    group: Any = Group()
    backend.open_window(group, HEAP)
    backend.map_memory(group, 0, HEAP)
    memory: Any = SimpleNamespace(data_ptr=lambda: BUFFER, nbytes=HEAP)
    assert backend.share_with_kernels(memory) == BUFFER
    assert backend._create_stream() == STREAM
    assert backend._get("RuntimeGetVersion") == 70_253_211
    backend.waiting_for_value(STREAM, BUFFER, 5)()
    backend.writing_value(STREAM, BUFFER, HEAP)()
    backend.copying_2d(STREAM, Rows(BUFFER, HEAP, BUFFER + 1, HEAP + 1, HEAP - 1, 3))()
    backend.order_streams(STREAM, EVENT, STREAM + 1)
    backend.close_window()
    last = BASE + (WORLD_SIZE - 1) * HEAP
    descriptor = backend._hip.came["hipMemImportFromShareableHandle"][0]
    assert backend._hip.came == {
        "hipEventRecord": [EVENT, STREAM],
        "hipHostGetDevicePointer": [BUFFER, 0],
        "hipHostRegister": [BUFFER, HEAP, 3],
        "hipHostUnregister": [BUFFER],
        "hipMemAddressFree": [BASE, WORLD_SIZE * HEAP],
        "hipMemAddressReserve": [WORLD_SIZE * HEAP, 2 << 20, None, 0],
        "hipMemCreate": [HEAP, 0],
        "hipMemExportToShareableHandle": [HANDLE, 1, 0],
        "hipMemGetAllocationGranularity": [1],
        "hipMemImportFromShareableHandle": [descriptor, 1],  # the number itself, as HIP takes it from 7.1 on
        "hipMemMap": [last, HEAP, 0, HANDLE + 1, 0],
        "hipMemRelease": [HANDLE],
        "hipMemSetAccess": [last, HEAP, 1],
        "hipMemUnmap": [BASE, HEAP],
        "hipMemsetD8": [BASE + RANK * HEAP, 0, HEAP],
        "hipMemcpy2DAsync": [BUFFER, HEAP, BUFFER + 1, HEAP + 1, HEAP - 1, 3, 3, STREAM],
        "hipRuntimeGetVersion": [],
        "hipStreamCreateWithFlags": [1],
        "hipStreamWaitEvent": [STREAM + 1, EVENT, 0],
        "hipStreamWaitValue32": [STREAM, BUFFER, 5, 0, 0xFFFFFFFF],
        "hipStreamWriteValue64": [STREAM, BUFFER, HEAP, 0],
    }
    assert backend._hip.came.keys() == _ARGUMENTS.keys()
