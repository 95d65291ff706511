"""However the ranks are started, they find each other: torchrun, mpirun, torch's spawn, nothing at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import free_port

from iris_core import PeerError
from iris_core.context.hierarchical import context as hierarchical
from iris_core.context.host import ProcessHost
from iris_core.context.options import ContextOptions
from iris_core.rendezvous import rank_info, unix_socket
from iris_core.rendezvous.control_plane import ControlPlane
from iris_core.rendezvous.topology import Topology
from iris_core.utils import settings

PROGRAMS = Path(__file__).parents[2] / "programs"
# What a shell would not have, but the ranks of a pool, or of the tests' own launcher, do.
UNSET = ("TRITON_INTERPRET", "IRIS_DEVICE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(*command: str | Path, on_gpus: bool = False) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_documentations_first_example_runs_unchanged() -> None:
    output = run(sys.executable, PROGRAMS / "first_example.py", str(free_port()), "cpu")
    assert sorted(output.splitlines()) == ["rank 0 has seen 0", "rank 1 has seen 4096"]


@pytest.mark.gpu
def test_the_documentations_first_example_runs_unchanged_on_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; there are {torch.cuda.device_count()}")
    output = run(sys.executable, PROGRAMS / "first_example.py", str(free_port()), "cuda", on_gpus=True)
    assert {"rank 0 has seen 0", "rank 1 has seen 4096"} <= set(output.splitlines())


def test_torchrun() -> None:
    options = ["--nproc-per-node=2", "--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    output = run(sys.executable, "-m", "torch.distributed.run", *options, PROGRAMS / "meet.py")
    assert sorted(output.splitlines()) == [f"rank {rank} of 2 has met the others" for rank in (0, 1)]


def test_a_context_of_some_of_the_ranks() -> None:
    """Two replicas of two ranks each, as data beside tensor parallelism has them."""
    output = run(sys.executable, PROGRAMS / "replicas.py", str(free_port()))
    lines = [f"process {number}: rank {number % 2} of 2, sums of replica {number // 2}" for number in range(4)]
    assert sorted(output.splitlines()) == lines


class _FirstContexts(dict[str, int]):
    """Counts that stay 0: each thread is a process of its own, with its first context."""

    def __getitem__(self, name: str) -> int:
        return 0


def found_in_a_store(monkeypatch: pytest.MonkeyPatch, hosts: list[str]) -> list[rank_info.RankInfo]:
    """Let ranks of these hosts, a thread each, find each other; return what each knows, by rank."""
    store = torch.distributed.HashStore()
    of_thread = threading.local()
    monkeypatch.setattr(rank_info, "host_name", lambda: of_thread.host)
    monkeypatch.setattr(rank_info, "_contexts_made", _FirstContexts())

    def find(rank: int) -> rank_info.RankInfo:
        of_thread.host = hosts[rank]
        return rank_info._from_store(store, rank, len(hosts), "a test", "all", rank)

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(find, range(len(hosts))))


def test_ranks_of_one_host_take_the_address_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_in_a_store(monkeypatch, ["here", "here"])
    assert len({one.address for one in found}) == 1
    assert [(one.rank, one.world_size, one.hosts) for one in found] == [(0, 2, ()), (1, 2, ())]


def test_ranks_of_several_hosts_know_each_others_and_take_an_address_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_in_a_store(monkeypatch, ["here", "here", "there", "there"])
    (hosts,) = {one.hosts for one in found}
    assert Topology.of(hosts) == Topology(2, 2)
    assert found[0].address == found[1].address != found[2].address == found[3].address
    local = hierarchical._within_host(found[3], Topology.of(hosts))
    assert (local.rank, local.world_size, local.hosts, local.store) == (1, 2, (), None)
    assert local.local_rank == found[3].local_rank


def test_ranks_of_several_hosts_that_have_a_token_make_one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where hosts have different numbers of ranks."""
    monkeypatch.setenv("IRIS_TOKEN", "a secret of all ranks")
    monkeypatch.setenv("IRIS_HOST", "127.0.0.1")
    found = found_in_a_store(monkeypatch, ["here", "here", "there"])
    assert len({one.address for one in found}) == 1
    assert found[0].address.startswith("tcp://127.0.0.1:")
    assert {one.hosts for one in found} == {()}

    def meet(one: rank_info.RankInfo) -> str:
        with contextlib.closing(ControlPlane.connect(one.rank, 3, one.address, timeout_s=60)) as control_plane:
            return control_plane.broadcast("there", 0)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(meet, found)) == ["there"] * 3


def test_hosts_of_different_numbers_of_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_in_a_store(monkeypatch, ["here", "here", "there"])
    with pytest.raises(ValueError, match=r"same number of ranks.*host 0: ranks 0, 1; host 1: rank 2"):
        hierarchical.HierarchicalContext(ProcessHost(), found[0], ContextOptions(1 << 20, "cpu", 1.0, 0, None, False))


def test_a_rank_that_does_not_come_is_named_within_our_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's store would wait for half an hour."""
    monkeypatch.setattr(unix_socket, "CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(PeerError, match="rank 0: no address was put into torchrun's store within 0 s"):
        rank_info._from_store(torch.distributed.HashStore(), 1, 2, "torchrun", "a test of late ranks", 1)


def test_mpirun() -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    beside_python = Path(sys.executable).parent / "mpirun"
    mpirun = beside_python if beside_python.exists() else shutil.which("mpirun")
    if not mpirun:
        pytest.skip("mpirun is not installed")
    output = run(mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, PROGRAMS / "meet.py")
    met = [line for line in output.splitlines() if "has met" in line]
    assert sorted(met) == [f"rank {rank} of 2 has met the others" for rank in (0, 1)]


def test_alone_a_process_is_a_world_of_one() -> None:
    assert run(sys.executable, PROGRAMS / "meet.py") == "rank 0 of 1 has met the others\n"


@pytest.mark.parametrize(("text", "seconds"), [(None, 30.0), ("0", 0.0), ("2.5", 2.5)])
def test_the_limit_of_waits_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float
) -> None:
    monkeypatch.delenv("IRIS_TIMEOUT_S", raising=False)
    if text is not None:
        monkeypatch.setenv("IRIS_TIMEOUT_S", text)
    assert settings.timeout_s() == seconds


def test_an_argument_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_TIMEOUT_S", "7")
    assert settings.timeout_s(2) == 2.0
    assert settings.timeout_s(0) == 0.0


@pytest.mark.parametrize("asked", [-1, float("nan"), float("inf"), 1e7, "soon", [3]])
def test_an_argument_that_is_no_number_of_seconds_is_refused(asked: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout_s is .*takes a number of seconds"):
        settings.timeout_s(asked)


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("IRIS_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=r"IRIS_TIMEOUT_S is .*takes a number of seconds"):
        settings.timeout_s()


def test_a_process_of_which_nothing_says_which_rank_it_is_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*rank_info._MPI_SIZE_VARIABLES, "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("multiprocessing.parent_process", object)
    with pytest.warns(UserWarning, match="a world of one rank; .*init_process_group first"):
        assert rank_info.find_rank_info().world_size == 1
