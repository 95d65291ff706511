"""``iris-bench env``: what a report of a bug says of a machine."""

from __future__ import annotations

import json
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
import triton
from typer.testing import CliRunner

from iris_bench import cli


def found(*options: str) -> str:
    result = CliRunner().invoke(cli.app, ["env", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_it_says_what_is_installed_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_TIMEOUT_S", "7")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    said = found()
    for part in (metadata.version("torch"), triton.__version__, "greenlet", "tuning cache", "IRIS_TIMEOUT_S", "7"):
        assert part in said
    assert "hidden" not in said
    in_json = json.loads(found("--json"))
    assert in_json["installed"]["torch"] == metadata.version("torch")
    assert in_json["environment"]["IRIS_TIMEOUT_S"] == "7"


def test_it_names_gpus_and_those_they_do_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(name="A GPU", total_memory=80 << 30, multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: one)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda index, peer: {index, peer} != {0, 2})
    gpus = json.loads(found("--json"))["GPUs"]
    assert gpus["0"] == "A GPU, 80 GiB, 132 SMs, compute capability 9.0, does not reach GPU 2"
    assert gpus["1"].endswith("reaches all others")


def test_a_setting_that_makes_no_sense_is_shown_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_DEVICE", "tpu")
    assert "none: unknown device 'tpu' (from IRIS_DEVICE)" in found()
