"""What a GPU's heap takes of the driver it gives back, also where opening it fails half-way."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from iris_core.backends.hip import HipBackend, _Properties
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

    def _map(self, address: int, size: int, handle: Any) -> None:
        self.driver.take("map" if len(self._mapped) else "the first map", ("mapping", address))

    def _open_access(self, address: int, size: int) -> None:
        self.driver.take("access", "access")
        self.driver.held.remove("access")

    def _unmap(self, address: int, size: int) -> None:
        self.driver.held.remove(("mapping", address))

    def _release(self, handle: Any) -> None:
        self.driver.held.remove(handle)

    def _free_range(self, address: int, size: int) -> None:
        assert not [what for what in self.driver.held if what[0] == "mapping"]  # which would keep the range
        self.driver.held.remove(("range", size))


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
